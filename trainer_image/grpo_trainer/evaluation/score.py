"""The mean reward of held-out rows with its noise, and whether it is what the job reported. Pure.

Noise is a 95 % confidence interval of the mean. Completions of one row are alike, so rows are what
is counted. The standard error is that of the rows' means (clustered standard errors with clusters
of one size). Source: Miller 2024, "Adding error bars to evals", section 2.2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from grpo_api.report.report import Outcome

NORMAL_95 = 1.96
"""Standard errors on each side of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    standard_error: float

    @property
    def margin(self) -> float:
        """Half of its 95 % interval."""
        return NORMAL_95 * self.standard_error


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a model on held-out rows."""

    reward: Estimate
    rows: int
    """Rows with at least one completion that a reward scored."""
    completions: int
    """Completions of each row."""
    by_function: Mapping[str, float] = field(default_factory=dict)
    """Mean of each reward over the completions that it scored, before weighting."""

    @property
    def spread(self) -> float:
        """Standard deviation of the rows' means."""
        return self.reward.standard_error * math.sqrt(self.rows)


def mean_score(scores: Sequence[float | None]) -> float | None:
    """The mean of the scores; None counts for nothing, and is the answer where all are None."""
    known_scores = [value for value in scores if value is not None]
    return fmean(known_scores) if known_scores else None


def score(rewards: Sequence[Sequence[float | None]], by_function: Mapping[str, float]) -> Score:
    """The score of weighted rewards by row and completion; None counts for nothing, as in training.

    Raises:
        ValueError: no completion has a reward.
    """
    means = [mean for mean in map(mean_score, rewards) if mean is not None]
    if not means:
        raise ValueError("no completion has a reward")
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    return Score(Estimate(fmean(means), error), len(means), max(map(len, rewards)), by_function)


def reported_reward(
    outcome: Outcome, prompts_per_step: int, spread: float = 0.0
) -> Estimate | None:
    """The reward of a job's last step; None where its outcome has none.

    A step's completions count as at least as many independent ones as it has prompts, so that the
    error is at most the standard deviation of all of them by the root of that. Where the last
    step's happened to be alike, `spread` is what rows differ by.
    """
    mean, deviation = (outcome.metrics.get(key, math.nan) for key in ("reward", "reward_std"))
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        return None
    return Estimate(mean, max(deviation, spread) / math.sqrt(prompts_per_step))


def noise_of_difference(first_estimate: Estimate, second_estimate: Estimate) -> float:
    """How far two means of one model's rewards may differ: half of the 95 % interval of their
    difference."""
    return NORMAL_95 * math.hypot(first_estimate.standard_error, second_estimate.standard_error)


def is_within_noise(first_estimate: Estimate, second_estimate: Estimate) -> bool:
    """Whether two means are within noise of each other."""
    difference = abs(first_estimate.mean - second_estimate.mean)
    return difference <= noise_of_difference(first_estimate, second_estimate)


def as_json(score: Score, job: Estimate | None) -> dict[str, Any]:
    """The score beside the job's own reward, as an object for a line of JSON."""
    summary: dict[str, Any] = {
        "reward": score.reward.mean,
        "interval": [
            score.reward.mean - score.reward.margin,
            score.reward.mean + score.reward.margin,
        ],
        "rows": score.rows,
        "completionsPerRow": score.completions,
        "rewards": dict(score.by_function),
    }
    if job:
        summary["job"] = {
            "reward": job.mean,
            "noise": noise_of_difference(score.reward, job),
            "withinNoise": is_within_noise(score.reward, job),
        }
    return summary


def score_message(score: Score, job: Estimate | None) -> str:
    """The score beside the job's own reward, as a sentence."""
    reward = score.reward
    text = (
        f"held-out reward {reward.mean:.3f} ± {reward.margin:.3f} (95 %, {score.rows} rows, "
        f"{score.completions} completions each)"
    )
    if job is None:
        return f"{text}; the job reported none"
    word = "within" if is_within_noise(reward, job) else "outside"
    return (
        f"{text}; the job reported {job.mean:.3f}, which is {word} the noise of "
        f"±{noise_of_difference(reward, job):.3f}"
    )
