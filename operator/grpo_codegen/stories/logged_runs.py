"""Stories of runs as TRL would log them: lines over the steps, with noise from a seed.

A healthy run is the base; a story replaces some of its lines.
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_api.spec.run_policy import FindingName

from ..timelines import towards

Line = Callable[[int], float]
Row = dict[str, Any]
CHANGE = 60
"""Step at which a story begins to differ from a healthy run."""
STEPS = 300


class Noisy(NamedTuple):
    """A line and its relative noise."""

    line: Line
    noise: float = 0.05


def always(value: float) -> Line:
    """The same at each step."""
    return lambda _: value


def ramp(first: float, last: float, end: int = 200, begin: int = CHANGE) -> Line:
    """From one value to another between two steps."""

    def line(step: int) -> float:
        share = min(1.0, max(0.0, (step - begin) / (end - begin)))
        return first + (last - first) * share

    return line


HEALTHY: dict[str, Noisy] = {
    "loss": Noisy(always(0.01), 1.0),
    "reward": Noisy(towards(0.4, 2.0), 0.06),
    "reward_std": Noisy(towards(0.45, 0.3), 0.08),
    "rewards/accuracy/mean": Noisy(towards(0.2, 1.5), 0.08),
    "rewards/format/mean": Noisy(towards(0.1, 0.5, 40), 0.08),
    "frac_reward_zero_std": Noisy(always(0.15), 0.4),
    "kl": Noisy(towards(0.001, 0.06, 300), 0.15),
    "entropy": Noisy(towards(0.9, 0.45), 0.06),
    "grad_norm": Noisy(always(0.6), 0.3),
    "clip_ratio/region_mean": Noisy(always(0.01), 0.5),
    "completions/mean_length": Noisy(towards(210, 330), 0.06),
    "completions/min_length": Noisy(always(70), 0.3),
    "completions/max_length": Noisy(always(720)),
    "completions/clipped_ratio": Noisy(always(0.04), 0.6),
    "sampling/sampling_logp_difference/mean": Noisy(always(0.003), 0.2),
    "sampling/importance_sampling_ratio/mean": Noisy(always(1.0), 0.01),
    "step_time": Noisy(always(60)),
    "phase_seconds/reward": Noisy(always(6), 0.2),
}
SHARES = ("frac_reward_zero_std", "completions/clipped_ratio", "clip_ratio/region_mean")


def logged_steps(
    lines: Mapping[str, Noisy | None] | None = None, seed: int = 0, steps: int = STEPS
) -> list[Row]:
    """The rows of a run; a line of None is not logged."""
    chance = random.Random(seed)
    rows: list[Row] = []
    for step in range(1, steps + 1):
        row: Row = {"step": step}
        for key, noisy in {**HEALTHY, **(lines or {})}.items():
            if noisy is None:
                continue
            value = noisy.line(step) * (1 + noisy.noise * chance.gauss(0, 1))
            row[key] = min(1.0, max(0.0, value)) if key in SHARES else value
        rows.append(row)
    return rows


def _step(first: float, last: float) -> Line:
    return ramp(first, last, CHANGE + 1)


def _numbers_until_change(step: int) -> float:
    return 0.6 if step < CHANGE else math.nan


def _after_first_steps(first: float, later: float) -> Line:
    """One value in seven steps, then another one."""
    return lambda step: first if step <= 7 else later


def _learned_until_change(first: float, best: float, last: float) -> Line:
    """Quickly learned, and lost from the change on."""
    learned, lost = towards(first, best, 15), ramp(best, last)
    return lambda step: min(learned(step), lost(step))


_HACKED = {
    "rewards/accuracy/mean": Noisy(ramp(1.0, 0.2), 0.08),
    "rewards/format/mean": Noisy(ramp(0.2, 2.0), 0.08),
    "reward": Noisy(ramp(1.2, 2.2)),
}
SICK: dict[str, tuple[FindingName, dict[str, Noisy | None]]] = {
    "entropy falls to nothing": ("EntropyCollapsed", {"entropy": Noisy(ramp(0.9, 0.01, 120))}),
    "entropy falls at once": ("EntropyCollapsed", {"entropy": Noisy(_step(0.5, 0.02))}),
    "entropy rises": ("EntropyExploding", {"entropy": Noisy(ramp(0.5, 4.0, 160))}),
    "nine of ten groups are dead": (
        "NoSignal",
        {"frac_reward_zero_std": Noisy(ramp(0.1, 0.92, 90), 0.03)},
    ),
    "all groups are dead": (
        "NoSignal",
        {"frac_reward_zero_std": Noisy(_step(0.1, 1.0), 0), "reward_std": Noisy(_step(0.4, 0), 0)},
    ),
    "the task is too hard": (
        "NoSignal",
        {"frac_reward_zero_std": Noisy(always(0.97), 0.02), "reward": Noisy(always(0.01), 1.0)},
    ),
    "groups are dead, and only the spread is logged": (
        "NoSignal",
        {"frac_reward_zero_std": None, "reward_std": Noisy(_step(0.4, 0), 0)},
    ),
    "answers reach the limit": (
        "Truncating",
        {
            "completions/clipped_ratio": Noisy(ramp(0.05, 0.97, 100)),
            "completions/mean_length": Noisy(ramp(300, 760, 100)),
            "reward": Noisy(ramp(1.2, 0.9, 100)),
        },
    ),
    "answers never had room": (
        "Truncating",
        {"completions/clipped_ratio": Noisy(always(0.9), 0.03), "reward": Noisy(always(0.3))},
    ),
    "answers grow and are no better": (
        "LengthExploding",
        {"completions/mean_length": Noisy(ramp(250, 800)), "reward": Noisy(always(0.8))},
    ),
    "answers grow when all is learned": (
        "LengthExploding",
        {
            "completions/mean_length": Noisy(ramp(250, 900, 160)),
            "reward": Noisy(towards(0.2, 0.8, 18), 0.06),
        },
    ),
    "the reward falls": ("RewardFalling", {"reward": Noisy(ramp(1.5, 0.1), 0.06)}),
    "the reward fell long ago": ("RewardFalling", {"reward": Noisy(_step(1.5, 0.4), 0.06)}),
    "accuracy falls long after the format was learned": (
        "RewardFalling",
        {
            "rewards/accuracy/mean": Noisy(_learned_until_change(0.2, 1.0, 0.1), 0.08),
            "rewards/format/mean": Noisy(towards(0.1, 0.5, 15), 0.08),
            "reward": Noisy(_learned_until_change(0.3, 1.5, 0.6), 0.06),
        },
    ),
    "format is rewarded and accuracy lost, longer answers": (
        "RewardHacking",
        {**_HACKED, "completions/mean_length": Noisy(ramp(300, 500))},
    ),
    "format is rewarded and accuracy lost, without a reference": (
        "RewardHacking",
        {**_HACKED, "kl": None},
    ),
    "the policy does not move": (
        "NotLearning",
        {
            "kl": Noisy(always(0.0004), 0.3),
            "reward": Noisy(always(0.5), 0.15),
            "rewards/accuracy/mean": Noisy(always(0.4), 0.15),
            "rewards/format/mean": Noisy(always(0.1), 0.15),
            "entropy": Noisy(always(0.7), 0.06),
            "completions/mean_length": Noisy(always(250), 0.06),
        },
    ),
    "the KL grows and the reward does not": (
        "KLRising",
        {"kl": Noisy(ramp(0.02, 1.5, 260), 0.15), "reward": Noisy(towards(0.4, 1.5, 20), 0.06)},
    ),
    "everything flies apart": (
        "StepsTooLarge",
        {
            "kl": Noisy(ramp(0.02, 100, 80), 0.1),
            "grad_norm": Noisy(ramp(0.6, 25, 80), 0.3),
            "reward": Noisy(ramp(1.2, 0.08, 80), 0.06),
        },
    ),
    "the gradient grows": ("StepsTooLarge", {"grad_norm": Noisy(ramp(0.5, 25, 160), 0.3)}),
    "gradients are no numbers": ("StepsTooLarge", {"grad_norm": Noisy(_numbers_until_change)}),
    "the loss is no number, and no gradient is logged": (
        "StepsTooLarge",
        {"loss": Noisy(_numbers_until_change), "grad_norm": None},
    ),
    "most tokens are clipped": (
        "StepsTooLarge",
        {"clip_ratio/region_mean": Noisy(ramp(0.01, 0.5, 100), 0.1)},
    ),
    "the reward service is slow": (
        "WaitingForRewards",
        {"phase_seconds/reward": Noisy(_step(5, 300)), "step_time": Noisy(_step(60, 353))},
    ),
    "the engine drifts": (
        "EngineDrift",
        {"sampling/sampling_logp_difference/mean": Noisy(ramp(0.003, 0.3, 160))},
    ),
    "importance weights drift": (
        "EngineDrift",
        {"sampling/importance_sampling_ratio/mean": Noisy(ramp(1.0, 0.5, 160), 0.01)},
    ),
}
"""Name of a story → what is found, and the lines that differ."""
WELL: dict[str, dict[str, Noisy | None]] = {
    "plain": {},
    "without a reference": {"kl": None},
    "a small beta": {"kl": Noisy(towards(0.001, 1.5, 300), 0.1)},
    "reasoning grows with the reward": {
        "completions/mean_length": Noisy(ramp(500, 4000, 300, 1)),
        "reward": Noisy(towards(0.2, 0.8, 200), 0.06),
    },
    "reasoning grows slowly with a noisy reward": {
        "completions/mean_length": Noisy(ramp(500, 2500, 300, 1)),
        "reward": Noisy(towards(0.3, 0.6, 200), 0.12),
    },
    "reasoning grows at once": {
        "completions/mean_length": Noisy(ramp(300, 3000, 120, 20)),
        "reward": Noisy(ramp(0.2, 0.8, 120, 20), 0.08),
    },
    "reasoning grows before the reward": {
        "completions/mean_length": Noisy(ramp(200, 900, 90), 0.08),
        "reward": Noisy(ramp(0.5, 1.5, 110, 70), 0.06),
    },
    "a penalty on length grows with the accuracy": {
        "completions/mean_length": Noisy(towards(300, 700)),
        "reward": Noisy(towards(0.2, 0.75, 100), 0.08),
        "rewards/accuracy/mean": Noisy(towards(0.2, 0.8, 100), 0.08),
        "rewards/overlong/mean": Noisy(towards(-0.005, -0.06), 0.3),
        "rewards/format/mean": None,
    },
    "long reasoning that has settled": {
        "completions/mean_length": Noisy(towards(500, 3000, 60)),
        "reward": Noisy(towards(0.2, 0.8, 60), 0.06),
    },
    "short answers under a long limit": {
        "completions/mean_length": Noisy(always(40)),
        "completions/max_length": Noisy(always(90)),
        "completions/clipped_ratio": Noisy(always(0.0), 0),
    },
    "long first answers that get shorter": {
        "completions/clipped_ratio": Noisy(towards(0.9, 0.02, 25), 0.05),
        "completions/mean_length": Noisy(towards(700, 250, 25)),
    },
    "answers of one length": {
        f"completions/{key}": Noisy(always(value), 0)
        for key, value in {
            "mean_length": 16, "min_length": 16, "max_length": 16, "clipped_ratio": 1.0,
        }.items()
    },
    "learned in twenty steps, without a reference": {
        "kl": None,
        "reward": Noisy(towards(0.2, 0.9, 7), 0.1),
        "rewards/accuracy/mean": Noisy(towards(0.1, 0.8, 7), 0.1),
        "rewards/format/mean": None,
    },
    "a noisy reward that stands still": {
        "reward": Noisy(always(0.5), 0.3),
        "rewards/accuracy/mean": Noisy(always(0.4), 0.3),
        "rewards/format/mean": Noisy(always(0.1), 0.5),
    },
    "an entropy bonus": {"entropy": Noisy(towards(0.4, 0.7))},
    "warm-up": {"grad_norm": Noisy(towards(0.2, 0.6, 20), 0.3), "loss": Noisy(always(0), 0)},
    "a reference that is moved every 40 steps": {
        "kl": Noisy(lambda step: 0.002 + 0.006 * (step % 40), 0.1),
        "reward": Noisy(towards(0.4, 1.5, 14), 0.06),
    },
    "the first steps have no signal": {
        "frac_reward_zero_std": Noisy(_after_first_steps(1.0, 0.15), 0),
        "grad_norm": Noisy(_after_first_steps(0.001, 2.0), 0.3),
    },
    "negative rewards": {
        "reward": Noisy(towards(-2.0, -0.5), 0.06),
        "rewards/accuracy/mean": Noisy(towards(-1.5, -0.3), 0.06),
        "rewards/format/mean": Noisy(towards(-0.5, -0.2), 0.06),
    },
}  # fmt: skip
"""Name of a story in which nothing is found."""
