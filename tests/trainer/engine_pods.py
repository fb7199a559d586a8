"""Engine pods without a cluster: their real processes on addresses of loopback, which can be
killed, stopped and started again as pods are.
"""

import os
import shutil
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome
from grpo_api.text.contract import (
    ENGINE_BIND_ENV,
    INDEX_ENV,
    PLAN_ENV,
    PROGRESS_BIND_ENV,
    TERMINATION_LOG_ENV,
)
from harness.programs.patience import Patience, wait_for_exit
from tests.support.ranks.launch import Launched, launch
from tests.trainer.faulty_engine import FOLDER

PATIENCE_SECONDS = 400
POLL_SECONDS = 0.1


class EnginePods:
    """The engines of a plan; a context manager that leaves no process behind."""

    def __init__(self, plan: TrainingPlan, folder: Path) -> None:
        assert plan.engines is not None
        self.folder = folder
        self._addresses = plan.engines
        self._processes: dict[int, Launched] = {}
        self._starts: Counter[int] = Counter()
        self._kept = False
        """Whether what ends is started again."""
        (folder / "engine-plan.json").write_text(plan.model_dump_json())

    def __enter__(self) -> "EnginePods":
        for index in range(len(self._addresses.hosts)):
            # Faults of earlier pods in this folder would strike these, too.
            shutil.rmtree(self.faults(index), ignore_errors=True)
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
        """A new process, which leads a group with all that vLLM starts."""
        self.faults(index).mkdir(exist_ok=True)
        environment = {
            PLAN_ENV: str(self.folder / "engine-plan.json"),
            INDEX_ENV: str(index),
            ENGINE_BIND_ENV: f"{self._addresses.hosts[index]}:{self._addresses.port}",
            PROGRESS_BIND_ENV: f"{self._addresses.hosts[index]}:0",
            TERMINATION_LOG_ENV: str(self.folder / f"termination-{index}"),
            FOLDER: str(self.faults(index)),
        }
        self._starts[index] += 1
        self._processes[index] = launch(
            "tests.trainer.faulty_engine", [], environment, self._log(index), traced=True
        )

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Meanwhile what ends is started again, as the kubelet does."""
        enough, self._kept = threading.Event(), True

        def keep() -> None:
            while not enough.wait(POLL_SECONDS):
                for index, process in list(self._processes.items()):
                    if process.poll() is not None:
                        self.start(index)

        kubelet = threading.Thread(target=keep)
        kubelet.start()
        try:
            yield
        finally:
            enough.set()
            kubelet.join()
            self._kept = False

    def await_children(self, index: int) -> None:
        """Until it has begun to start vLLM's processes."""
        patience = Patience(PATIENCE_SECONDS)
        while not psutil.Process(self._processes[index].pid).children():
            assert not patience.is_over, (
                f"engine {index} starts nothing:\n{self.log(index)[-4000:]}"
            )
            time.sleep(POLL_SECONDS / 10)

    def end(self, index: int) -> None:
        """What the kubelet does first: SIGTERM to the pod's first process."""
        self._processes[index].send_signal(signal.SIGTERM)

    def starts(self, index: int) -> int:
        """How often it was started."""
        return self._starts[index]

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
        process, patience = self._processes[index], Patience(PATIENCE_SECONDS)
        while not self._healthy(index):
            assert self._kept or process.poll() is None, (
                f"engine {index} ended:\n{self.log(index)[-4000:]}"
            )
            assert not patience.is_over, f"engine {index} is not up:\n{self.log(index)[-4000:]}"
            time.sleep(POLL_SECONDS)

    def signal(self, index: int, number: int) -> None:
        """Send a signal to all processes of a pod; waits for the end where it is SIGKILL and nobody
        else does."""
        process = self._processes[index]
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # it leads no group yet, or has ended
            process.send_signal(number)
        if number == signal.SIGKILL and not self._kept:
            process.wait()

    def ended(self, index: int) -> tuple[int, Outcome]:
        """Wait for an engine's end, and that of all that it has started: its exit code and its
        outcome.

        Raises:
            AssertionError: a process of vLLM's outlives it.
        """
        process, patience = self._processes[index], Patience(PATIENCE_SECONDS)
        code = wait_for_exit(process, PATIENCE_SECONDS)
        while left := [one for one in psutil.process_iter() if _group(one) == process.pid]:
            assert not patience.is_over, f"engine {index} has left {left}"
            time.sleep(POLL_SECONDS)
        return code, Outcome.model_validate_json((self.folder / f"termination-{index}").read_text())

    def replaced(self, index: int) -> tuple[int, Outcome]:
        """The same, and start another in its place."""
        end = self.ended(index)
        self.start(index)
        return end

    def log(self, index: int) -> str:
        """What it printed."""
        return self._log(index).read_text(errors="replace")

    def _log(self, index: int) -> Path:
        return self.folder / f"engine-{index}-{self._starts[index]}.log"

    def _healthy(self, index: int) -> bool:
        try:
            url = f"http://{self._addresses.hosts[index]}:{self._addresses.port}/healthz"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _group(process: psutil.Process) -> int | None:
    """The process group of one that runs; None of one that has ended."""
    try:
        return os.getpgid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
