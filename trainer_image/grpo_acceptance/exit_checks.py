"""Checks how the real entry point, `python -m grpo_trainer`, ends after SIGTERM and after GPU
out-of-memory.

The operator decides about a restart from the reported Outcome, so it must be right where CUDA is
involved too. An out-of-memory is injected by `python -m grpo_acceptance.exit_checks`, which is the
entry point on a GPU that is full but for two gigabytes. The memory is really gone, so that CUDA's
own error comes up through every layer, whatever the allocator's settings.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.text.contract import DATA_MOUNT_ENV, PLAN_ENV, PROGRESS_BIND_ENV, TERMINATION_LOG_ENV

from .findings import Context, Finding, make_finding
from .runner import free_port
from .trial_plans import make_plan, middling_model, write_prompts

POLL_SECONDS = 0.1
STOP_AFTER = 2
"""Steps before SIGTERM."""
FREE_BYTES = 2 << 30
"""Bytes of a full GPU that stay free: enough for the model and its communicator, too few for a step
of check_out_of_memory."""


def check_sigterm(context: Context) -> list[Finding]:
    """Check that a run saves a checkpoint after SIGTERM and reports Preempted."""
    training, execution = {"maxSteps": 100000}, {"saveEverySteps": 100000}
    folder = context.path / "stopped"
    plan = make_plan(context, training=training, execution=execution, folder=folder)
    with Pod(context, plan, "grpo_trainer", "sigterm") as pod:
        if not pod.wait_for_text(f'"step": {STOP_AFTER},'):
            return [make_finding("SIGTERM", [f"no step {STOP_AFTER}"], pod.log_tail())]
        sent = time.monotonic()
        pod.process.send_signal(signal.SIGTERM)
        problems = pod.end_problems(Result.PREEMPTED)
        seconds = time.monotonic() - sent
    if "a checkpoint was saved" not in pod.message:
        problems.append("no checkpoint was saved")
    measured = f"{pod.message}, after {seconds:.1f} s"
    return [make_finding("SIGTERM", problems, measured, {"seconds": seconds})]


def check_out_of_memory(context: Context) -> list[Finding]:
    """A run on a GPU that something else fills says OutOfMemory, not Error: the answer to it is
    another plan."""
    plan = make_plan(
        context,
        model=middling_model(context),
        training={"promptsPerStep": 16, "maxCompletionLength": 448, "maxSteps": 1},
        execution={"microBatch": 64},
    )
    with Pod(context, plan, __name__, "out-of-memory") as pod:
        problems = pod.end_problems(Result.OUT_OF_MEMORY)
    return [make_finding("injected CUDA out-of-memory", problems, pod.message[:400])]


class Pod:
    """One training pod as a process; a context manager that leaves none behind."""

    def __init__(self, context: Context, plan: TrainingPlan, module: str, name: str) -> None:
        write_prompts(context)
        self.message = ""
        self._log, self._outcome = context.path / f"{name}.log", context.path / f"{name}.outcome"
        planned = context.path / f"{name}.plan"
        planned.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
        pod_variables = {
            PLAN_ENV: str(planned),
            DATA_MOUNT_ENV: context.folder,
            TERMINATION_LOG_ENV: str(self._outcome),
            PROGRESS_BIND_ENV: f"127.0.0.1:{free_port()}",
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=os.environ | pod_variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Pod":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for_text(self, text: str) -> bool:
        """Wait until the log holds the text. Return False if the process ends without it.

        The log is printed meanwhile: the runner ends a check that takes too long, and its report
        shows what the check has printed.
        """
        printed = 0
        while True:
            has_ended = self.process.poll() is not None
            log = self._log.read_text(encoding="utf-8", errors="replace")
            print(log[printed:], end="", flush=True)
            printed = len(log)
            if text in log:
                return True
            if has_ended:
                return False
            time.sleep(POLL_SECONDS)

    def end_problems(self, expected: Result) -> list[str]:
        """Wait for the end; how it differs from that result, its exit code included."""
        code = self.process.wait()
        if not self._outcome.exists():
            return [f"exit code {code} without an outcome", self.log_tail()]
        outcome = Outcome.model_validate_json(self._outcome.read_text(encoding="utf-8"))
        self.message = outcome.message
        problems = []
        if outcome.result is not expected:
            problems.append(f"{outcome.result} instead of {expected}")
        if code != EXIT_CODES[expected]:
            problems.append(f"exit code {code}, not {EXIT_CODES[expected]}")
        return problems

    def log_tail(self) -> str:
        """The end of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-600:]


def fill_gpu() -> Any:
    """Allocate the free memory of the GPU but for FREE_BYTES; return it, shape (bytes,), uint8."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - FREE_BYTES), dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    from grpo_trainer.__main__ import exit_process, main

    ballast = fill_gpu()
    exit_process(main())
