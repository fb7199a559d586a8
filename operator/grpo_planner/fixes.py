"""Finds changes that would make a job fit, and verifies each by planning it.

Exists because a refusal is only useful with a way out. Ordered from what costs least: pins that don't change what is
trained, more GPUs, the adapter, then shorter sequences. Used by plan.py when nothing fits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_api.job import GRPOJobSpec, SpecInvalid

from .batch import divisors, step_completions
from .edit import with_value
from .explain import plural
from .pools import Pool
from .result import Fix
from .search import Option

MOST = 3
"""Fixes that are shown."""
SHORTEST = 64
"""Tokens below which a completion is no use."""
Attempt = Callable[[GRPOJobSpec], Option | None]
Change = tuple[str, Any, str]


def find_fixes(spec: GRPOJobSpec, pools: Sequence[Pool], attempt: Attempt) -> list[Fix]:
    """The cheapest single changes after which `attempt` finds a plan, at most MOST."""
    found: list[Fix] = []
    for path, values, cost in _changes(spec, pools):
        fix = _mildest(spec, path, values, cost, attempt)
        found += [fix] if fix else []
        if len(found) == MOST:
            break
    return found


def _mildest(spec: GRPOJobSpec, path: str, values: list[Any], cost: str, attempt: Attempt) -> Fix | None:
    """The first of `values`, which grow in effect, that leads to a plan; None when even the last doesn't."""
    last = _planned(spec, path, values[-1], attempt) if values else None
    if last is None:
        return None
    for value in values[:-1]:
        option = _planned(spec, path, value, attempt)
        if option:
            return _fix(path, value, cost, option)
    return _fix(path, values[-1], cost, last)


def _planned(spec: GRPOJobSpec, path: str, value: Any, attempt: Attempt) -> Option | None:
    """What the changed spec would be planned as; None if the change is not allowed or doesn't help."""
    try:
        changed = with_value(spec, path, value)
    except SpecInvalid:
        # A change may break another rule of the spec, such as divisibility; then it is no fix.
        return None
    return attempt(changed)


def _fix(path: str, value: Any, cost: str, option: Option) -> Fix:
    """The fix with the plan that it leads to."""
    shown = "" if value is None else str(value)
    todo = f"remove {path}" if value is None else f"set {path} to {value}"
    gib = option.device / 2**30
    return Fix(
        path=path, value=shown,
        message=f"{todo} ({cost}): {option.method.name} on {plural(option.layout.world, 'GPU')}, {gib:.1f} GiB per GPU",
    )  # fmt: skip


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
    if placement.nodes is not None:
        yield "spec.placement.nodes", [None], "as many nodes as it needs"
    if placement.gpu_product:
        yield "spec.placement.gpuProduct", [None], "another kind of GPU"
    for kind in ("limits", "requests"):
        if "memory" in getattr(spec.resources, kind):
            yield f"spec.resources.{kind}.memory", [None], "the host memory that the plan needs"
