"""Rules on how the run goes: time of rewards, engines, ranks, checkpoints; and rewards that are
missing altogether."""

from statistics import median, median_low

from . import thresholds as limits
from .run_numbers import RunNumbers
from .series import SMOOTH
from .verdict import RunLimits, Verdict

REWARD_SECONDS = "seconds/reward"


def waiting_for_rewards(run: RunNumbers, _: RunLimits) -> Verdict | None:
    """Steps wait for the rewards."""
    if not run.has_values(REWARD_SECONDS):
        return None
    waited = run.level(REWARD_SECONDS)
    step = _step_seconds(run)
    evidence = {"rewardSeconds": waited, "stepSeconds": step}
    if waited < limits.REWARD_SECONDS.value or step <= 0:
        return Verdict(0.0, evidence)
    return Verdict(waited / step / limits.REWARD_WAIT.value, evidence)


def _step_seconds(run: RunNumbers) -> float:
    if run.has_values("step_seconds"):
        return run.level("step_seconds")
    return sum(run.level(key) for key in run.series if key.startswith("seconds/"))


def engine_drift(run: RunNumbers, _: RunLimits) -> Verdict | None:
    """The engine's probabilities move away from the trainer's."""
    scores: list[float] = []
    evidence: dict[str, float] = {}
    if run.has_values("engine_mismatch"):
        series = run.series["engine_mismatch"]
        now = series.level()
        grown = now / max(limits.DRIFT_GROWTH.value * series.first, limits.DRIFT_LEAST.value)
        scores += [now / limits.DRIFT.value, grown]
        evidence |= {"mismatch": now, "firstMismatch": series.first}
    if run.has_values("importance_ratio"):
        weight = run.level("importance_ratio")
        scores.append(abs(weight - 1) / limits.DRIFT_WEIGHT.value)
        evidence["importanceWeight"] = weight
    return Verdict(max(scores), evidence) if scores else None


def straggler(run: RunNumbers, _: RunLimits) -> Verdict | None:
    """One rank is slower than the others, step after step."""
    steps = [seconds for seconds in run.rank_seconds if len(seconds) > 1]
    if len(steps) < SMOOTH or len({len(seconds) for seconds in steps}) > 1:
        return _slowest_rank(run)
    ranks = range(len(steps[0]))
    usual = [median(seconds[rank] for seconds in steps) for rank in ranks]
    slowest = max(ranks, key=lambda rank: usual[rank])
    # Of two ranks the median is the faster one: their mean would hide half of the difference.
    middle = median_low(usual)
    slower = {rank for rank in ranks if middle > 0 and _is_slow(usual[rank], middle)}
    # Where several ranks of one node are slow, they take turns.
    share = sum(seconds.index(max(seconds)) in slower for seconds in steps) / len(steps)
    evidence = {"rank": float(slowest), "seconds": usual[slowest], "medianSeconds": middle}
    if middle <= 0 or share < limits.SAME_RANK.value:
        return Verdict(0.0, evidence)
    return Verdict(usual[slowest] / middle / limits.SLOW_RANK.value, evidence)


def _slowest_rank(run: RunNumbers) -> Verdict | None:
    """By the number that the trainer exports, where nobody knows the ranks' own seconds."""
    if not run.has_values("straggler_ratio"):
        return None
    ratio = run.level("straggler_ratio")
    return Verdict(ratio / limits.SLOWEST_OVER_MEAN.value, {"slowestOverMean": ratio})


def _is_slow(seconds: float, middle: float) -> bool:
    return seconds >= limits.SLOW_RANK.value * middle


def checkpoint_slow(run: RunNumbers, _: RunLimits) -> Verdict | None:
    """Training stands still for its checkpoints."""
    if not run.saves:
        return None
    saving, training = sum(run.saves), sum(run.seconds_since_saves)
    evidence = {"checkpointSeconds": median(run.saves), "secondsBetween": training / len(run.saves)}
    is_short = median(run.saves) < limits.SAVING_SECONDS.value
    if is_short or training <= 0 or len(run.saves) < 2:
        return Verdict(0.0, evidence)
    return Verdict(saving / training / limits.SAVING_SHARE.value, evidence)


def checkpoint_failing(run: RunNumbers, _: RunLimits) -> Verdict | None:
    """The newest checkpoint could not be written."""
    return Verdict(float(run.failed_saves), {"failedCheckpoints": float(run.failed_saves)})


def no_reward(run: RunNumbers, _: RunLimits) -> Verdict | None:
    """No completion of a generation has a reward."""
    count = float(run.steps_without_reward)
    return Verdict(count, {"generationsWithoutReward": count})
