"""Host memory of a pod: its processes, the weights while they load, what offloading keeps there,
and trackers.

Sources: DeepSpeed 0.19.8 (stage_1_and_2.py, stage3.py), whose buffers were read off live gloo
ranks; torch 2.13 (CachingHostAllocator.h) for the size of pinned ones. PROCESS and CPU_PROCESS are
assumptions (docs/internals/memory-model.md).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from grpo_api.spec.tracking import TABLE_TRACKERS, TrackerName, TrackingSpec
from grpo_api.text.units import GIB, MIB

from ..model.shapes import Shape
from . import states
from .setup import Setup
from .trained_tensors import fullest_rank, largest_trained, trained_matrices, trained_vectors

PROCESS = round(3 * GIB)
"""Host memory of one GPU process without weights: torch, CUDA libraries, transformers, data."""
CPU_PROCESS = GIB
"""The same without CUDA."""
ENGINE_PROCESS = GIB
"""What a colocated vLLM engine adds to it (assumed)."""
CPU_ENGINE_PROCESS = round(0.5 * GIB)
"""The same without CUDA: 0.43 GiB beside its weights and cache (measured, vLLM 0.30)."""
TRACKER_PROCESS: Mapping[TrackerName, int] = {
    "wandb": 140 * MIB,
    "mlflow": 200 * MIB,
    "trackio": 100 * MIB,
    "tensorboard": 80 * MIB,
}
"""What a tracker adds to rank 0's pod: VmRSS of its process and those that it starts after 300 rows
of 60 numbers (measured: 136, 197, 98 and 80 MiB; W&B offline, servers for MLflow and Trackio)."""
TRACKER_TABLES = 95 * MIB
"""What tables of completions add to one that takes them: 75 and 93 MiB after 20 tables of 0.5 MB
(measured in the same way)."""


class PodBytes(NamedTuple):
    """Bytes of host memory of one pod, whatever the number of its processes."""

    of_rank0: float
    """Those of rank 0 alone, which may be in any pod."""
    per_process: float

    def total(self, processes: int) -> int:
        """Those of a pod with `processes` processes."""
        return round(self.of_rank0 + processes * self.per_process)


def host_bytes(shape: Shape, setup: Setup, processes: int) -> int:
    """Bytes of host memory of one pod with `processes` processes."""
    return pod_bytes(shape, setup).total(processes)


def pod_bytes(shape: Shape, setup: Setup) -> PodBytes:
    """What the pods of a setup take of their nodes.

    Loading holds the weights once per process, before the optimizer's state and the copy of an
    offloaded base are made; an offloaded reference holds its weights. Saving under ZeRO-2 copies
    them to the host on every rank, beside the offloaded state (accelerate's get_state_dict). Under
    ZeRO-3 a process holds its partition and a few modules, and rank 0, which may be in any pod, the
    whole model besides: all files while it loads, and what it writes when it saves.
    """
    whole = shape.parameters * setup.weight_bytes
    partition = whole / setup.world
    few_modules = 3 * shape.largest_module * setup.weight_bytes
    loading = partition + few_modules if setup.zero == 3 else whole
    reference = 0.0
    if setup.reference == "Offload":
        # Without ZeRO-3 it is one block, which is locked as it is.
        reference = pinned_partitions(shape, setup) if setup.zero == 3 else whole
    of_rank0 = whole if setup.zero == 3 else 0
    saving = whole if setup.zero == 2 else 0
    base = states.offloaded_base(shape, setup)
    state = offloaded_state(shape, setup) + saving + base
    has_engine_inside = setup.engine is not None and setup.engine.kind == "Colocated"
    engine = ENGINE_PROCESS if has_engine_inside else 0
    # Loading is over before the optimizer's state is made, so a process has the larger of the two.
    per_process = PROCESS + engine + max(loading, state) + reference
    return PodBytes(of_rank0, per_process)


def pinned_partitions(shape: Shape, setup: Setup) -> int:
    """Bytes of one rank's share of all weights on the host, which DeepSpeed pins tensor by tensor.

    Norms and biases are many and small; each takes less than twice its bytes.
    """
    shares = [setup.weight_bytes * -(-size // setup.world) for size in trained_matrices(shape, 0)]
    of_vectors = 2 * setup.weight_bytes * trained_vectors(shape, 0) // setup.world
    return sum(map(pinned_bytes, shares)) + of_vectors


def tracker_bytes(tracking: TrackingSpec | None) -> int:
    """Host memory of a run's trackers, which are rank 0's."""
    if tracking is None:
        return 0
    names = [name for name, _ in tracking.trackers]
    with_tables = [name for name in names if tracking.samples and name in TABLE_TRACKERS]
    return sum(TRACKER_PROCESS[name] for name in names) + TRACKER_TABLES * len(with_tables)


def offloaded_state(shape: Shape, setup: Setup, *, rounded: bool = True) -> int:
    """Bytes of one rank's offloaded optimizer: 18 per parameter and rank, ZeRO-2 accumulating 20.

    `rounded`: pinned buffers as large as torch makes them. On a CPU, where the terms are measured,
    none is pinned.
    """
    if not setup.offload:
        return 0
    size = pinned_bytes if rounded else int
    if setup.zero == 3:
        return zero_3_state(shape, setup, size)
    return zero_2_state(shape, setup, size)


def zero_2_state(shape: Shape, setup: Setup, size: Callable[[int], int]) -> int:
    """ZeRO-2's buffers: float32 master and gradient, moments, weights on their way to the GPU, a
    tensor's gradient.

    All but torch's moments are pinned; parameters with and without weight decay have their own.
    """
    largest = largest_trained(shape, setup.lora_rank, setup.lora_targets)
    total = size(setup.weight_bytes * largest)
    with_decay = sum(trained_matrices(shape, setup.lora_rank, setup.lora_targets))
    without_decay = trained_vectors(shape, setup.lora_rank)
    for elements in (with_decay, without_decay):
        partition = -(-elements // setup.world)
        master_and_gradient = 2 * size(4 * partition)
        narrow_weights = size(setup.weight_bytes * partition)
        moments = 8 * partition
        total += master_and_gradient + narrow_weights + moments
    if setup.is_accumulating:
        total += accumulated_gradients(shape, setup, size)
    return total


def accumulated_gradients(shape: Shape, setup: Setup, size: Callable[[int], int]) -> int:
    """ZeRO-2's gradients of earlier micro-batches, on the rank that has most: a pinned buffer per
    tensor.

    Norms and biases are many and small; each takes less than twice its bytes.
    """
    matrices = trained_matrices(shape, setup.lora_rank, setup.lora_targets)
    of_matrices = fullest_rank(matrices, setup.weight_bytes, setup.world, size, 0)
    of_vectors = 2 * setup.weight_bytes * trained_vectors(shape, setup.lora_rank)
    return of_matrices + of_vectors


def zero_3_state(shape: Shape, setup: Setup, size: Callable[[int], int]) -> int:
    """ZeRO-3's buffers: float32 master and moments; pinned, the gradients in the model's dtype and
    in float32.

    The float32 gradients are pinned a sub-group at a time.
    """
    groups = sub_groups(shape, setup.world, setup.lora_rank, setup.lora_targets)
    partition = sum(groups)
    master_and_moments = 12 * partition
    wide_gradients = sum(size(4 * group) for group in groups)
    narrow_gradients = size(setup.weight_bytes * partition)
    return master_and_moments + wide_gradients + narrow_gradients


@lru_cache(maxsize=4096)
def sub_groups(
    shape: Shape, world: int, lora_rank: int, lora_targets: tuple[str, ...]
) -> tuple[int, ...]:
    """One rank's elements of each sub-group: a group ends with the tensor that fills it
    (_create_fp16_sub_groups)."""
    ends = [0]
    filled = 0
    for elements in trained_matrices(shape, lora_rank, lora_targets):
        filled += -(-elements // world)
        if filled - ends[-1] >= states.SUB_GROUP:
            ends.append(filled)
    groups = [end - start for start, end in pairwise([*ends, filled])]
    # Norms and biases are a parameter group of their own (no weight decay), and so a sub-group of
    # their own.
    vectors = trained_vectors(shape, lora_rank)
    groups.append(-(-vectors // world))
    return tuple(group for group in groups if group)


def pinned_bytes(count: int) -> int:
    """Bytes that torch's pinned allocator takes for `count`: the next power of two (roundSize;
    pytorch issue 95823)."""
    if not count:
        return 0
    exponent = (count - 1).bit_length()
    return 1 << exponent
