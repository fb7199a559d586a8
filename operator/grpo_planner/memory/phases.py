"""Predictor: the peak of each phase of a GRPO step, from the terms of the memory model. Also what
the device must have for it, and what a checkpoint takes of the disk.

The terms are in the modules beside; here is which of them are live together. One plan asks for
thousands of predictions that differ in a setting or two, so what settings share is worked out once.

CONTEXT, WORKSPACES and FRAGMENTATION with expandable segments were measured on one H100
(docs/internals/gpu.md); the others are assumed (docs/internals/memory-model.md, "assumed").
"""

from collections.abc import Callable
from typing import NamedTuple

from grpo_api.text.units import GIB, MIB

from ..model.shapes import Shape
from . import activations as act
from . import engine, generation, layer_kinds, states
from .setup import Setup
from .states import optimizer_state, trained_bytes, trained_parameters


class Prediction(NamedTuple):
    """Bytes of one GPU as torch.cuda.max_memory_allocated would read them."""

    phases: dict[str, int]
    """Peak of each phase, in the order of the step."""
    static: int
    """What is live at all times."""

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
        """Bytes that the highest phase adds to the static ones; only these can fragment."""
        return self.peak - self.static

    def with_factors(self, factor: Callable[[str], float]) -> "Prediction":
        """The prediction with each phase as much higher as a job has found it to be."""
        phases = {name: round(size * factor(name)) for name, size in self.phases.items()}
        return Prediction(phases, self.static)


class StateBytes(NamedTuple):
    """Bytes of model states, and of what a step adds to them; the same for all sizes of a
    micro-batch."""

    static: float
    """What is live between phases."""
    loading_extra: float
    """What loading adds to it."""
    live_parameters: float
    """Parameters gathered while computing."""
    gradients: float
    """All gradients of this rank once a micro-batch is over."""
    passing_gradients: float
    """Buckets of gradients, and gradients larger than one, during a backward pass."""
    kept_gradients: float
    """Gradients that are offloaded and yet stay until a backward pass is over."""
    step: float
    """What the optimizer's step adds."""


class PassBytes(NamedTuple):
    """Bytes that the passes over one micro-batch add to states and gradients; the same for any
    number of processes."""

    first_gradient: float
    """The first matrix whose gradient a layer's backward pass makes, while the layer's activations
    are still all there."""
    forward: float
    """All saved activations beside the highest temporaries."""
    scoring: float
    """A pass without gradients."""
    casts: float
    """Autocast's cache, and experts as an adapter changes them, during a pass of the policy without
    gradients."""
    at_head: float
    """Backward, at the head."""
    at_top: float
    """Backward, at the top layer."""
    at_bottom: float
    """Backward, at the bottom layer."""
    at_embedding: float
    """Backward, at the embedding."""


class EngineBytes(NamedTuple):
    """A vLLM engine on the trainer's GPU."""

    resting: int
    """In every phase."""
    waking: int
    """What it takes besides while it is sent weights and samples."""
    sync: float
    """What the trainer takes to send them."""


