"""Adds up what Prometheus should see of every step: rank 0's counters and histogram.

A scrape comes twice a minute and a step may take seconds, so a gauge of the last step shows one
step in six. Counters lose none: `rate` and `increase` are exact over any time. They begin at 0
with the process, which Prometheus takes as the usual reset.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Counter, Histogram, disable_created_metrics
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from grpo_api.report.metrics import Metric
from grpo_api.report.report import STEP_PHASES
from grpo_api.report.training_metrics import (
    GROUPS,
    PHASE_SECONDS,
    REWARD_SUM,
    REWARDS,
    STEP_SECONDS,
    STEP_SECONDS_BUCKETS,
    TOKENS,
    GroupSignal,
)

SOLVED_SHARE = 0.75
"""Share of the span of rewards above which equal rewards are high ones, as in the finding
NoSignal."""


class StepCounters(Collector):
    """Counters of one process."""

    def __init__(self) -> None:
        """Start all counters at 0."""
        # Their times of creation would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._steps = Histogram(
            STEP_SECONDS.name, STEP_SECONDS.help, registry=None, buckets=STEP_SECONDS_BUCKETS
        )
        self._phases = _counter(PHASE_SECONDS)
        self._tokens = _counter(TOKENS)
        self._tokens_before = 0.0
        self._rewards = _counter(REWARDS)
        self._reward_sums = _counter(REWARD_SUM)
        self._groups = _counter(GROUPS)
        self._lowest, self._highest = math.inf, -math.inf
        """Of all weighted rewards so far."""

    def collect(self) -> Iterable[Family]:
        """See Collector."""
        step_families = (self._steps, self._phases, self._tokens)
        for family in (*step_families, self._rewards, self._reward_sums, self._groups):
            yield from family.collect()

    def add_step(self, seconds: float, phase_seconds: Mapping[str, float]) -> None:
        """Count a finished step, with the seconds of its phases by name."""
        self._steps.observe(seconds)
        for phase in STEP_PHASES:
            self._phases.labels(phase).inc(phase_seconds[phase])

    def begin_tokens(self, tokens: float) -> None:
        """Leave out the tokens that earlier attempts of the run have processed."""
        self._tokens_before = tokens

    def record_tokens(self, tokens: float) -> None:
        """Count up to this number of tokens since the run's first step."""
        self._tokens.inc(max(0.0, tokens - self._tokens_before))
        self._tokens_before = max(self._tokens_before, tokens)

    def add_rewards(
        self,
        rewards: Sequence[Sequence[float]],
        names: Sequence[str],
        weights: Sequence[float],
        group_size: int,
    ) -> None:
        """Count a generation's rewards and groups. `rewards` are those of each completion of all
        ranks, by reward function; NaN where it gave none. `group_size` completions in a row are one
        group."""
        for name, column in zip(names, zip(*rewards, strict=True), strict=True):
            finite = [reward for reward in column if math.isfinite(reward)]
            self._rewards.labels(name).inc(len(finite))
            gains = math.fsum(reward for reward in finite if reward > 0)
            losses = math.fsum(reward for reward in finite if reward < 0)
            self._reward_sums.labels(name, "positive").inc(gains)
            self._reward_sums.labels(name, "negative").inc(-losses)
        sums = [weighted_sum(row, weights) for row in rewards]
        finite_sums = [reward for reward in sums if math.isfinite(reward)]
        self._lowest = min(self._lowest, *finite_sums, math.inf)
        self._highest = max(self._highest, *finite_sums, -math.inf)
        for first in range(0, len(sums), group_size):
            group = sums[first : first + group_size]
            self._groups.labels(self._signal(group)).inc()

    def _signal(self, group: Sequence[float]) -> GroupSignal:
        scored = [reward for reward in group if not math.isnan(reward)]
        if not scored:
            return "unscored"
        lowest, highest = min(scored), max(scored)
        # TRL's own test of a standard deviation of 0 is torch.isclose, whose tolerance is 1e-8.
        if highest - lowest > 1e-8:
            return "mixed"
        span = self._highest - self._lowest
        # While all rewards of the attempt are the same, only their sign says anything.
        is_high = lowest >= self._lowest + SOLVED_SHARE * span if span > 0 else lowest > 0
        return "solved" if is_high else "too_hard"


def _counter(metric: Metric) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=None)


def weighted_sum(rewards: Sequence[float], weights: Sequence[float]) -> float:
    """The reward that TRL computes advantages from; NaN where no function gave one."""
    products = [
        reward * weight
        for reward, weight in zip(rewards, weights, strict=True)
        if not math.isnan(reward)
    ]
    return sum(products) if products else math.nan
