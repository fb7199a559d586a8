"""What a trainer tells of its end when memory does not suffice: the phase, what was asked for, what
there was.

The device is faked by a fault that raises what torch's CUDA allocator raises, in a named phase of a
real run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import STEP_PHASES, Outcome, Result
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.training.training_run import requested_bytes, shortage_of
from harness.controlplane import free_port
from tests.support.faults.memory.sitecustomize import FAULT_ENV
from tests.support.ranks import demo_model, runs
from tests.support.ranks.fork_servers import ISOLATED
from tests.support.ranks.pods import Gang
from tests.trainer.test_phases import Counters

pytestmark = pytest.mark.realtime

CUDA = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.2 GiB is free."
)
FAULT = Path(__file__).resolve().parents[2] / "tests" / "support" / "faults" / "memory"
WITH_FAULT = {"PYTHONPATH": f"{FAULT}:{ISOLATED['PYTHONPATH']}"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CUDA.format("2.50 GiB"), 2684354560),
        (CUDA.format("20.00 MiB"), 20971520),
        (CUDA.format("512 bytes"), 512),
        (
            (
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. "
                "Error "
                "code 12"
            ),
            4096,
        ),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 0),
        (CUDA.format("99999999999999999999.00 GiB"), 2**53 - 1),
    ],
)
def test_what_was_asked_for_is_in_the_message(text: str, expected: int) -> None:
    assert requested_bytes(text) == expected


def test_the_innermost_phase_is_named_with_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, clock = Counters(monkeypatch), PhaseClock(lambda: 0.0)
    counters.use(99, left=40)
    clock.enter(None)
    error = torch.OutOfMemoryError(CUDA.format("1.00 MiB"))

    def scores() -> None:
        with clock.phase("forward"), clock.phase("reference"):
            counters.use(70, left=40)
            raise error

    with pytest.raises(torch.OutOfMemoryError):
        scores()
    found = shortage_of(error, clock)
    assert found is not None
    assert (found.phase, found.memory, found.requested_bytes, found.allocated_bytes) == (
        *("reference", "Device"),
        *(2**20, 70),
    )


@pytest.mark.parametrize("phase", ["load", "backward", "step"])
def test_a_phase_without_an_end_of_its_own_is_named(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    counters, clock = Counters(monkeypatch), PhaseClock(lambda: 0.0)
    if phase != "load":
        clock.enter(phase)
    counters.use(60, left=40)
    found = shortage_of(torch.OutOfMemoryError(CUDA.format("1 bytes")), clock)
    assert found is not None
    assert (found.phase, found.allocated_bytes) == (phase, 60)


def test_the_host_s_memory_is_told_apart_and_other_ends_have_no_shortage() -> None:
    clock = PhaseClock(lambda: 0.0)
    found = shortage_of(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        clock,
    )
    assert found is not None
    assert (found.memory, found.requested_bytes) == ("Host", 9)
    assert found.allocated_bytes > 2**20
    assert memory_of(OSError(12, "Cannot allocate memory")) == "Host"
    assert memory_of(MemoryError()) == "Host"
    assert shortage_of(BadInput("no"), clock) is None
    assert shortage_of(RuntimeError("shape mismatch"), clock) is None


def memory_of(error: Exception) -> str:
    """Which memory was short."""
    found = shortage_of(error, PhaseClock(lambda: 0.0))
    assert found is not None
    return found.memory


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory"),
        dist.DistBackendError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:162"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["cuBLAS", "CUDA", "NCCL", "vLLM's sleep", "Triton"],
)
def test_device_memory_that_torch_does_not_allocate_is_the_device_s(error: Exception) -> None:
    assert memory_of(error) == "Device"


def attempt(
    folder: Path, number: int, fault: str, **execution: Any
) -> tuple[Outcome, dict[int, dict[str, Any]]]:
    """One attempt of a real pod in which a phase runs out of memory."""
    plan = runs.plan(
        folder / "model",
        "None",
        folder=folder / "runs",
        training={"beta": 0.0},
        execution=execution,
    ).model_dump(by_alias=True)
    plan["job"]["attempt"] = number
    plan["rendezvous"]["port"] = free_port()
    plan["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan["rewards"] = [{"format": {"pattern": ".*"}}]
    environment = WITH_FAULT | {FAULT_ENV: fault}
    with Gang(
        TrainingPlan.model_validate(plan),
        folder,
        folder / f"pods-{number}",
        environment=environment,
    ) as gang:
        gang.wait()
        return gang.outcome(), gang.steps()


@pytest.mark.parametrize(
    ("phase", "step"), [("generate", 5), pytest.param("backward", 2, marks=pytest.mark.slow)]
)
def test_a_run_that_ran_out_says_so_and_goes_on_with_half_the_micro_batch(
    tmp_path: Path, phase: str, step: int
) -> None:
    assert phase in STEP_PHASES
    demo_model.save_policy(tmp_path / "model")
    (tmp_path / "problems.jsonl").write_text(
        "".join(f'{{"prompt": "say {row}"}}\n' for row in range(64))
    )
    fault = f"{phase}:{step}:4:device"
    ended, steps = attempt(tmp_path, 1, fault)
    assert (ended.result, ended.step, max(steps)) == (Result.OUT_OF_MEMORY, step - 1, step - 1)
    assert ended.shortage is not None
    assert (ended.shortage.phase, ended.shortage.requested_bytes) == (phase, 1610612736)
    assert ended.checkpoint_step == (3 if step > 3 else 0)
    half = {
        "microBatch": 4,
        "gradientAccumulation": 2,
        "stepsPerGeneration": 2,
        "gradientCheckpointing": True,
    }
    done, steps = attempt(tmp_path, 2, fault, **half)
    assert (done.result, done.step, min(steps)) == (Result.SUCCEEDED, 6, 4 if step > 3 else 1)