class Predictor:
    """Predicts setups of one model; terms that setups share are worked out once."""

    def __init__(self, shape: Shape, resident: int = 0) -> None:
        """`resident` is what the GPU holds in every phase beside the policy's own, in bytes."""
        self._shape = shape
        self._resident = resident
        self._states: dict[tuple[object, ...], StateBytes] = {}
        self._passes: dict[tuple[object, ...], PassBytes] = {}
        self._generation: dict[tuple[object, ...], float] = {}
        self._engines: dict[tuple[object, ...], EngineBytes] = {}

    def floor(self, setup: Setup) -> Prediction:
        """What the passes alone take: less than any setup with the same sequences, precision and
        adapter."""
        passes = self._passes_of(setup)
        generation_bytes = 0 if setup.engine else self._generation_of(setup)
        least = max(passes.forward, passes.at_head, passes.at_embedding, generation_bytes)
        return Prediction({"backward": round(least)}, 0)

    def predict(self, setup: Setup, scoring: int = 0) -> Prediction:
        """Peaks of all phases; `scoring` is the temporaries of the reward models' forward pass, in
        bytes."""
        shape = self._shape
        state = self._states_of(setup)
        static = state.static + self._resident
        base = states.offloaded_base(shape, setup)
        if setup.engine:
            sampler = self._engine_of(setup)
            static += sampler.resting
            sampling = float(sampler.waking - base)
            sync = round(static + sampling + sampler.sync)
        else:
            gathered = generation.gathered_policy(shape, setup)
            sampling = gathered + self._generation_of(setup)
            sync = 0
        training = self._training_phases(setup, state, static)
        phases = {
            "load": training["load"],
            "sync": sync,
            "generate": round(static + max(sampling, scoring)),
            **training,
        }
        # A base that leaves is allocated again in every step, so that it can fragment.
        return Prediction(phases, round(static - base))

    def training(self, setup: Setup) -> Prediction:
        """Peaks of the phases to which whatever samples the completions can only add."""
        state = self._states_of(setup)
        static = state.static + self._resident
        return Prediction(self._training_phases(setup, state, static), round(static))

    def _training_phases(self, setup: Setup, state: StateBytes, static: float) -> dict[str, int]:
        """Peaks of the phases after sampling, by name; `static` is what is live at all times, in
        bytes."""
        shape = self._shape
        passes = self._passes_of(setup)
        waiting = state.gradients if setup.is_accumulating else 0
        live = state.live_parameters
        reference = live + reference_peak(shape, setup, passes)
        forward = live + waiting + passes.forward
        backward = live + backward_peak(shape, setup, passes, waiting, state)
        return {
            "load": round(static + state.loading_extra),
            "reference": round(static + reference),
            "forward": round(static + forward),
            "backward": round(static + backward),
            "step": round(static + state.step),
        }

    # Each key has the settings that its terms depend on, and no others: with one too few another
    # setup's number is taken, with one too many the same number is worked out again.

    def _states_of(self, setup: Setup) -> StateBytes:
        key = (
            setup.precision, setup.world, setup.zero, setup.offload, setup.lora_rank,
            setup.lora_targets,
            setup.eight_bit, setup.reference, setup.is_accumulating, setup.gather,
        )  # fmt: skip
        if key not in self._states:
            self._states[key] = state_bytes(self._shape, setup)
        return self._states[key]

    def _passes_of(self, setup: Setup) -> PassBytes:
        key = (
            setup.precision, setup.prompt, setup.completion, setup.micro_batch, setup.lora_rank,
            setup.lora_targets,
            setup.checkpointing, self._shape.experts and (setup.is_accumulating,
            setup.is_partitioned),
        )  # fmt: skip
        if key not in self._passes:
            self._passes[key] = pass_bytes(self._shape, setup)
        return self._passes[key]

    def _generation_of(self, setup: Setup) -> float:
        key = (
            setup.precision, setup.prompt, setup.completion, setup.generation_batch,
            setup.lora_rank,
            setup.lora_targets, setup.sorts_words,
        )  # fmt: skip
        if key not in self._generation:
            self._generation[key] = generation.peak(self._shape, setup)
        return self._generation[key]

    def _engine_of(self, setup: Setup) -> "EngineBytes":
        key = (
            setup.engine, setup.precision, setup.generation_batch, setup.world, setup.zero,
            setup.lora_rank,
            setup.lora_targets,
        )  # fmt: skip
        if key not in self._engines:
            self._engines[key] = engine_bytes(self._shape, setup)
        return self._engines[key]


def predict(shape: Shape, setup: Setup, resident: int = 0, scoring: int = 0) -> Prediction:
    """Peaks of all phases of one setup; arguments as for Predictor."""
    return Predictor(shape, resident).predict(setup, scoring)


def engine_bytes(shape: Shape, setup: Setup) -> EngineBytes:
    """The engine of a setup that has one."""
    return EngineBytes(
        resting=engine.resting_bytes(shape, setup),
        waking=engine.waking_bytes(shape, setup),
        sync=engine.sync_bytes(shape, setup),
    )


