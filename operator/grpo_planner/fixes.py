"""Finds changes that would make a job fit, and verifies each by planning it.

"Nothing fits" is only useful with a way out. The order is by what a change costs: pins that don't change what is
trained, more GPUs, the adapter, then shorter sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_api.job import GRPOJobSpec, SpecInvalid

from .edit import with_value
from .hardware.pools import Pool
from .result import Fix
from .search.batch import divisors, step_completions
from .search.option import Option
from .words import gib, plural

MOST = 3
"""Fixes that are shown."""
ACCESS_MODE = "spec.checkpoint.volumeClaimTemplate.accessMode"
SHORTEST = 64
"""Tokens below which a completion is of no use."""

Planner = Callable[[GRPOJobSpec], Option | None]
"""What a changed spec would be planned as; None where nothing fits."""


def find_fixes(spec: GRPOJobSpec, pools: Sequence[Pool], plan: Planner) -> list[Fix]:
    """The cheapest single changes after which `plan` finds something that fits, at most MOST."""
    found: list[Fix] = []
    for path, values, cost in _changes(spec, pools):
        fix = _mildest(spec, path, values, cost, plan)
        found += [fix] if fix else []
        if len(found) == MOST:
            break
    return found


def _mildest(spec: GRPOJobSpec, path: str, values: list[Any], cost: str, plan: Planner) -> Fix | None:
    """The first of `values`, which grow in effect, that leads to a plan; None when even the last doesn't."""
    # The strongest value first: where even that doesn't help, one plan has shown it instead of one per value.
    last = _planned(spec, path, values[-1], plan) if values else None
    if last is None:
        return None
    for value in values[:-1]:
        option = _planned(spec, path, value, plan)
        if option:
            return _fix(path, value, cost, option)
    return _fix(path, values[-1], cost, last)


def _planned(spec: GRPOJobSpec, path: str, value: Any, plan: Planner) -> Option | None:
    """What the changed spec would be planned as; None if the change is not allowed or doesn't help."""
    try:
        changed = with_value(spec, path, value)
    except SpecInvalid:
        # A change may break another rule of the spec, such as divisibility; then it is not a fix.
        return None
    return plan(changed)


def _fix(path: str, value: Any, cost: str, option: Option) -> Fix:
    """The fix with the plan that it leads to."""
    shown = "" if value is None else str(value)
    todo = f"remove {path}" if value is None else f"set {path} to {value}"
    found = option.footprint
    where = f"{found.method.name} on {plural(option.place.world, 'GPU')}, {gib(found.device)} per GPU"
    return Fix(path=path, value=shown, message=f"{todo} ({cost}): {where}")


def _changes(spec: GRPOJobSpec, pools: Sequence[Pool]) -> Iterator[tuple[str, list[Any], str]]:
    """(path, values to try, what it costs), cheapest first."""
    yield from _pins(spec)
    yield from _places(spec, pools)
    if spec.adapter.use == "Never":
        yield "spec.adapter.use", ["IfNeeded"], "trains an adapter instead of all parameters"
    completion = spec.training.max_completion_length
    shorter = [completion >> bits for bits in range(1, 12) if completion >> bits >= SHORTEST]
    if shorter:
        yield "spec.training.maxCompletionLength", shorter, "cuts off longer completions"
    prompt = spec.training.max_prompt_length
    shorter = [prompt >> bits for bits in range(1, 8) if prompt >> bits >= SHORTEST]
    if shorter:
        yield "spec.training.maxPromptLength", shorter, "leaves out longer prompts"


def _pins(spec: GRPOJobSpec) -> Iterator[tuple[str, list[Any], str]]:
    """Settings that only say how, not what, to train."""
    training = spec.training
    if training.gradient_checkpointing == "Disabled":
        yield "spec.training.gradientCheckpointing", ["Auto"], "20 to 30 % more time where it is needed"
    if training.per_device_train_batch_size is not None and training.per_device_train_batch_size > 1:
        yield "spec.training.perDeviceTrainBatchSize", [None], "smaller micro-batches, the same step"
    if training.ds3_gather_for_generation == "Enabled":
        yield "spec.training.ds3GatherForGeneration", ["Auto"], "slower generation where it is needed"
    if spec.reference.strategy not in ("Auto", "None"):
        yield "spec.reference.strategy", ["Auto"], "another place for the same reference"
    if spec.reference.strategy == "Auto" and spec.reference.offload is None and spec.training.beta > 0:
        for strategy in ("Offload", "Sharded"):
            yield "spec.reference.strategy", [strategy], "another place for the same reference"
    if training.optimizer == "AdamW":
        yield "spec.training.optimizer", ["Auto"], "moments in 8 bits where they are needed"
    if training.dtype != "Auto":
        yield "spec.training.dtype", ["Auto"], "the dtype that the plan chooses"


def _places(spec: GRPOJobSpec, pools: Sequence[Pool]) -> Iterator[tuple[str, list[Any], str]]:
    """More or other GPUs, or fewer where there are not so many."""
    placement = spec.placement
    most = max((pool.gpus for pool in pools), default=0)
    if placement.gpus and placement.gpus.min > most:
        fewer = [size for size in reversed(divisors(step_completions(spec))) if size <= most]
        yield "spec.placement.gpus.min", fewer, "fewer GPUs, so more time"
    if placement.gpus and placement.gpus.max and placement.gpus.max < most:
        more = [n for n in (placement.gpus.max * 2**power for power in range(1, 10)) if n <= most]
        yield "spec.placement.gpus.max", more or [most], "more GPUs"
    if spec.checkpoint.on_one_node:
        yield ACCESS_MODE, ["ReadWriteMany"], "a claim that several nodes can mount"
    if placement.nodes is not None:
        yield "spec.placement.nodes", [None], "as many nodes as it needs"
    if placement.gpu_product:
        yield "spec.placement.gpuProduct", [None], "another kind of GPU"
    for kind in ("limits", "requests"):
        if "memory" in getattr(spec.resources, kind):
            yield f"spec.resources.{kind}.memory", [None], "the host memory that the plan needs"
