"""The checks in their order, and findings: what a check says, in the report and between processes.

First comes what would be missed most if the time ended early: a lease is short and may not come
again. `gpu` says whether torch works here at all. Then come the parts that no CPU can show and
every GPU job uses. These are TRL's fused head, a step's numbers beside the CPU's, the proof of
weights, and the engine. Then memory, since plans depend on its predictions, and its worst end. The
rest has been shown on CPUs and is repeated here.

No check is imported here: each is named by its module, which only its own process loads. Findings
are plain dataclasses and JSON: they are read and written where nothing is installed but Python.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class State(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report."""

    what: str
    """What was checked."""
    state: State
    """How it ended."""
    message: str
    """What was seen; why it failed, or why it was not run."""
    numbers: dict[str, float | str] = field(default_factory=dict)
    """What was measured, by name; bytes and seconds unless the name says otherwise."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a check knows of its surroundings; travels as JSON to its process."""

    device: str
    """cuda or cpu."""
    folder: str
    """Where models and results of this acceptance run are; shared by all checks, gone
    afterwards."""
    rank: int = 0
    """This process among those of the check."""
    world: int = 1
    """Processes of the check, one per device."""
    port: int = 29500
    """Where they meet, on loopback."""

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def is_gpu(self) -> bool:
        """Whether this is about GPUs."""
        return self.device == "cuda"


def make_finding(
    what: str,
    problems: Sequence[str],
    observation: str,
    numbers: dict[str, float | str] | None = None,
) -> Finding:
    """Passed without problems, failed with them."""
    state = State.FAILED if problems else State.PASSED
    return Finding(what, state, "; ".join([*problems, observation]), numbers or {})


def skipped_finding(what: str, why: str) -> Finding:
    """A finding of a check that was not run."""
    return Finding(what, State.NOT_RUN, why)


def dump_findings(findings: Sequence[Finding]) -> str:
    """The findings as JSON."""
    return json.dumps([asdict(finding) for finding in findings])


def load_findings(text: str) -> list[Finding]:
    """Findings from that JSON."""
    return [Finding(**(item | {"state": State(item["state"])})) for item in json.loads(text)]


MEMORY_CASES = 9
"""Rows of predictions.json."""
ENGINES = 7
"""Rows of engine_checks.ENGINE_CELLS."""


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
    Check("gpu", ".machine_checks", "describe_gpu", 60, needs_gpu=True),
    Check("fused-head", ".step_checks", "compare_fused_head", 60),
    Check("step-on-cpu", ".step_checks", "record_cpu_step", 90, on_cpu=True),
    Check("step", ".step_checks", "compare_with_cpu", 90),
    Check("proof", ".training_checks", "check_proof", 60),
    Check("hash", ".engine_checks", "compare_hashes", 60),
    *(
        Check(f"engine-{n + 1}", ".engine_checks", "train_engine", 240, (n,))
        for n in range(ENGINES)
    ),
    *(
        Check(f"memory-{n + 1}", ".memory_checks", "measure_case", 60, (n,), needs_gpu=True)
        for n in range(MEMORY_CASES)
    ),
    Check("out-of-memory", ".exit_checks", "check_out_of_memory", 90, needs_gpu=True),
    Check("all-reduce", ".machine_checks", "check_all_reduce", 60, ranks=True),
    Check("adamw-8bit", ".step_checks", "check_eight_bit", 60),
    Check("zero-3", ".training_checks", "train_strategies", 120, (3,)),
    Check("zero-2", ".training_checks", "train_strategies", 120, (2,)),
    Check("strategies", ".training_checks", "train_strategies", 120, (0,)),
    Check("resume", ".training_checks", "check_resume", 90),
    Check("kl-zero", ".step_checks", "check_first_kl", 90),
    Check("sigterm", ".exit_checks", "check_sigterm", 90),
    Check("engine-ranks", ".engine_checks", "train_engine_of_ranks", 120, (0,), ranks=True),
    Check("engine-shared", ".engine_checks", "train_engine_of_ranks", 120, (1,), ranks=True),
    Check("zero-2-ranks", ".training_checks", "train_strategies", 120, (2,), ranks=True),
    Check("zero-3-ranks", ".training_checks", "train_strategies", 120, (3,), ranks=True),
)


PREDICTIONS = Path(__file__).with_name("predictions.json")
GIB = 1 << 30
PEAK_LIMIT = 0.05
"""Of the measured peak: the margin that a plan keeps where the model's shape is known exactly."""
Case = dict[str, Any]
"""One configuration of the memory check."""


def cases() -> list[Case]:
    """All configurations with their predictions."""
    predictions: list[Case] = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    return predictions


def case_title(case: Case) -> str:
    """A case in a few words."""
    lengths = f"{case['micro_batch']} × ({case['prompt']} + {case['completion']})"
    checkpointing = "checkpointing" if case["checkpointing"] else "no checkpointing"
    adapter = f", LoRA {case['lora_rank']}" if case["lora_rank"] else ""
    return f"memory: {case['model']}, {lengths}, {case['precision']}, {checkpointing}{adapter}"


def compare_with_prediction(case: Case, measured: dict[str, int], device: int) -> Finding:
    """Measured peaks by phase, and bytes of the device in use, beside the prediction."""
    peak, predicted = max(measured.values()), max(case["phases"].values())
    error = predicted / peak - 1
    problems = [] if abs(error) <= PEAK_LIMIT else [f"the predicted peak is off by {error:+.1%}"]
    if device > case["device_bytes"]:
        problems.append(
            f"the device holds {device / GIB:.2f} GiB, more than {case['device_bytes'] / GIB:.2f}"
        )
    shown = []
    numbers: dict[str, float | str] = {}
    for name, value in measured.items():
        predicted_value = case["phases"][name]
        shown.append(f"{name} {value / GIB:.2f} ({predicted_value / GIB:.2f})")
        numbers |= {f"measured {name}": float(value), f"predicted {name}": float(predicted_value)}
    numbers |= {"device": float(device), "predicted device": float(case["device_bytes"])}
    numbers["error"] = error
    phases = ", ".join(shown)
    summary = f"GiB measured (predicted): {phases}; peak {error:+.2%}; device {device / GIB:.2f}"
    return make_finding(case_title(case), problems, summary, numbers)