def state_bytes(shape: Shape, setup: Setup) -> StateBytes:
    """The states of a setup."""
    static = states.static_bytes(shape, setup)
    gradients = states.gradients(shape, setup)
    # The weights are loaded before there is an optimizer; ZeRO-3 makes its moments when all else is
    # there.
    loading = states.loading_bytes(shape, setup)
    first_gradients = states.first_gradients(shape, setup)
    live_parameters = states.live_parameters(shape, setup)
    gathering_buffers = states.gathering_buffers(shape, setup)
    passing_buckets = states.passing_buckets(shape, setup)
    passing_gradients = states.passing_gradients(shape, setup)
    kept_gradients = states.kept_gradients(shape, setup)
    # ZeRO's own buffers include the gradients; without ZeRO fused AdamW works in place on all of
    # them.
    step = states.step_buffers(shape, setup) if setup.zero else gradients
    return StateBytes(
        static=static,
        loading_extra=max(loading - static, first_gradients),
        live_parameters=live_parameters + gathering_buffers,
        gradients=gradients,
        passing_gradients=passing_buckets + passing_gradients,
        kept_gradients=kept_gradients,
        step=step,
    )


def pass_bytes(shape: Shape, setup: Setup) -> PassBytes:
    """The passes over one micro-batch."""
    mask = layer_kinds.mask(shape, setup)
    saved = act.saved_activations(shape, setup)
    stream = act.checkpoint(shape, setup)
    layer = act.layer_backward(shape, setup)
    head_forward = act.forward_peak(shape, setup)
    casts = act.cast_cache(shape, setup)
    # Without checkpointing the cached casts are already among the saved tensors.
    unsaved_casts = casts if setup.checkpointing else 0
    down = act.first_gradient(shape, setup)
    # A checkpointed layer is run again with all that it saves. Otherwise that is in `saved`, and
    # only the temporaries and the gradient of the residual stream are new.
    top = layer if setup.checkpointing else act.backward_transient(shape, setup) + stream
    forward_transient = act.forward_transient(shape, setup)
    no_grad_transient = act.no_grad_transient(shape, setup)
    effective_weights = layer_kinds.effective_weights(shape, setup)
    head_backward = act.backward_peak(shape, setup)
    highest_temporaries = max(head_forward, forward_transient)
    # The layers above have given their activations back; a checkpoint of the bottom one is still
    # there while it runs.
    last_checkpoint = stream if setup.checkpointing else 0
    below_layers = act.embeddings(shape, setup)
    return PassBytes(
        first_gradient=down,
        forward=saved + mask + highest_temporaries + unsaved_casts,
        scoring=mask + max(no_grad_transient, stream + head_forward),
        casts=casts + effective_weights,
        at_head=saved + mask + head_backward,
        at_top=down + mask + saved + top,
        at_bottom=mask + layer + last_checkpoint + below_layers,
        at_embedding=stream + mask,
    )


def reference_peak(shape: Shape, setup: Setup, passes: PassBytes) -> float:
    """The higher of two passes without gradients, which come one after the other: that of the
    policy itself, and that of the reference. 0 when there is neither."""
    own_pass = passes.scoring + passes.casts if setup.scores_old_policy else 0
    if setup.reference == "None":
        return own_pass
    # A Sharded reference is an engine of its own: its gathered modules come beside the policy's.
    live = states.live_parameters(shape, setup) if setup.reference == "Sharded" else 0
    visiting = states.visiting_reference(shape, setup)
    return max(own_pass, live + visiting + passes.scoring)


