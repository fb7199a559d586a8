"""How long completions get: a distribution between nothing and the limit, by its mean.

A share r of completions never ends and runs to the limit. The others end with the same probability
at every token, so their lengths are exponential and cut at the limit. The share `S(t) = r + (1 - r)
exp(-t / tau)` is longer than t tokens, and tau follows from the mean. Completions of published runs
have a standard deviation near their mean, and some reach the limit whatever the mean. The share r
is fitted to how long their batches took to end.
"""

from functools import lru_cache
from math import exp
from typing import NamedTuple

POINTS = 16
"""Points at which a batch that thins out is evaluated; twice as many change 1 %."""


class Stretch(NamedTuple):
    """Tokens of a batch that are alike."""

    tokens: float
    """How many."""
    position: float
    """Tokens that each completion has by then."""
    survivors: float
    """Share of the completions that are longer."""


@lru_cache(maxsize=512)
def thinning(mean: float, limit: int, runaway: float) -> tuple[Stretch, ...]:
    """The stretches of a batch whose completions have that mean and end at the limit at the latest.

    They are shorter at the beginning, where most completions end. Their tokens add up to the limit.
    """
    if mean >= limit:
        return (Stretch(limit, limit / 2, 1.0),)
    # Where the mean is nearly nothing, fewer of them run away.
    share = min(runaway, mean / limit / 2)
    tau = _tau(mean, limit, share)
    stretches = []
    for point in range(POINTS):
        root = (point + 0.5) / POINTS
        position = limit * root * root
        survivors = share + (1 - share) * exp(-position / tau)
        stretches.append(Stretch(2 * limit * root / POINTS, position, survivors))
    return tuple(stretches)


def _tau(mean: float, limit: int, share: float) -> float:
    """The tau that gives the mean: `r L + (1 - r) tau (1 - exp(-L / tau))`, by bisection."""
    low, high = 1e-6, 1e6 * limit
    for _ in range(100):
        middle = (low * high) ** 0.5
        reached = share * limit + (1 - share) * middle * (1 - exp(-limit / middle))
        if reached < mean:
            low = middle
        else:
            high = middle
    return low


def any_left(survivors: float, completions: float) -> float:
    """Probability that any of `completions` is longer."""
    none_left: float = (1 - survivors) ** completions
    return 1 - none_left


class Batch(NamedTuple):
    """A batch of completions over one stretch."""

    tokens: float
    """Expected tokens of the stretch: none where none is left."""
    sequences: float
    """Completions that are left, where any is."""
    position: float


@lru_cache(maxsize=4096)
def batches(mean: float, limit: int, runaway: float, completions: float) -> tuple[Batch, ...]:
    """What is left of a batch of `completions`, stretch by stretch."""
    stretches = []
    for stretch in thinning(mean, limit, runaway):
        probability = any_left(stretch.survivors, completions)
        sequences = completions * stretch.survivors / probability
        stretches.append(Batch(stretch.tokens * probability, sequences, stretch.position))
    return tuple(stretches)


@lru_cache(maxsize=4096)
def longest(mean: float, limit: int, runaway: float, completions: float) -> float:
    """Expected tokens of the longest of `completions`."""
    return sum(
        stretch.tokens * any_left(stretch.survivors, completions)
        for stretch in thinning(mean, limit, runaway)
    )
