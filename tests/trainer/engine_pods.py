"""Engine pods without a cluster: their real processes on addresses of loopback, which can be killed, stopped and
started again as pods are.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from grpo_api.contract import ENGINE_BIND_ENV, INDEX_ENV, PLAN_ENV, TERMINATION_LOG_ENV
from grpo_api.plan import TrainingPlan
from grpo_api.report import Outcome
from tests.trainer.faulty_engine import FOLDER

PATIENCE_SECONDS = 400


class EnginePods:
    """The engines of a plan; a context manager that leaves no process behind."""

    def __init__(self, plan: TrainingPlan, folder: Path) -> None:
        assert plan.engines is not None
        self.folder = folder
        self._addresses = plan.engines
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "engine-plan.json").write_text(plan.model_dump_json())

    def __enter__(self) -> "EnginePods":
        try:
            for index in range(len(self._addresses.hosts)):
                self.start(index)
            for index in self._processes:
                self.await_up(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for index in self._processes:
            self.signal(index, signal.SIGKILL)

    def start(self, index: int) -> None:
        """A new process, in a group with all that vLLM starts."""
        faults = self.faults(index)
        faults.mkdir(exist_ok=True)
        environment = os.environ | {
            PLAN_ENV: str(self.folder / "engine-plan.json"),
            INDEX_ENV: str(index),
            ENGINE_BIND_ENV: f"{self._addresses.hosts[index]}:{self._addresses.port}",
            TERMINATION_LOG_ENV: str(self.folder / f"termination-{index}"),
            FOLDER: str(faults),
        }
        with (self.folder / f"engine-{index}.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.trainer.faulty_engine"]
            self._processes[index] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def faults(self, index: int) -> Path:
        """The folder of an engine's faults."""
        return self.folder / f"faults-{index}"

    def strike(self, index: int, fault: str) -> None:
        """Let a fault strike an engine."""
        (self.faults(index) / fault).touch()

    def struck(self, index: int, fault: str) -> bool:
        """Whether it has."""
        return not (self.faults(index) / fault).exists()

    def await_up(self, index: int) -> None:
        """Until it serves.

        Raises:
            AssertionError: it ended, or patience did.
        """
        process, deadline = self._processes[index], time.monotonic() + PATIENCE_SECONDS
        while not self._healthy(index):
            assert process.poll() is None, f"engine {index} ended:\n{self.log(index)[-4000:]}"
            assert time.monotonic() < deadline, f"engine {index} is not up:\n{self.log(index)[-4000:]}"
            time.sleep(0.1)

    def signal(self, index: int, number: int) -> None:
        """Send a signal to all processes of a pod; waits for the end where it is SIGKILL."""
        process = self._processes[index]
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGKILL:
            process.wait()

    def ended(self, index: int) -> tuple[int, Outcome]:
        """Wait for an engine's end: its exit code and its outcome."""
        code = self._processes[index].wait(PATIENCE_SECONDS)
        return code, Outcome.model_validate_json((self.folder / f"termination-{index}").read_text())

    def log(self, index: int) -> str:
        """What it printed."""
        return (self.folder / f"engine-{index}.log").read_text(errors="replace")

    def _healthy(self, index: int) -> bool:
        try:
            url = f"http://{self._addresses.hosts[index]}:{self._addresses.port}/healthz"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
