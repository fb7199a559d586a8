"""When a run counts as ill: every limit of the rules, with its reason. docs/reference/findings.md
prints it.

No limit is taken from one framework's defaults. A rule compares a run with its own beginning or
best, and an absolute limit only keeps it silent where a change means nothing.
"""

from typing import NamedTuple


class Threshold(NamedTuple):
    """A limit of a rule."""

    value: float
    meaning: str
    """What is compared with it, and its unit."""
    reason: str


ENTROPY_SHARE = Threshold(
    0.2, "entropy over the highest so far", "runs that learn keep more than a third of it"
)
ENTROPY_LOW = Threshold(
    0.15, "entropy in nats per token", "above it sampling still differs between completions"
)
ENTROPY_SURE_SHARE = Threshold(
    0.05,
    "the same where the highest was below that",
    "most tokens of such a run are sure from the beginning, and the rest as the task is learned",
)
ENTROPY_GROWTH = Threshold(
    2.5, "entropy over its beginning", "an entropy bonus at most doubles it in runs that learn"
)
ENTROPY_RISE = Threshold(
    0.7, "rise of the entropy in nats per token", "a low entropy doubles without harm"
)
DEAD_GROUPS = Threshold(
    0.85, "share of groups whose rewards are equal", "six of seven completions then teach nothing"
)
TRUNCATED = Threshold(
    0.5, "share of completions cut at the limit", "most answers then have no end to reward"
)
TRUNCATED_RISE = Threshold(
    0.25, "rise of that share", "a run that began so may have a limit on purpose"
)
LENGTH_GROWTH = Threshold(
    2.0,
    "mean length over its beginning",
    "reasoning grows so too, and within 60 steps it is better than at half the length",
)
LENGTH_RISE = Threshold(32.0, "rise of the mean length in tokens", "short answers vary by a word")
REWARD_LOSS = Threshold(
    0.25, "loss over the gain up to the best level", "found before half of the gain is lost"
)
HACKED_LOSS = Threshold(
    0.3, "loss of one reward over its gain", "rewards that are traded off move by less"
)
HACKED_GAIN = Threshold(
    0.1, "gain of another meanwhile, over its own gain", "a reward that stands still games nothing"
)
SIGNIFICANT = Threshold(
    7.0, "change in standard errors of a level", "the best of many levels is 3 to 4 above the mean"
)
NOTICEABLE = Threshold(
    2.0, "gain in standard errors of a level", "below it a reward counts as standing still"
)
BEST_OF_NOISE = Threshold(
    4.0, "gain in standard errors of a level", "noise alone sets new best levels below it"
)
KL_STILL = Threshold(
    0.002, "KL in nats per token", "runs that learn pass it within their first hundred steps"
)
KL_GUARD_SHARE = Threshold(
    0.8, "KL over guard.maxKL", "leaves time to act before the guard ends the attempt"
)
KL_ABSURD = Threshold(
    5.0, "KL in nats per token", "a usual token is then e^5 times as likely as it was"
)
KL_GROWTH = Threshold(
    3.0,
    "KL over the highest until the best reward",
    "with a small beta the KL grows as long as a run learns",
)
KL_RISE = Threshold(
    0.3,
    "rise of the KL in nats per token",
    "below it a slow gain is still within the noise of eight prompts a step",
)
GRADIENT_GROWTH = Threshold(
    5.0, "gradient norm over its beginning", "warm-up and a new task change it two- or threefold"
)
GRADIENT_LEAST = Threshold(1.0, "gradient norm", "the default of maxGradNorm: below it none is cut")
CLIPPED = Threshold(
    0.25,
    "rise of the share of tokens outside the clip range",
    "two passes over a batch clip below 0.05; sequence ratios clip half of all from the beginning",
)
REWARD_WAIT = Threshold(
    0.5, "time of rewards over a step's", "GPUs then wait longer than they work"
)
REWARD_SECONDS = Threshold(1.0, "seconds of rewards per step", "a shorter wait costs nothing")
DRIFT = Threshold(
    0.05, "difference of log-probabilities in nats", "half of what ends a bfloat16 attempt"
)
DRIFT_GROWTH = Threshold(5.0, "that difference over its beginning", "rounding does not grow")
DRIFT_LEAST = Threshold(0.01, "that difference in nats", "what ends a float32 attempt")
DRIFT_WEIGHT = Threshold(
    0.2, "distance of the mean importance weight from 1", "a fifth of the gradient is lost or added"
)
SLOW_RANK = Threshold(
    1.3, "a rank's own seconds over the median rank's", "GPUs of one product differ by 5 %"
)
MEASURED_STEPS = Threshold(
    5,
    "newest measured steps, in all of which but one it is so slow, if not in its mean over twenty",
    "a pause hits one of them",
)
SAVING_SHARE = Threshold(
    0.2, "time of checkpoints over that of training", "Young's rule gives 1 to 5 %"
)
SAVING_SECONDS = Threshold(30.0, "seconds of a checkpoint", "a shorter one costs nothing")
