"""predict: the peak of each phase of a GRPO step, from the terms of the memory model.

Exists to say which terms are live together; the terms themselves are in the modules beside. Called for every
candidate plan, so it stays plain arithmetic.
"""

from dataclasses import dataclass

from ..shapes import Shape
from . import activations as act
from . import generation, head, states
from .setup import Setup


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes of one GPU as torch.cuda.max_memory_allocated would read them."""

    phases: dict[str, int]
    """Peak of each phase, in the order of the step."""
    static: int
    """What is live between phases."""

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak; the earliest of equals."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> int:
        """The highest phase."""
        return max(self.phases.values())

    @property
    def dynamic(self) -> int:
        """What the highest phase adds to what is always live; only this part fragments."""
        return self.peak - self.static


def predict(shape: Shape, setup: Setup, resident: int = 0, scoring: int = 0) -> Prediction:
    """Peaks of all phases.

    Args:
        shape: the policy's shape.
        setup: the run's settings.
        resident: bytes of reward models on the GPU.
        scoring: temporaries of the reward models' forward pass, in bytes.
    """
    static = states.static(shape, setup) + resident
    live = states.live_parameters(shape, setup)
    waiting = states.gradients(shape, setup) if setup.accumulates or setup.partitions else 0
    all_gradients = states.gradients(shape, setup)
    peaks = {
        "load": 0,
        "generate": max(generation.generation_peak(shape, setup), scoring),
        "reference": live + reference_peak(shape, setup),
        "forward": live + waiting + forward_peak(shape, setup),
        "backward": live + backward_peak(shape, setup, waiting, all_gradients),
        "step": states.step_buffers(shape, setup) if setup.zero else all_gradients,
    }
    return Prediction({name: round(static + peak) for name, peak in peaks.items()}, round(static))


def forward_peak(shape: Shape, setup: Setup) -> float:
    """All saved activations, beside the head's tile or one layer's temporaries, and autocast's cache.

    The cache is counted with checkpointing only: without it the same casts are already among the saved tensors.
    """
    cached = act.cast_cache(shape, setup) if setup.checkpointing else 0
    largest = max(head.forward_peak(shape, setup), act.forward_transient(shape, setup))
    return act.saved(shape, setup) + act.mask(setup) + largest + cached


def reference_peak(shape: Shape, setup: Setup) -> float:
    """A pass without gradients, by the reference or by the policy itself; 0 when there is neither."""
    own_pass = setup.scores_old_policy
    if setup.reference == "None" and not own_pass:
        return 0
    cached = act.cast_cache(shape, setup) if own_pass else 0
    live = states.live_parameters(shape, setup) if setup.reference == "Sharded" else 0
    layer = act.no_grad_transient(shape, setup)
    last = act.checkpoint(shape, setup) + head.forward_peak(shape, setup)
    return live + states.visiting_reference(shape, setup) + act.mask(setup) + cached + max(layer, last)


def backward_peak(shape: Shape, setup: Setup, waiting: float, all_gradients: float) -> float:
    """The highest of four moments: the head's backward, the top layer's, the bottom layer's, the embedding's.

    Args:
        shape: the policy's shape.
        setup: the run's settings.
        waiting: gradients that were there before this micro-batch.
        all_gradients: all gradients of this rank once the micro-batch is over.
    """
    matrix = 0 if setup.lora else setup.weight_bytes
    fresh = not (setup.accumulates or setup.partitions)
    head_gradient = shape.head * matrix
    tied = head_gradient if shape.tied else 0
    down = shape.hidden * shape.intermediate * matrix
    mask, saved = act.mask(setup), act.saved(shape, setup)
    stream = act.checkpoint(shape, setup)
    layer = act.layer_backward(shape, setup)

    at_head = waiting + saved + mask + head.backward_peak(shape, setup)
    kept = head_gradient if fresh else tied
    at_top = waiting + kept + down + mask + (
        saved + layer if setup.checkpointing else saved + act.backward_transient(shape, setup) + stream
    )  # fmt: skip
    if fresh:
        later = 0 if shape.tied else head_gradient
        rest = shape.layer_matrices * matrix - down
        done = all_gradients - later - rest
    else:
        done = waiting + down + tied
    at_bottom = done + mask + layer + (stream if setup.checkpointing else 0)
    pending = tied + (0 if fresh else head_gradient)
    at_embedding = (waiting if setup.partitions or setup.lora else all_gradients) + pending + stream + mask
    return max(at_head, at_top, at_bottom, at_embedding)