def backward_peak(
    shape: Shape, setup: Setup, passes: PassBytes, waiting: float, state: StateBytes
) -> float:
    """The highest of four moments, in bytes beside states and gathered parameters: the head's
    backward, the top layer's, the bottom layer's, the embedding's.

    From the top down activations go and gradients come, so the peak is at an end: at the top where
    activations weigh more (many tokens), at the bottom where gradients do (a big model without
    ZeRO). Which gradients are there depends on the micro-batch. In a first one without ZeRO
    ("fresh") each is made and stays. Later ones are added to: a new gradient lives only until it is
    added, so there is one at a time beside those that wait. ZeRO-2 makes a second partition for
    each micro-batch as soon as a gradient has been reduced, and adds it at the end.

    `waiting`: gradients that were there before this micro-batch.
    """
    matrix = 0 if setup.has_lora else setup.weight_bytes
    fresh = not (setup.is_accumulating or setup.is_partitioned)
    head_gradient = shape.head * matrix
    # A tied matrix gets its gradient in two parts: the head's waits through all layers for the
    # embedding's.
    tied = head_gradient if shape.tied else 0
    down = passes.first_gradient
    second_partition = state.gradients if setup.is_partitioned else 0
    reduced = waiting + second_partition + state.passing_gradients
    if fresh:
        # At the bottom layer all but two are made: the input embedding's, unless it is the head's,
        # and the rest of the layer's own after its down projection.
        later = 0 if shape.tied else head_gradient
        rest = shape.layer_matrices * matrix - down
        finished_gradients = state.gradients - later - rest
    else:
        finished_gradients = reduced + down + tied
    # At the embedding its gradient is made whole, V * h, beside the tied head's part or beside the
    # one it is added to. An offloaded one leaves once both are one.
    pending = tied + (0 if fresh else head_gradient)
    # An offloaded gradient leaves the GPU when the next ones are there, and its norm is taken
    # before it does, in the last micro-batch; in those before it none leaves.
    norm = states.gradient_norm(shape, setup) if setup.offload else 0
    leaving = norm + head_gradient if norm else 0
    of_head = head_gradient if fresh else tied
    # Full training without ZeRO has made all its gradients by then.
    holds_reduced = setup.is_partitioned or setup.has_lora
    at_end = reduced if holds_reduced else state.gradients
    leaving_or_head = max(leaving, of_head)
    of_embedding = max(pending + state.kept_gradients, leaving)
    at_head = waiting + passes.at_head
    at_top = reduced + leaving_or_head + passes.at_top
    at_bottom = finished_gradients + state.kept_gradients + passes.at_bottom
    at_embedding = at_end + of_embedding + passes.at_embedding
    return max(at_head, at_top, at_bottom, at_embedding)


CONTEXT = round(0.7 * GIB)
"""CUDA context with the kernels of torch and cuBLAS: 0.67 GiB after one product on an H100."""
WORKSPACES = 64 * MIB
"""Two workspaces of cuBLAS, of the main thread and of the backward pass's thread, 32 MiB each on
Hopper and Blackwell (torch, CublasHandlePool.cpp; earlier GPUs have 8 MiB). torch allocates them,
so each phase has them: on an H100 all phases were 59 to 71 MiB above the other terms."""
COMMUNICATOR = round(0.4 * GIB)
"""NCCL's buffers of one communicator."""
FRAGMENTATION = {True: 0.06, False: 0.15}
"""Share of what comes and goes that the caching allocator can't reuse, with expandable segments and
without. Without, a freed block serves requests of its own size and smaller, and completions of a
new length ask for new sizes. With them an H100 held up to 18 % beside the context where memory was
plentiful; the margin has the rest."""
MARGIN = {"Exact": 0.05, "Catalogue": 0.05, "Estimated": 0.10}
"""Share of the allocated bytes kept free, by where the shape came from."""


def device_bytes(prediction: Prediction, world: int, margin: float, *, expandable: bool) -> int:
    """Bytes that a GPU must have: allocated bytes with margin, fragmentation, CUDA context and
    communicator.

    `margin`: share of the allocated bytes kept free; `expandable`: whether torch's allocator has
    expandable segments.
    """
    communicator = COMMUNICATOR if world > 1 else 0
    # What stays allocated is never returned to the allocator, so only the rest can fragment.
    dynamic = prediction.dynamic
    fragments = FRAGMENTATION[expandable] * dynamic
    allocated = (prediction.static + dynamic) * (1 + margin) + fragments
    return round(allocated) + CONTEXT + communicator


def whole_mib(count: int) -> int:
    """Bytes rounded up to whole MiB: a pod's request then reads well, and the scheduler's sums of
    it are exact."""
    return -(-count // MIB) * MIB


def checkpoint_bytes(shape: Shape, setup: Setup, drifting_reference: bool) -> int:
    """Disk of one checkpoint: weights (the adapter's under LoRA), optimizer state and a drifting
    reference."""
    trained = trained_parameters(shape, setup)
    weights = trained * trained_bytes(setup)
    moments = 12 * trained if setup.zero else optimizer_state(shape, setup)
    reference = shape.parameters * setup.weight_bytes if drifting_reference else 0
    return round(weights + moments + reference)


def export_bytes(shape: Shape, setup: Setup, merged: bool) -> int:
    """Disk of the exported weights: the model's, or under LoRA the adapter's unless it is merged
    into its base."""
    if setup.has_lora and not merged:
        return trained_parameters(shape, setup) * trained_bytes(setup)
    return shape.parameters * setup.weight_bytes
