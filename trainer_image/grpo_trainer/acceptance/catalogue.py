"""The checks, in the order in which they are run: first what would be missed most if the time ended early.

A lease is short and may not come again. `gpu` says whether torch works here at all. Then come the parts that no CPU can
show and every GPU job uses: TRL's fused head, a step's numbers beside the CPU's, the proof of weights, the engine. Then
memory, since plans stand on its predictions, and its worst end. The rest has been shown on CPUs and is repeated here.

No check is imported here: each is named by its module, which only its own process loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_CASES = 9
"""Rows of predictions.json."""


@dataclass(frozen=True, slots=True)
class Check:
    """One process's work, or with `ranks` that of as many as there are devices."""

    name: str
    """Its word on the command line."""
    module: str
    """Module, as seen from this package."""
    function: str
    """`function(context, *arguments)` gives its findings."""
    seconds: float
    """After so long it is ended."""
    arguments: Sequence[int] = ()
    """Arguments of the function after the context."""
    needs_gpu: bool = False
    """Whether there is nothing to see on a CPU."""
    on_cpu: bool = False
    """Whether it is a CPU's work on every machine, with the GPUs out of sight."""
    ranks: bool = False
    """Whether it takes one process per device, and more than one."""


CHECKS = (
    Check("gpu", ".devices", "describe", 60, needs_gpu=True),
    Check("fused-head", ".fused_head", "compare", 60),
    Check("step-on-cpu", ".steps", "reference", 90, on_cpu=True),
    Check("step", ".steps", "compare", 90),
    Check("proof", ".states", "proof", 60),
    Check("engine", ".engines", "train", 240),
    *(Check(f"memory-{n + 1}", ".memory", "measure", 60, (n,), needs_gpu=True) for n in range(MEMORY_CASES)),
    Check("out-of-memory", ".ends", "out_of_memory", 90, needs_gpu=True),
    Check("all-reduce", ".links", "all_reduce", 60, ranks=True),
    Check("adamw-8bit", ".steps", "eight_bit", 60),
    Check("zero-3", ".strategies", "train", 120, (3,)),
    Check("zero-2", ".strategies", "train", 120, (2,)),
    Check("strategies", ".strategies", "train", 120, (0,)),
    Check("resume", ".states", "resume", 90),
    Check("kl-zero", ".steps", "kl_zero", 90),
    Check("sigterm", ".ends", "sigterm", 90),
    Check("zero-2-ranks", ".strategies", "train", 120, (2,), ranks=True),
    Check("zero-3-ranks", ".strategies", "train", 120, (3,), ranks=True),
)
