"""Follows a GRPOJob in the terminal: a live table while it runs, and its step-by-step history from
rank 0's log.

What `kubectl get grpojob -w` and `kubectl logs -f` tell, side by side.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.access import Access, CommandError

POLL_SECONDS = 1.0
COLUMNS = ("PHASE", "STEP", "REWARD", "KL", "RESTARTS", "SECONDS")


@dataclass
class History:
    """One entry per finished optimizer step, as rank 0 logged it."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)

    def read(self, log: str) -> None:
        """Adds the step records of a training log; other lines are left alone."""
        for line in log.splitlines():
            if line.startswith("{") and '"step"' in line:
                record = json.loads(line)
                values = {
                    key: value for key, value in record.items() if isinstance(value, int | float)
                }
                self.steps[int(record["step"])] = values

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every step that logged the key, in order."""
        return [
            (step, self.steps[step][key]) for step in sorted(self.steps) if key in self.steps[step]
        ]


def finished(job: dict[str, Any]) -> str:
    """`Succeeded` or `Failed` once the job has ended, else an empty string."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition["type"] in ("Succeeded", "Failed") and condition["status"] == "True":
            return str(condition["type"])
    return ""


def row(job: dict[str, Any], seconds: float) -> list[str]:
    """Return the cells of the live table for the job's present status."""
    status = job.get("status", {})
    metrics = status.get("metrics", {})
    return [
        status.get("phase", "Pending"),
        status.get("progress", {}).get("summary", ""),
        metrics.get("reward", ""),
        metrics.get("kl", ""),
        str(status.get("restarts", 0)),
        f"{seconds:.0f}",
    ]


def details(job: dict[str, Any]) -> list[str]:
    """Return what is too long for a cell: the plan, where the pods run, and why the job has
    ended."""
    status = job.get("status", {})
    plan, outcome = status.get("plan"), status.get("outcome", {})
    lines = []
    if plan:
        lines.append(f"model: {plan['parameters']} parameters, reference {plan['strategy']}")
    lines += [
        f"pod {pod['name']} on {pod.get('node') or 'no node yet'}" for pod in status.get("pods", [])
    ]
    if message := outcome.get("message"):
        lines.append(message)
    return lines


def live_view(job: dict[str, Any], seconds: float) -> Group:
    """Return what is shown while the job runs; it fits a terminal of 80 columns."""
    cells = Table(
        *COLUMNS,
        title=f"grpojob/{job['metadata']['name']}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    cells.add_row(*row(job, seconds))
    # Text, since names and messages may contain what rich takes for markup
    return Group(cells, *(Text(line, overflow="fold") for line in details(job)))


def status_line(job: dict[str, Any]) -> str:
    """Return phase, step, reward and KL in one line, for an output that is no terminal."""
    phase, step, reward, kl, *_ = row(job, 0)
    named = {"step": step, "reward": reward, "KL": kl}
    return "  ".join([phase, *(f"{name} {value}" for name, value in named.items() if value)])


def training_log(access: Access, job: dict[str, Any]) -> str:
    """Rank 0's log of the present attempt; empty before its pod exists."""
    first = [pod["name"] for pod in job.get("status", {}).get("pods", []) if pod["index"] == 0]
    if not first:
        return ""
    try:
        return access.kubectl("logs", first[0], "--namespace", job["metadata"]["namespace"])
    except CommandError:  # the container has not started yet, or its node is away
        return ""


def follow(
    access: Access, namespace: str, name: str, console: Console, timeout: float
) -> tuple[dict[str, Any], History]:
    """Shows the job until it ends.

    Returns:
        The ended job and the history of its steps.

    Raises:
        TimeoutError: the job has not ended within `timeout` seconds.
    """
    began, history, printed = time.monotonic(), History(), ""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            job = json.loads(
                access.kubectl("get", "grpojob", name, "--namespace", namespace, "--output", "json")
            )
            seconds = time.monotonic() - began
            live.update(live_view(job, seconds), refresh=True)
            line = status_line(job)
            if not console.is_terminal and line != printed:
                console.print(f"{seconds:5.0f} s  {line}", soft_wrap=True, highlight=False)
                printed = line
            history.read(training_log(access, job))
            if finished(job):
                return job, history
            if seconds > timeout:
                raise TimeoutError(
                    f"grpojob/{name} has not ended after {timeout:.0f} s: "
                    f"{json.dumps(job['status'])}"
                )
            time.sleep(POLL_SECONDS)
