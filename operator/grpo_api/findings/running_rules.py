"""Rules on how the run goes: time of rewards, engines, ranks, checkpoints; and rewards that are
missing altogether."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, median_low, stdev

from . import thresholds as limits
from .run_numbers import WAITED, WORKED, RunNumbers, Verdict, error_of_level, noise_of_jumps


def waiting_for_rewards(run: RunNumbers) -> Verdict | None:
    """Steps wait for the rewards."""
    if not run.has_values(WAITED):
        return None
    waited, step = run.level(WAITED), run.level(WORKED)
    evidence = {"rewardSeconds": waited, "stepSeconds": step}
    if waited < limits.REWARD_SECONDS.value or not step > 0:
        return Verdict(0.0, evidence)
    return Verdict(waited / step / limits.REWARD_WAIT.value, evidence)


def engine_drift(run: RunNumbers) -> Verdict | None:
    """The engine's probabilities move away from the trainer's."""
    scores: list[float] = []
    evidence: dict[str, float] = {}
    if run.has_values("engine_mismatch"):
        series = run.series["engine_mismatch"]
        now = series.level()
        grown = now / max(limits.DRIFT_GROWTH.value * series.first_level, limits.DRIFT_LEAST.value)
        scores += [now / limits.DRIFT.value, grown]
        evidence |= {"mismatch": now, "firstMismatch": series.first_level}
    if run.has_values("importance_ratio"):
        weight = run.level("importance_ratio")
        scores.append(abs(weight - 1) / limits.DRIFT_WEIGHT.value)
        evidence["importanceWeight"] = weight
    return Verdict(max(scores), evidence) if scores else None


def straggler(run: RunNumbers) -> Verdict | None:
    """One rank is slower than the others, step after step."""
    newest = run.rank_seconds[-1] if run.rank_seconds else ()
    # After a restart there may be fewer ranks, or more.
    steps = [seconds for seconds in run.rank_seconds if len(seconds) == len(newest)]
    if len(newest) < 2 or len(steps) < int(limits.MEASURED_STEPS.value):
        return None
    verdicts = [_always_slow(steps)]
    if len(steps) == run.rank_seconds.maxlen:
        verdicts.append(_slow_on_average(steps))
    return max(verdicts, key=lambda verdict: verdict.score)


def _always_slow(steps: Sequence[Sequence[float]]) -> Verdict:
    """The rank that is slow in the newest measured steps."""
    num_judged = int(limits.MEASURED_STEPS.value)
    ratios_by_step = [times_median(seconds) for seconds in steps]
    judged_ratios = zip(*ratios_by_step[-num_judged:], strict=True)
    ratios_by_rank = [sorted(ratios) for ratios in judged_ratios]
    # The second lowest: one step in which somebody paused proves nothing, in either direction.
    lasting_ratios = [ratios[1] for ratios in ratios_by_rank]
    ratio = max(lasting_ratios)
    slowest = lasting_ratios.index(ratio)
    num_slow = sum(each >= limits.SLOW_RANK.value for each in lasting_ratios)
    evidence = {
        "rank": float(slowest),
        "timesMedian": median(ratios_by_rank[slowest]),
        "seconds": median(seconds[slowest] for seconds in steps[-num_judged:]),
        "slowRanks": float(num_slow),
    }
    if _is_in_turns(ratios_by_step, slowest):
        return Verdict(0.0, evidence)
    noticeable_ratio = math.exp(limits.NOTICEABLE.value * _log_ratio_error(ratios_by_step))
    limit = max(limits.SLOW_RANK.value, noticeable_ratio)
    return Verdict((ratio - 1) / (limit - 1), evidence)


def _is_in_turns(ratios_by_step: Sequence[Sequence[float]], rank: int) -> bool:
    """True if another rank is slow in a quarter of the steps in which this one is not: a pause at
    the turn of the others then makes it slow in all of the newest."""
    limit = limits.SLOW_RANK.value
    turns_of_others = [max(ratios) >= limit > ratios[rank] for ratios in ratios_by_step]
    return 4 * sum(turns_of_others) >= len(ratios_by_step)


def _slow_on_average(steps: Sequence[Sequence[float]]) -> Verdict:
    """The rank whose slow steps cost as much, over all kept ones: its clock falls now and then, or
    another program uses its cores at times.

    By geometric means, in which one long pause counts little.
    """
    logs_by_rank = [
        [_bounded_log(each) for each in seconds] for seconds in zip(*steps, strict=True)
    ]
    means = [sum(logs) / len(logs) for logs in logs_by_rank]
    slowest = means.index(max(means))
    usual = means.index(median_low(means))
    gaps = [
        ours - theirs
        for ours, theirs in zip(logs_by_rank[slowest], logs_by_rank[usual], strict=True)
    ]
    gap = sum(gaps) / len(gaps)
    error = stdev(gaps) / math.sqrt(len(gaps))
    limit = max(math.log(limits.SLOW_RANK.value), limits.BEST_OF_NOISE.value * error)
    ratios = [math.exp(mean - means[usual]) for mean in means]
    evidence = {
        "rank": float(slowest),
        "timesMedian": ratios[slowest],
        "seconds": math.exp(means[slowest]),
        "slowRanks": float(sum(ratio >= limits.SLOW_RANK.value for ratio in ratios)),
    }
    return Verdict(gap / limit, evidence)


def _log_ratio_error(ratios_by_step: Sequence[Sequence[float]]) -> float:
    """Standard error of a level of the ranks' log-ratios. Where ranks share their cores with other
    programs, each of them is the slowest in turn, by far."""
    logs_by_step = [[_bounded_log(ratio) for ratio in ratios] for ratios in ratios_by_step]
    largest_jumps = [
        max(abs(after - before) for before, after in zip(*steps, strict=True))
        for steps in pairwise(logs_by_step)
    ]
    return error_of_level(noise_of_jumps(largest_jumps), int(limits.MEASURED_STEPS.value))


def _bounded_log(ratio: float) -> float:
    return math.log(min(max(ratio, 1e-9), 1e9))


def times_median(seconds: Sequence[float]) -> list[float]:
    """Each rank's seconds over the median rank's; 1 for all where that is 0.

    Of an even number of ranks it is the lower of both: where half of the ranks are slow, and of
    two, their mean would hide half of the difference.
    """
    middle = median_low(seconds) if seconds else 0.0
    if middle <= 0:
        return [1.0] * len(seconds)
    return [each / middle for each in seconds]


def checkpoint_slow(run: RunNumbers) -> Verdict | None:
    """Training stands still for its checkpoints."""
    if not run.saves:
        return None
    saving, training = sum(run.saves), sum(run.seconds_since_saves)
    evidence = {"checkpointSeconds": median(run.saves), "secondsBetween": training / len(run.saves)}
    is_short = median(run.saves) < limits.SAVING_SECONDS.value
    if is_short or training <= 0 or len(run.saves) < 2:
        return Verdict(0.0, evidence)
    return Verdict(saving / training / limits.SAVING_SHARE.value, evidence)


def checkpoint_failing(run: RunNumbers) -> Verdict | None:
    """The newest checkpoint could not be written."""
    return Verdict(float(run.failed_saves), {"failedCheckpoints": float(run.failed_saves)})


def no_reward(run: RunNumbers) -> Verdict | None:
    """No completion of a generation has a reward, or one has an infinite reward."""
    count = float(run.steps_without_reward)
    return Verdict(count, {"generationsWithoutReward": count})
