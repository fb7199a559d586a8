"""The findings that rank 0 exports in a story: what the trainer's own rules say of its other series.

So the alert on findings and the board can't tell a story otherwise than the trainer would.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_api.findings.diagnosis import RULES, Diagnosis
from grpo_api.findings.step_row import RANK_SECONDS, step_row
from grpo_api.report import training_metrics as trainer
from grpo_api.spec.run_policy import FindingName

from ..timelines import Timeline
from .world import World, rank0

_SERIES = re.compile(
    r'(\w+)\{.*grpojob="run",attempt="(\d+)"[^,]*,pod="[^"]*"(?:,\w+="([^"]*)")?\}'
)
_KEYS = {metric.name: metric.key for metric in (*trainer.TRAINING, *trainer.LABELLED)}
_KEYS[trainer.PHASE_SECONDS.name] = trainer.PHASE_SECONDS.key
_STEP, _MAX_KL, _SLOWEST = "step", "max_kl", "straggler_ratio"
_KEYS |= {trainer.STEP.name: _STEP, trainer.MAX_KL.name: _MAX_KL}
Exported = dict[int, dict[str, Timeline]]
"""Timelines by attempt and key of training_metrics.py."""


def with_findings(world: World, minutes: int, steps: Sequence[Mapping[str, Any]] = ()) -> World:
    """The series, with those of the findings that the job `run` has in these minutes.

    `steps` are all that is logged of each step, where the series do not say it.
    """
    exported = _exported(world)
    max_kl = exported.get(1, {}).get(_MAX_KL)
    diagnosis = Diagnosis(max_kl(0) if max_kl else None)
    active: dict[str, dict[int, int]] = {name: {} for name in RULES}
    times_median: dict[int, float] = {}
    last_step = 0.0
    for minute in range(minutes + 1):
        for logged in _logged_at(exported, minute):
            if logged[_STEP] <= last_step:
                continue
            last_step = logged[_STEP]
            step = int(last_step)
            row = step_row(steps[step - 1] if step <= len(steps) else logged)
            if row is not None:
                diagnosis.add(row)
        for finding in diagnosis.findings:
            active[finding.finding][minute] = attempt_at(exported, minute)
            if finding.finding == "Straggler":
                times_median[minute] = finding.evidence["timesMedian"]
    series: dict[str, Timeline] = {}
    for name, attempts in active.items():
        for attempt in exported:
            line = _line(exported[attempt][_STEP], attempts, attempt)
            series[rank0(trainer.FINDING, attempt, finding=name)] = line
    for attempt in {active["Straggler"][minute] for minute in times_median}:
        place = {"rank_pod": f"run-{attempt}-3-x7k2p", "rank_node": "gpu-node-3"}
        slow_rank = rank0(trainer.STRAGGLER, attempt, rank="3", **place)
        series[slow_rank] = times_median.get
    return {**world, **series}


def findings_at(world: World, minute: int) -> tuple[FindingName, ...]:
    """The findings that the job `run` has in this minute, of whatever attempt."""
    names: list[FindingName] = []
    for name in RULES:
        marker = f'finding="{name}"'
        lines = [line for series, line in world.items() if marker in series]
        if any(line(minute) == 1 for line in lines):
            names.append(name)
    return tuple(names)


def attempt_at(exported: Exported, minute: int) -> int:
    """The newest attempt that exports a step in this minute; 0 for none."""
    return max((number for number, lines in exported.items() if lines[_STEP](minute)), default=0)


def _line(step: Timeline, attempts: Mapping[int, int], attempt: int) -> Timeline:
    """1 while the finding holds in this attempt, 0 while it trains otherwise."""

    def line(minute: int) -> float | None:
        return None if step(minute) is None else float(attempts.get(minute) == attempt)

    return line


def _exported(world: World) -> Exported:
    exported: Exported = {}
    for name, line in world.items():
        series_match = _SERIES.fullmatch(name)
        if series_match is None or series_match[1] not in _KEYS:
            continue
        key = _KEYS[series_match[1]] + (f"/{series_match[3]}" if series_match[3] else "")
        is_total = series_match[1] == trainer.PHASE_SECONDS.name
        exported.setdefault(int(series_match[2]), {})[key] = (
            _last_increase(line) if is_total else line
        )
    return {number: lines for number, lines in exported.items() if _STEP in lines}


def _last_increase(total: Timeline) -> Timeline:
    """What a counter has grown by in the last minute, which is one step's."""

    def increase(minute: int) -> float | None:
        now = total(minute)
        before = total(minute - 1) if minute else None
        return None if now is None else now - (before or 0.0)

    return increase


def _logged_at(exported: Exported, minute: int) -> Iterator[dict[str, Any]]:
    """What the attempt that trains in this minute logs."""
    attempt = attempt_at(exported, minute)
    if attempt:
        exported_values = {key: line(minute) for key, line in exported[attempt].items()}
        values = {key: value for key, value in exported_values.items() if value is not None}
        # Prometheus has the slowest rank's share alone; the seconds of each are in the logs.
        yield {**values, RANK_SECONDS: [1.0, 1.0, 1.0, values.get(_SLOWEST, 1.0)]}
