"""One logged step of any origin: TRL's keys and ours become those of training_metrics.py.

TRL logs to trackers, files and the terminal under its own keys, and trackers put a prefix before
them. The trainer's history and /progress carry ours. Rules read one kind of row.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report.training_metrics import TRAINING
from ..text.quantity import MAX_COUNT

TRAINER_STEP_KEYS = ("step", "global_step")
STEP_KEYS = (*TRAINER_STEP_KEYS, "_step")
"""Names of the step's number, the most exact first."""
PREFIXES = ("train/", "train_")
"""What trackers write before a key of the training loop."""
PHASE_PREFIX = "phase_seconds/"
REWARD_PREFIX = "reward_by_function/"
TRL_PHASES = {
    "profiling/Time taken: GRPOTrainer._calculate_rewards": "reward",
    "profiling/Time taken: GRPOTrainer._generate_and_score_completions": "generation",
}
"""Durations that TRL logs to trackers, in seconds, by the phase that they belong to."""
REWARD = "reward"
EPOCH = "epoch"
_NAMES_OF_DPO = ("chosen", "rejected", "margins", "accuracies")
EVALUATION_KEYS = ("eval_reward", "eval/reward", "evaluation")
MAX_NAME = 100
"""Characters of a reward function's name that are kept."""
RANK_SECONDS = "rank_seconds"
"""A list: each rank's own seconds of the step, outside collectives; in some steps only."""
EXTRA_KEYS = {
    "sampling/importance_sampling_ratio/mean": "importance_ratio",
}
"""TRL's keys that are judged and not exported."""
_KEYS = {metric.trl: metric.key for metric in TRAINING if metric.trl}
_KEYS |= {metric.key: metric.key for metric in TRAINING}
_KEYS |= EXTRA_KEYS | {key: key for key in EXTRA_KEYS.values()}


@dataclass(frozen=True, slots=True)
class StepRow:
    """The numbers of one step."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    """By key of training_metrics.py; may be NaN."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mean of each reward function."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by its phases."""
    rank_seconds: tuple[float, ...] = ()
    """Seconds of the step that each rank has worked itself, by rank; empty where not measured."""
    evaluation: float | None = None
    """Reward on prompts that are not trained on."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of the step."""
        has_numbers = bool(self.values or self.rewards or self.phases or self.rank_seconds)
        return not has_numbers and self.evaluation is None


def as_number(value: object) -> float | None:
    """A logged value as a number; None for text, lists and absent values."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def step_row(logged: Mapping[str, Any]) -> StepRow | None:
    """The row of a logged dictionary; None where it has neither a step nor a number."""
    steps: dict[str, int] = {}
    values: dict[str, float] = {}
    rewards: dict[str, float] = {}
    phases: dict[str, float] = {}
    evaluation: float | None = None
    for name, value in logged.items():
        number = as_number(value)
        if number is None:
            continue
        key = without_prefix(str(name))
        reward = _reward_name(key)
        if key.lower() in STEP_KEYS:
            if 0 <= number <= MAX_COUNT:
                steps[key.lower()] = int(number)
        elif name in EVALUATION_KEYS:
            evaluation = number
        elif reward is not None:
            rewards[reward] = number
        elif key in TRL_PHASES:
            phases[TRL_PHASES[key]] = number
        elif key.startswith(PHASE_PREFIX):
            phases[key.removeprefix(PHASE_PREFIX)] = number
        elif key in _KEYS:
            values[_KEYS[key]] = number
    step = next((steps[name] for name in STEP_KEYS if name in steps), None)
    if step is None:
        return None
    if _is_filled_up(values, rewards):
        values = {key: value for key, value in values.items() if not math.isnan(value)}
        rewards = {}
    ranks = _rank_seconds(logged.get(RANK_SECONDS))
    row = StepRow(step, values, rewards, phases, ranks, evaluation)
    return None if row.is_empty else row


def _is_filled_up(values: Mapping[str, float], rewards: Mapping[str, float]) -> bool:
    """Return True if the NaNs only fill up a table, in its row of an evaluation or a duration. A
    step whose rewards are missing has numbers nevertheless."""
    # transformers logs the epoch with evaluations, too.
    of_steps = [value for key, value in values.items() if key != EPOCH]
    return REWARD in values and all(map(math.isnan, [*of_steps, *rewards.values()]))


def without_prefix(name: str) -> str:
    """Return a key without what trackers write before it, and what notebooks' tables write around
    its slashes."""
    name = name.replace(" / ", "/")
    for prefix in PREFIXES:
        rest = name.removeprefix(prefix)
        # TRL has keys of its own that begin alike, such as train_runtime.
        if rest != name and (rest in _KEYS or rest in STEP_KEYS or _reward_name(rest)):
            return rest
    return name


def _reward_name(key: str) -> str | None:
    """Name of the reward function whose mean stands under this key."""
    name = ""
    if key.startswith(REWARD_PREFIX):
        name = key.removeprefix(REWARD_PREFIX)
    elif key.startswith("rewards/"):
        name = key.removeprefix("rewards/").removesuffix("/mean")
        # TRL had no "/mean" up to 0.15. Its "/std" is no mean, and DPO's names are no functions.
        if not key.endswith("/mean") and ("/" in name or name in _NAMES_OF_DPO):
            return None
    return name[:MAX_NAME] or None


def _rank_seconds(value: object) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        return ()
    numbers = [as_number(each) for each in value]
    if not all(number is not None and math.isfinite(number) for number in numbers):
        return ()
    return tuple(number for number in numbers if number is not None)


def rows_in_order(rows: Iterable[StepRow]) -> list[StepRow]:
    """The rows by step. Of a step that was logged more than once, as after a rollback, a later row
    replaces what it says; what only the earlier one has stays."""
    by_step: dict[int, StepRow] = {}
    newest = 0
    for row in rows:
        before = by_step.get(row.step)
        is_rollback = before is not None and REWARD in before.values and REWARD in row.values
        if is_rollback and row.step < newest:
            # Of the steps that the run has gone back over, the last may not be logged again yet.
            by_step = {step: each for step, each in by_step.items() if step <= row.step}
            newest = row.step
        newest = max(newest, row.step)
        by_step[row.step] = row if before is None else _merge_rows(before, row)
    return [by_step[step] for step in sorted(by_step)]


def _merge_rows(before: StepRow, after: StepRow) -> StepRow:
    return StepRow(
        after.step,
        {**before.values, **after.values},
        {**before.rewards, **after.rewards},
        {**before.phases, **after.phases},
        after.rank_seconds or before.rank_seconds,
        before.evaluation if after.evaluation is None else after.evaluation,
    )
