"""Stories of how runs learn, from what TRL would log of each step: usual deaths of GRPO, and healthy
runs that look odd.

A step takes a minute, and the run is ended after END steps. Little else is there: no other jobs, and
of the operator what says that it leads.
"""

from collections.abc import Mapping

from grpo_api.findings.step_row import step_row
from grpo_api.report import training_metrics as trainer
from grpo_api.spec.run_policy import FindingName

from ..timelines import Timeline, clock, constant, only_during, running_total
from .cluster_series import LEADER
from .job_series import ATTEMPTS, GOT_ON, INFO, PATIENCE, RUNNING
from .logged_runs import CHANGE, SICK, WELL, Line, Noisy, Row, logged_steps
from .story import Story
from .world import World, constant_series, rank0

END, MINUTES, LOOK = 200, 215, 195
_BESIDES: dict[str, tuple[FindingName, ...]] = {
    "answers reach the limit": ("LengthExploding", "RewardFalling"),
    "everything flies apart": ("RewardFalling", "KLRising"),
}
"""Findings of a story beside the one that it is there to show."""
_SEEDS = {"the KL grows and the reward does not": 1}
"""Of the noise, where a finding comes and goes with others."""
WAITED = "phase_seconds/reward"
_BY_KEY = {metric.key: metric for metric in trainer.TRAINING}
_LEADS: World = constant_series(1, LEADER)
_JOB: World = {
    GOT_ON: clock,
    **constant_series(1800.0, PATIENCE),
    **constant_series(1, ATTEMPTS, RUNNING, INFO),
}


def _series_of(rows: tuple[Row, ...]) -> World:
    """What rank 0 exports of these steps, one a minute, and the operator of the job."""
    lines: dict[str, Timeline] = {}
    for key in rows[0]:
        name = _series_name(key)
        if name:
            lines[name] = _line([row[key] for row in rows])
    parts = {"backward": constant(30.0)}
    if WAITED in rows[0]:
        parts["reward"] = _line([row[WAITED] for row in rows])
    for part, seconds in parts.items():
        lines[rank0(trainer.PHASE_SECONDS, step_phase=part)] = running_total(seconds)
    lines[rank0(trainer.STEP)] = lambda minute: min(minute + 1.0, END)
    lines[rank0(trainer.TOTAL_STEPS)] = constant(2 * END)
    return {name: only_during(line, 0, END) for name, line in {**lines, **_JOB}.items()}


def _line(numbers: list[float]) -> Timeline:
    return lambda minute: numbers[min(minute, len(numbers) - 1)]


def _series_name(key: str) -> str:
    """The series of what TRL logs under this key; empty for what only rules read."""
    row = step_row({"step": 1, key: 1.0})
    if row is None:
        return ""
    names = [rank0(_BY_KEY[name]) for name in row.values if name in _BY_KEY]
    names += [rank0(trainer.REWARD, reward=name) for name in row.rewards]
    return names[0] if names else ""


def _story(name: str, summary: str, rows: list[Row], *findings: FindingName) -> Story:
    steps = tuple(rows)
    return Story(
        name=name,
        summary=summary,
        minutes=MINUTES,
        at=LOOK,
        base=_LEADS,
        changes=_series_of(steps),
        steps=steps,
        findings=findings,
    )


def _sick(name: str) -> Story:
    finding, lines = SICK[name]
    summary = f"Of a run that is well until step {CHANGE}: {_changes(lines)}."
    findings = (finding, *_BESIDES.get(name, ()))
    rows = logged_steps(lines, _SEEDS.get(name, 0), END)
    return _story(name, summary, rows, *findings)


def _well(name: str) -> Story:
    lines = WELL[name]
    differs = f"A healthy run: {_changes(lines)}." if lines else "A healthy run."
    return _story(f"{name} (healthy)", differs, logged_steps(lines, steps=END))


def _changes(lines: Mapping[str, Noisy | None]) -> str:
    """The keys that differ, with their values before and in the end."""
    return ", ".join(
        f"`{key}` {_values(noisy.line)}" if noisy else f"no `{key}`" for key, noisy in lines.items()
    )


def _values(line: Line) -> str:
    first, last = line(1), line(END)
    return f"{first:.3g}" if first == last else f"{first:.3g} → {last:.3g}"


def _of_ranks(name: str, well: list[float], slow: list[float]) -> Story:
    rows = [
        row | {"rank_seconds": slow if row["step"] >= CHANGE else well}
        for row in logged_steps(steps=END)
    ]
    shown = ", ".join(f"{seconds:g}" for seconds in slow)
    summary = f"The ranks' own seconds of a step are {shown} from step {CHANGE} on."
    return _story(name, summary, rows, "Straggler")


def _without_rewards() -> Story:
    missing = dict.fromkeys(
        ("reward", "rewards/accuracy/mean", "rewards/format/mean"), float("nan")
    )
    rows = [row | (missing if row["step"] >= CHANGE else {}) for row in logged_steps(steps=END)]
    return _story(
        "every reward is silent",
        f"No completion has a reward from step {CHANGE} on.",
        rows,
        "NoReward",
    )


STORIES = (
    *map(_sick, SICK),
    _without_rewards(),
    _of_ranks("half of the ranks are on a slow node", [10.0] * 4, [10.0, 10.0, 20.0, 20.0]),
    _of_ranks("one of two ranks is slow", [10.0] * 2, [10.0, 29.0]),
    *map(_well, WELL),
)
