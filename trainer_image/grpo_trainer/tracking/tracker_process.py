"""Starts the process of a tracker and talks to it; the program is tracker_child.py.

Each request has one answer and its own time limit, so that a process which hangs is noticed and
ended. Its environment has no secret but the tracker's own, and no GPU.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from grpo_api.report.report import MAX_URL, TrackerReport
from grpo_api.spec.tracking import TrackerName
from grpo_api.text.contract import ENV_PREFIX, TRACKERS_ENV, tracking_token_env

from ..runtime.child_process import ChildProcess
from .tracker_feed import End, Row, RowRefused, TrackerFailed

_MAX_ANSWER = 2**16


def child_environment(environment: Mapping[str, str], tracker: TrackerName) -> dict[str, str]:
    """What a tracker's process inherits: all but the secrets of others and the GPUs."""
    inherited = {
        name: value
        for name, value in environment.items()
        if name != "HF_TOKEN" and not name.startswith(ENV_PREFIX)
    }
    for name in (tracking_token_env(tracker), TRACKERS_ENV):
        if name in environment:
            inherited[name] = environment[name]
    # One thread: the cores belong to training.
    return inherited | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class TrackerProcess:
    """A run that is open in a process of its own."""

    def __init__(self, tracker: TrackerName, request: dict[str, Any], seconds: float) -> None:
        """Start the process and open the run, as the request says, within these seconds.

        Raises:
            TrackerFailed: the process ended, did not answer, or could not open the run.
        """
        program = [sys.executable, "-P", "-m", f"{__package__}.tracker_child"]
        self._child = ChildProcess(program, child_environment(os.environ, tracker))
        try:
            # It reads only once it has imported: a request that is not read could block here.
            self._receive(seconds)
            answer = self._ask(request, seconds)
        except TrackerFailed:
            self.close()
            raise
        self.run_id = str(answer["run_id"])[:256]
        self.url = shown_url(answer.get("url"))

    def send(self, row: Row, seconds: float) -> None:
        """Hand over a row.

        Raises:
            RowRefused: the tracker raised on it.
            TrackerFailed: the process ended or did not answer.
        """
        message = {"step": row.step, "groups": row.groups, "logs": row.values}
        answer = self._ask(message, seconds)
        if "refused" in answer:
            raise RowRefused(answer["refused"])

    def finish(self, end: End, seconds: float) -> None:
        """End the run.

        Raises:
            TrackerFailed: the tracker did not confirm it.
        """
        self._ask({"end": end}, seconds)

    def close(self) -> None:
        """End the process and all that it started. Harmless when called twice."""
        self._child.close()

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            self._child.connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise TrackerFailed(self._end_message()) from error
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            TrackerFailed: none came, or it says why the run could not be opened.
        """
        try:
            if not self._child.connection.poll(max(0.0, seconds)):
                raise TrackerFailed(f"it did not answer in time ({seconds:.0f} s)")
            answer: dict[str, Any] = json.loads(self._child.connection.recv_bytes(_MAX_ANSWER))
        except (EOFError, OSError) as error:
            raise TrackerFailed(self._end_message()) from error
        if "problem" in answer:
            raise TrackerFailed(answer["problem"])
        return answer

    def _end_message(self) -> str:
        return f"its process ended with status {self._child.status()}"


def shown_url(url: Any) -> str | None:
    """A run's page as the status may show it, without its query; None for anything else."""
    text = str(url or "").partition("?")[0][: MAX_URL + 1]
    try:
        return TrackerReport(name="url", url=text or None).url
    except ValueError:
        return None
