"""Real runs whose findings are known: their histories, what each death costs, and when it is found.

`python -m benchmarks finding_runs` trained them with bare TRL. The tests replay the histories, and
docs/reference/findings.md prints the table, so that a changed limit shows at once what it finds later.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from grpo_api.findings.diagnosis import Diagnosis
from grpo_api.findings.step_row import step_row

HISTORIES = Path(__file__).with_name("finding_runs.jsonl.gz")
HEALTHY = "healthy"
LEVEL = 5
"""Steps in a level of what a run loses: enough to smooth a batch of eight groups."""
Steps = list[dict[str, Any]]


class Death(NamedTuple):
    """What runs are made to die of."""

    made_by: str
    """For people: the cause in settings or rewards."""
    loses: str
    """For people: what the run has less and less of."""
    quality: Callable[[dict[str, Any]], float]
    """The same of one step: the higher, the better."""
    findings: frozenset[str]
    """What names this death: one of these at least is found."""


DEATHS = {
    "entropy": Death(
        "a tenfold learning rate and one reward that is easily gamed",
        "entropy",
        lambda step: float(step["entropy"]),
        frozenset({"EntropyCollapsed", "NoSignal"}),
    ),
    "length": Death(
        "a reward that counts words",
        "completions that end",
        lambda step: 1.0 - step["completions/clipped_ratio"],
        frozenset({"LengthExploding", "Truncating"}),
    ),
    "hacking": Death(
        "a reward that is gamed, weighted above the right answer",
        "the accuracy",
        lambda step: float(step["rewards/accuracy/mean"]),
        frozenset({"RewardHacking"}),
    ),
    "too hard": Death(
        "a task of which no completion is right",
        "steps",
        lambda step: -float(step["step"] > 1),
        frozenset({"NoSignal"}),
    ),
    "drift": Death(
        "rewards of noise, with beta close to 0",
        "nearness to the reference (KL)",
        lambda step: -float(step["kl"]),
        frozenset({"KLRising"}),
    ),
    "leap": Death(
        "a learning rate that grows a hundredfold",
        "the reward",
        lambda step: float(step["reward"]),
        frozenset({"RewardFalling", "NoSignal", "Truncating"}),
    ),
}
"""By the first words of a run's name."""


def histories() -> dict[str, Steps]:
    """The logged steps of each run, by its name."""
    lines = gzip.decompress(HISTORIES.read_bytes()).decode().splitlines()
    return {run["run"]: run["steps"] for run in map(json.loads, lines)}


def cause_of(run: str) -> str:
    """`too hard` of `too hard 3`."""
    return run.rpartition(" ")[0]


def first_found(steps: Steps) -> dict[str, int]:
    """By finding, the step at which it was first there."""
    diagnosis = Diagnosis()
    first_steps: dict[str, int] = {}
    for row in filter(None, map(step_row, steps)):
        diagnosis.add(row)
        for finding in diagnosis.findings:
            first_steps.setdefault(finding.finding, row.step)
    return first_steps


def lost_share(steps: Steps, quality: Callable[[dict[str, Any]], float], at: int) -> float:
    """How much of all that a run loses is lost by the end of step `at`, from 0 to 1.

    What a run loses is its shortfall below its best level, summed over the steps after that.
    """
    values = [quality(step) for step in steps]
    levels = [median(values[max(0, end - LEVEL) : end]) for end in range(1, len(values) + 1)]
    best = max(range(len(levels)), key=lambda index: levels[index])
    shortfalls = [max(0.0, levels[best] - level) for level in levels[best + 1 :]]
    total = sum(shortfalls)
    if not total:
        return 0.0
    lost = [
        shortfall
        for step, shortfall in zip(steps[best + 1 :], shortfalls, strict=True)
        if step["step"] <= at
    ]
    return sum(lost) / total


def table() -> list[str]:
    """Rows of docs/reference/findings.md: by death, when the slowest of its runs is found."""
    runs = histories()
    rows = [
        "| made to die of | loses | found as | found at step | of the loss, by then |",
        "|---|---|---|---|---|",
    ]
    for cause, death in DEATHS.items():
        steps_found, shares = [], []
        names: set[str] = set()
        for run in (name for name in runs if cause_of(name) == cause):
            first_steps = first_found(runs[run])
            first = min(first_steps[name] for name in death.findings if name in first_steps)
            names |= {name for name in death.findings if first_steps.get(name) == first}
            steps_found.append(first)
            shares.append(lost_share(runs[run], death.quality, first))
        length = max(len(runs[run]) for run in runs if cause_of(run) == cause)
        when = f"{min(steps_found)} to {max(steps_found)} of {length}"
        shown = ", ".join(f"`{name}`" for name in sorted(names))
        rows.append(f"| {death.made_by} | {death.loses} | {shown} | {when} | ≤ {max(shares):.0%} |")
    return rows
