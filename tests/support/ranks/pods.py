"""Training pods without a cluster: `python -m grpo_trainer` as the container would run it, several
on this machine.

Tests see the real entry point this way: its environment, files, signals, HTTP server and exit
codes.
"""

import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome, Progress
from grpo_api.text.contract import (
    DATA_MOUNT_ENV,
    INDEX_ENV,
    PLAN_ENV,
    PROGRESS_BIND_ENV,
    TERMINATION_LOG_ENV,
)
from harness.controlplane import free_port
from harness.programs.patience import Patience, wait_for_exit

from .launch import Launched, launch

PATIENCE_SECONDS = 400


class Gang:
    """The pods of one attempt; a context manager that leaves no process behind."""

    def __init__(
        self,
        plan: TrainingPlan,
        data: Path,
        folder: Path,
        *,
        fresh: bool = False,
        traced: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
        own_disks: bool = False,
    ) -> None:
        """`fresh` and `traced` as in launch.py; `environment` is every pod's. `own_disks`: the
        checkpoint directory is a folder of each pod's own, `disk-N`, as if every pod had its own
        node."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.port = free_port()
        variables = {
            DATA_MOUNT_ENV: str(data),
            PROGRESS_BIND_ENV: f"127.0.0.1:{self.port}",
            **environment,
        }
        plans = [self._of_pod(plan, index, own_disks) for index in range(plan.execution.nodes)]
        self.pods = [
            self._start(variables, index, one, fresh, traced) for index, one in enumerate(plans)
        ]

    def _of_pod(self, plan: TrainingPlan, index: int, own_disks: bool) -> TrainingPlan:
        if not own_disks or plan.checkpoint_directory is None:
            return plan
        disk = self.folder / f"disk-{index}" / Path(plan.checkpoint_directory).name
        return plan.model_copy(update={"checkpoint_directory": str(disk)})

    def _start(
        self, environment: dict[str, str], index: int, plan: TrainingPlan, fresh: bool, traced: bool
    ) -> Launched:
        path = self.folder / f"plan-{index}.json"
        path.write_text(plan.model_dump_json())
        variables = {
            INDEX_ENV: str(index),
            TERMINATION_LOG_ENV: str(self.folder / f"termination-{index}"),
        }
        variables[PLAN_ENV] = str(path)
        log = self.folder / f"pod-{index}.log"
        return launch("grpo_trainer", [], environment | variables, log, fresh=fresh, traced=traced)

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM if self._supervised(pod) else signal.SIGKILL)
            pod.wait()

    def _supervised(self, pod: Launched) -> bool:
        """A supervisor must end its workers itself; SIGKILL would orphan them."""
        return bool(self.workers(pod))

    @staticmethod
    def workers(pod: Launched) -> list[int]:
        """Process ids of a supervised pod's workers."""
        children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        return [child for child, command in commands.items() if b"grpo_trainer" in command]

    def log(self, index: int = 0) -> str:
        """What a pod printed so far."""
        return (self.folder / f"pod-{index}.log").read_text(errors="replace")

    def wait(self) -> list[int]:
        """Exit codes of all pods."""
        return [wait_for_exit(pod, PATIENCE_SECONDS) for pod in self.pods]

    def outcome(self, index: int = 0) -> Outcome:
        """A pod's termination message."""
        return Outcome.model_validate_json((self.folder / f"termination-{index}").read_text())

    def steps(self) -> dict[int, dict[str, Any]]:
        """Rank 0's log lines by step."""
        return json_lines(self.log(), "step")

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for something to become true while the gang runs.

        Raises:
            AssertionError: a pod ended, or patience did, before.
        """
        patience = Patience(PATIENCE_SECONDS)
        while not done():
            ended = [pod.returncode for pod in self.pods if pod.poll() is not None]
            assert not ended, f"a pod ended early:\n{self.log()[-4000:]}"
            assert not patience.is_over, f"still waiting:\n{self.log()[-4000:]}"
            time.sleep(0.05)

    def get(self, path: str) -> str:
        """A page of rank 0's server."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_SECONDS
        ) as answer:
            return str(answer.read().decode())

    def progress(self, query: str = "") -> Progress:
        """Rank 0's /progress."""
        return Progress.model_validate_json(self.get(f"/progress{query}"))


def json_lines(log: str, key: str) -> dict[int, dict[str, Any]]:
    """What the log's JSON lines say that have `key`, a number, by that, without what every line
    has."""
    rows = {}
    for text in re.findall(r"^\{.*\}$", log, flags=re.MULTILINE):
        line = json.loads(text)
        if isinstance(line.get(key), int):
            rows[line[key]] = {name: line[name] for name in line if name not in EVERY_LINE}
    return rows


EVERY_LINE = {"time", "level", "namespace", "grpojob", "attempt", "rank", "logger", "message"}
