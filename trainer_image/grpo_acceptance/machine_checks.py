"""Checks of the machine: its first GPU, whether this torch was built for it, and an all-reduce over
the GPUs' links."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_trainer.checkpoints.provenance import driver
from grpo_trainer.gang import rendezvous
from grpo_trainer.gang.placement import Placement, launch_environment
from grpo_trainer.telemetry.phases import device_bytes

from .findings import Context, Finding, make_finding
from .trial_plans import make_plan


def describe_gpu(_: Context) -> list[Finding]:
    """This machine's first GPU; the number of all of them."""
    properties = torch.cuda.get_device_properties(0)
    capability, arches = torch.cuda.get_device_capability(0), torch.cuda.get_arch_list()
    version = f"sm_{capability[0]}{capability[1]}"
    problems = [] if is_built_for(capability, arches) else [f"torch has no code for {version}"]
    numbers: dict[str, float | str] = {
        "gpus": float(torch.cuda.device_count()),
        "bytes": float(properties.total_memory),
        "product": properties.name,
        "driver": driver() or "unknown",
        "cuda": str(torch.version.cuda),
        "context": float(context_bytes()),
    }
    description = f"{torch.cuda.device_count()} × {properties.name}, {version}"
    return [make_finding("GPU", problems, f"{description}; torch has {' '.join(arches)}", numbers)]


def context_bytes() -> int:
    """Bytes of the device that a process holds beside its tensors: in use after one product of
    matrices, less what torch has reserved. Nothing else may run on the device."""
    ones = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.mm(ones, ones)
    torch.cuda.synchronize()
    return device_bytes() - torch.cuda.memory_reserved()


def is_built_for(capability: tuple[int, int], arches: Sequence[str]) -> bool:
    """Whether there is machine code that a GPU of this compute capability runs: of its own major
    version and at most its minor one (CUDA's binary compatibility), or intermediate code of an
    earlier version."""
    for name in arches:
        kind, _, digits = name.partition("_")
        architecture = (int(digits.rstrip("af")[:-1]), int(digits.rstrip("af")[-1]))
        if kind == "compute" and architecture <= capability:
            return True
        if kind == "sm" and architecture[0] == capability[0] and architecture[1] <= capability[1]:
            return True
    return False


def check_all_reduce(context: Context) -> list[Finding]:
    """Run the first all-reduce of a gang, as in a pod, and report its bandwidth. Wrong sums
    raise."""
    plan = make_plan(context, model=Path("none-is-loaded"))
    place = Placement(0, context.rank, context.world, 1)
    os.environ.update(launch_environment(plan.rendezvous, place))
    network = rendezvous.join_gang(plan.rendezvous, plan.guard, plan.execution, place)
    rendezvous.leave_gang()
    speed = network.bytes_per_second if network else 0.0
    problems = [] if speed else ["no bandwidth was measured"]
    measured = f"{context.world} ranks, {speed / 1e9:.2f} GB/s on the bus"
    return [make_finding("all-reduce", problems, measured, {"bytes_per_second": speed})]
