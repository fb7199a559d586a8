"""Rules on what the policy learns: entropy, groups, length, reward, KL, size of steps.

Each returns how far the run is beyond the limit (1 is the limit), with the numbers that show it.
Where too little is known, it returns None.
"""

import math
import re
from collections.abc import Iterable
from statistics import median

from . import thresholds as limits
from .run_numbers import (
    DEAD_GROUPS,
    GRADIENT,
    GRADIENTS,
    HIGHER,
    KEPT,
    KL,
    LENGTH,
    SMOOTH,
    Peak,
    Record,
    RunNumbers,
    Verdict,
    error_of_level,
)
from .step_row import REWARD

GROUPS_WINDOW = 20
"""Generations over which the share of dead groups is taken: a batch has few groups."""
DEAD_WINDOW = 8
"""Generations without any live group that need no longer look."""
NEARLY_ALL = 0.99
UNPAID_STEPS = 40
"""Generations in which a reward for right answers pays once, even for one answer in hundreds, and
in which its mean changes."""
_FOR_RIGHT_ANSWERS = re.compile(
    r"^(?!no_|.*(penal|missing|leak|length))"
    r".*(?<!in)(accura|answer(?!.*format)|correct|equation|exact|solution|solved|verif)",
    re.IGNORECASE,
)
"""Names of such rewards: any other that is always 0 may be a penalty that is never due."""
TRUNCATED_STEPS = 3 * SMOOTH
"""Steps within which a reward must gain for completions that were always cut: a level, and one that
is clearly later."""
LONG = 50
"""Steps over which a reward must gain for cut completions to count as paid for."""
PATIENCE = 20
"""Rewards without a better one after which a greater KL or length is held against it."""
LENGTH_PATIENCE = 60
"""Steps in which answers of twice the length may come to be better: a policy that begins to reason
writes more before more is right."""
STILL_STEPS = 160
"""Steps within which a policy that learns has moved, after the warm-up of the learning rate: its
newest mean reward is then of clearly later steps than the first one."""
UNLEARNED_STEPS = 240
"""The same where no KL is logged: the reward alone must show that nothing is learned."""
UNMOVED_STEPS = 40
"""The same where the gradient has always been exactly 0 although groups differ: no weight of the
policy is trained."""
NO_GRADIENT = 0.5
"""Share of steps whose gradient is infinite or NaN. Few do not matter: a gradient scaler leaves
them out."""
LEAST_GAIN = 0.5
"""Share of its best value that counts as the gain of a reward which began near it."""
EVALUATIONS = 4
"""Evaluations that a trend needs."""
SURE = 3
"""Values in a row, and standard errors, of which noise alone makes one in hundreds."""


def entropy_collapsed(run: RunNumbers) -> Verdict | None:
    """The policy no longer samples anything else."""
    if not run.has_values("entropy"):
        return None
    series = run.series["entropy"]
    # A collapse takes few steps, of which the level would cost half.
    now = min(series.level(), max(series.newest(SURE)))
    was_open = series.highest >= limits.ENTROPY_LOW.value
    share = limits.ENTROPY_SHARE if was_open else limits.ENTROPY_SURE_SHARE
    limit = min(share.value * series.highest, limits.ENTROPY_LOW.value)
    return Verdict(_ratio(limit, now), {"entropy": now, "highestEntropy": series.highest})


def entropy_exploding(run: RunNumbers) -> Verdict | None:
    """The policy loses what it knows and samples anything."""
    if not run.has_values("entropy", 2 * SMOOTH):
        return None
    series = run.series["entropy"]
    limit = max(
        limits.ENTROPY_GROWTH.value * series.first_level,
        series.first_level + limits.ENTROPY_RISE.value,
    )
    evidence = {"entropy": series.level(), "firstEntropy": series.first_level}
    return Verdict(_ratio(series.level(), limit), evidence)


def no_signal(run: RunNumbers) -> Verdict | None:
    """Nearly all groups have equal rewards, which leaves no advantage, or no answer is right."""
    return _worst([_dead_groups(run), _never_right(run)])


def _dead_groups(run: RunNumbers) -> Verdict | None:
    if not run.has_values(DEAD_GROUPS, DEAD_WINDOW):
        return None
    series = run.series[DEAD_GROUPS]
    window = series.newest(GROUPS_WINDOW)
    share = sum(window) / len(window)
    is_enough = len(window) == GROUPS_WINDOW or min(window) >= NEARLY_ALL
    if not is_enough:
        share = min(window[-DEAD_WINDOW:])
        share = share if share >= NEARLY_ALL else 0.0
    evidence = {"deadGroups": share, "isSolved": float(_is_solved(run))}
    return Verdict(share / limits.DEAD_GROUPS.value, evidence | _reward_evidence(run))


def _never_right(run: RunNumbers) -> Verdict | None:
    """A reward for right answers no longer tells them apart, and others hide it: their groups
    differ."""
    constant = _constant_rewards(run)
    score = max(map(len, constant.values()), default=0) / UNPAID_STEPS
    levels = {name: values[-1] for name, values in constant.items()}
    return Verdict(score, levels | _reward_evidence(run))


def _constant_rewards(run: RunNumbers) -> dict[str, list[float]]:
    """The newest values of each reward for right answers that pays nothing, or always the same and
    less than before: its service may answer so to everything."""
    newest = {
        name: series.newest(UNPAID_STEPS)
        for name, series in run.rewards.items()
        if _FOR_RIGHT_ANSWERS.search(name)
    }
    # One that has never scored a completion pays as little. Of several, each may score a data set.
    if newest and not any(newest.values()):
        num_rewards = min(run.series[REWARD].count, UNPAID_STEPS)
        return {name: [math.nan] * num_rewards for name in newest if num_rewards}
    constant = {
        name: values for name, values in newest.items() if values and max(values) == min(values)
    }
    # What pays the best that it has ever paid may be solved.
    return {
        name: values
        for name, values in constant.items()
        if values[0] <= 0 or values[0] < run.rewards[name].highest
    }


def _is_solved(run: RunNumbers) -> bool:
    """Whether the rewards that are all equal are high ones, of those that the run has seen."""
    if not run.has_values(REWARD, 1) or _constant_rewards(run):
        return False
    reward = run.series[REWARD]
    now, peak = reward.level(), run.reward_peak
    # Where a few groups have a right answer or two, the mean is below the spread within groups.
    spread = max(reward.error, run.level("reward_std"))
    if peak.count and peak.height > spread:
        return now >= peak.lowest + 0.75 * peak.height
    return now > spread


def truncating(run: RunNumbers) -> Verdict | None:
    """Completions are cut before they end."""
    key = "completion_clipped_ratio"
    if not run.has_values(key, TRUNCATED_STEPS) or _is_cut_on_purpose(run):
        return None
    series = run.series[key]
    now, before = series.level(), series.level(ago=SMOOTH)
    has_risen = now >= series.first_level + limits.TRUNCATED_RISE.value
    is_falling = now < before - max(0.05, limits.NOTICEABLE.value * series.error)
    is_harmless = is_falling or not (has_risen or not run.has_learned(since=LONG))
    evidence = {"truncated": now, "firstTruncated": series.first_level}
    return Verdict(0.0 if is_harmless else now / limits.TRUNCATED.value, evidence)


def _is_cut_on_purpose(run: RunNumbers) -> bool:
    """Whether all completions have always had one length and get better all the same, as where none
    is meant to end."""
    shortest, longest = (run.series.get(f"completion_length_{end}") for end in ("min", "max"))
    if shortest is None or longest is None or not shortest.count or not longest.count:
        return False
    if shortest.first_level != longest.first_level:
        return False
    # The least of many: of answers that are too long for the limit, one in hundreds ends.
    has_one_length = min(shortest.newest(KEPT)) == max(longest.newest(KEPT))
    return has_one_length and run.has_learned(since=None)


def length_exploding(run: RunNumbers) -> Verdict | None:
    """Completions get longer and not better."""
    if not run.has_values(LENGTH, 2 * SMOOTH):
        return None
    series = run.series[LENGTH]
    now = series.level()
    has_grown = now - series.first_level >= limits.LENGTH_RISE.value
    evidence = {"meanLength": now, "firstMeanLength": series.first_level} | _reward_evidence(run)
    is_harmless = not has_grown or _has_paid_for_length(run)
    score = _ratio(now, limits.LENGTH_GROWTH.value * series.first_level)
    return Verdict(0.0 if is_harmless else score, evidence)


def _has_paid_for_length(run: RunNumbers) -> bool:
    """Whether the reward has gained since completions were half as long, or may still come to."""
    series = run.series[LENGTH]
    half = series.level() / limits.LENGTH_GROWTH.value
    then = run.first_above(LENGTH, half)
    if then is None or series.count - then.num_values < PATIENCE:
        return True
    # A run that began at half of it has stood there, within its noise, until it grew.
    growth = run.first_above(LENGTH, HIGHER**2 * half)
    if growth is None or run.step - growth.step < LENGTH_PATIENCE:
        return True
    return _may_have_gained_since(run, then)


def _may_have_gained_since(run: RunNumbers, then: Record) -> bool:
    """Whether the evaluation or the reward stands noticeably above what it was then, or the reward
    may do so within its noise.

    By means of all rewards that are kept: levels of ten steps hide what a run learns slowly.
    """
    # Always of the same prompts: a batch of few prompts, or of ever harder ones, hides a gain.
    if run.evaluations.gain_in_errors(then.num_rewards) > SURE:
        return True
    if not then.num_rewards:
        return False
    reward = run.series[REWARD]
    since = reward.newest(min(reward.count - then.num_rewards, KEPT))
    if not since:
        return True
    gain = sum(since) / len(since) - then.average_reward
    error = reward.noise * math.sqrt(1 / len(since) + 1 / min(then.num_rewards, KEPT))
    # The end of what was learned before then is no gain of today.
    least_gain = limits.HACKED_GAIN.value * run.reward_peak.height
    has_gained = gain > max(least_gain, limits.NOTICEABLE.value * error)
    # In few steps, or of few prompts a step, noise hides a gain that is worth the price.
    worth = limits.REWARD_LOSS.value * run.level("reward_std")
    return has_gained or (SURE * error > worth and gain + SURE * error > worth)


def reward_falling(run: RunNumbers) -> Verdict | None:
    """The reward has been higher."""
    return _worst([_fallen_reward(run), _fallen_evaluation(run, with_reward=True)])


def _fallen_reward(run: RunNumbers) -> Verdict | None:
    if not run.has_values(REWARD, 2 * SMOOTH) or not run.reward_peak.count:
        return None
    reward, spread = run.series[REWARD], run.level("reward_std")
    scores = []
    for peak in (run.reward_peak, run.long_reward_peak):
        # Where the evaluation has risen since, prompts became harder, and the policy no worse.
        if peak.count and run.evaluations.gain_in_errors(peak.count, EVALUATIONS) <= SURE:
            gain = _gain(peak.height, peak.error(reward), spread)
            limit = peak.least_loss(limits.REWARD_LOSS.value * gain, reward)
            scores.append(_ratio(peak.loss(reward), limit))
    evidence = {"reward": reward.level(), "bestReward": run.reward_peak.value}
    return Verdict(max(scores, default=0.0), evidence)


def _gain(rise: float, error: float, least: float) -> float:
    """What a loss is held against: the rise up to the best level. Where noise may explain that, or
    there is next to none, it is `least` at least."""
    has_risen = rise >= max(limits.SIGNIFICANT.value * error, limits.HACKED_GAIN.value * least)
    return rise if has_risen else max(rise, least)


def reward_hacking(run: RunNumbers) -> Verdict | None:
    """One reward rises at the cost of another, or the evaluation falls without the reward."""
    verdicts = [_fallen_evaluation(run, with_reward=False)]
    if len(run.rewards) > 1:
        for name, peaks in run.peaks.items():
            verdicts += [_hacked_reward(run, name, peak) for peak in peaks]
    return _worst(verdicts)


def _hacked_reward(run: RunNumbers, name: str, peak: Peak) -> Verdict | None:
    """The reward function `name` against the one that has gained most since its best level."""
    fallen = run.rewards[name]
    if not peak.count or fallen.count < 2 * SMOOTH:
        return None
    gain = _gain(peak.height, peak.error(fallen), LEAST_GAIN * abs(peak.value))
    size = limits.HACKED_LOSS.value * gain
    rival = _gained_most(run, name, peak)
    if rival is None:
        return Verdict(0.0, {})
    other, before = rival
    if peak.value <= 0:
        size = max(size, _price(run, name, peak, other))
    evidence = {
        name: fallen.level(),
        f"{name} at its best": peak.value,
        other: run.rewards[other].level(),
        f"{other} then": before,
    }
    score = _ratio(peak.loss(fallen), peak.least_loss(size, fallen))
    score *= 1.0 if _has_side_effect(run, peak) else 0.6
    return Verdict(score, evidence)


def _price(run: RunNumbers, name: str, penalty: Peak, rival: str) -> float:
    """How much a penalty may grow for what the other rewards gain: by a part of it. One that has
    grown with the answers' length is their price, and no game, if it was hardly learned or answers
    are right more often: where the rewards' sum falls too, RewardFalling says so."""
    gains = [
        series.level() - penalty.beside.get(f"rewards/{other}", math.inf)
        for other, series in run.rewards.items()
    ]
    part = limits.HACKED_LOSS.value * sum(max(0.0, gain) for gain in gains)
    least_length = penalty.beside.get(LENGTH, math.inf)
    if run.has_values(LENGTH):
        least_length += limits.NOTICEABLE.value * run.series[LENGTH].error
    loss = penalty.value - run.rewards[name].level()
    was_learned = penalty.height >= max(part, LEAST_GAIN * loss)
    is_game = was_learned and not _FOR_RIGHT_ANSWERS.search(rival)
    return math.inf if run.level(LENGTH) > least_length and not is_game else part


def _gained_most(run: RunNumbers, fallen: str, peak: Peak) -> tuple[str, float] | None:
    """The reward function with the largest gain, in its own scale, since another was last at
    its best; and what it was then."""
    best: tuple[float, str, float] | None = None
    for name, series in run.rewards.items():
        before = peak.beside.get(f"rewards/{name}")
        if name == fallen or before is None or series.count < SMOOTH:
            continue
        gain, (own_peak, _) = series.level(2 * SMOOTH) - before, run.peaks[name]
        least = max(
            limits.HACKED_GAIN.value * own_peak.height, limits.BEST_OF_NOISE.value * series.error
        )
        if gain > 0 and gain >= least and (best is None or gain / max(least, 1e-9) > best[0]):
            best = (gain / max(least, 1e-9), name, before)
    return None if best is None else best[1:]


def _has_side_effect(run: RunNumbers, peak: Peak) -> bool:
    """Whether answers have become of another length, or the policy another one, since then. It may
    have where no KL says otherwise."""
    length, kl = (peak.beside.get(key) for key in (LENGTH, KL))
    is_longer = length is not None and abs(run.level(LENGTH) - length) >= 0.2 * length
    is_further = kl is None or run.level(KL) >= 1.5 * kl + 0.01
    return is_longer or is_further


def _fallen_evaluation(run: RunNumbers, *, with_reward: bool) -> Verdict | None:
    """The evaluation has been higher, and the training reward as well or not."""
    evaluations = run.evaluations.means
    if len(evaluations) < EVALUATIONS:
        return None
    scores = [evaluation.score for evaluation in evaluations]
    levels = [median(three) for three in zip(scores, scores[1:], scores[2:], strict=False)]
    best = max(range(len(levels)), key=lambda at: levels[at])
    reward_then = evaluations[best + 1].reward
    least_reward = reward_then - limits.BEST_OF_NOISE.value * run.series[REWARD].error
    if (run.level(REWARD) < least_reward) != with_reward:
        return Verdict(0.0, {})
    error = error_of_level(run.evaluations.noise, 3)
    rise = levels[best] - min(levels[: best + 1])
    gain = _gain(rise, error, LEAST_GAIN * abs(levels[best]))
    limit = max(limits.HACKED_LOSS.value * gain, limits.SIGNIFICANT.value * error)
    loss = levels[best] - levels[-1]
    evidence = {
        "evaluation": scores[-1],
        "bestEvaluation": levels[best],
        "reward": run.level(REWARD),
        "rewardThen": reward_then,
    }
    return Verdict(_ratio(loss, limit), evidence)


def not_learning(run: RunNumbers) -> Verdict | None:
    """The reward has never risen, and nothing shows that the policy moves."""
    has_kl, has_gradient = run.has_values(KL), _has_gradient(run)
    least_steps = STILL_STEPS if has_kl else UNLEARNED_STEPS
    num_rewards = run.num_rewards_after_warm_up
    if not has_gradient:
        least_steps, num_rewards = UNMOVED_STEPS, run.series[REWARD].count
    if num_rewards < least_steps:
        return None
    reward = run.series[REWARD]
    # Without a signal nothing can be learned, and NoSignal says so.
    has_signal = not run.level(DEAD_GROUPS) >= limits.DEAD_GROUPS.value
    # The best of many levels and the lowest are each within SURE errors of their mean.
    has_peak = any(
        peak.height > 2 * SURE * peak.error(reward)
        for peak in (run.reward_peak, run.long_reward_peak)
    )
    has_risen = has_peak or run.evaluations.gain_in_errors(KEPT) > SURE
    is_harmless = _is_moving(run) or has_risen or not has_signal
    # Of a policy that stands still a small gain is noise.
    least_gain = limits.BEST_OF_NOISE if has_kl or not has_gradient else limits.NOTICEABLE
    score = least_gain.value / max(1.0, _gain_in_errors(run))
    evidence = {"reward": reward.average, "firstReward": reward.first_average(KEPT)}
    evidence |= {"kl": run.level(KL)} if has_kl else {}
    evidence |= {} if has_gradient else {"gradNorm": 0.0}
    return Verdict(0.0 if is_harmless else score, evidence)


def _is_moving(run: RunNumbers) -> bool:
    """Whether the policy has left its reference, or samples otherwise than at the beginning."""
    is_away = run.has_values(KL) and run.level(KL) >= limits.KL_STILL.value
    return is_away or run.has_moved("entropy") or run.has_moved(LENGTH)


def _has_gradient(run: RunNumbers) -> bool:
    """Whether a gradient was not exactly 0, or none is logged."""
    return not run.has_values(GRADIENT, UNMOVED_STEPS) or run.series[GRADIENT].highest > 0


def _gain_in_errors(run: RunNumbers) -> float:
    """The largest gain since the first steps, of the reward or of one of its functions."""
    reward = run.series[REWARD]
    # Some rewards are learned in the first few steps, and lost in a mean over more.
    gains = [reward.change_in_errors(size) for size in (SMOOTH // 2, SMOOTH, KEPT)]
    gains += [
        series.change_in_errors(KEPT) for series in run.rewards.values() if series.count >= KEPT
    ]
    return max(gains)


def kl_rising(run: RunNumbers) -> Verdict | None:
    """The policy moves away from its reference and gets nothing for it."""
    if not run.has_values("kl", 2 * SMOOTH):
        return None
    now, best = run.level("kl"), run.first_best_reward
    evidence = {"kl": now}
    guarded = now / limits.KL_ABSURD.value
    if run.max_kl is not None:
        evidence["maxKL"] = run.max_kl
        guarded = max(guarded, _ratio(now, limits.KL_GUARD_SHARE.value * run.max_kl))
    unpaid = 0.0
    if best is not None and best.kl is not None:
        evidence |= {"klUntilBestReward": best.kl, "bestReward": best.value}
        needed = max(limits.KL_GROWTH.value * best.kl, best.kl + limits.KL_RISE.value)
        has_stood_still = run.series[REWARD].count - best.num_rewards >= PATIENCE
        is_unpaid = has_stood_still and not _has_paid_for_kl(run)
        unpaid = _ratio(now, needed) if is_unpaid else 0.0
    return Verdict(max(guarded, unpaid), evidence | _reward_evidence(run))


def _has_paid_for_kl(run: RunNumbers) -> bool:
    """Whether the reward has gained since the KL was a third of today's."""
    then = run.first_above(KL, run.level(KL) / limits.KL_GROWTH.value)
    return then is not None and _may_have_gained_since(run, then)


def steps_too_large(run: RunNumbers) -> Verdict | None:
    """Gradients grow or are no numbers, or most of a step is clipped."""
    scores: list[float] = []
    evidence: dict[str, float] = {}
    missing = sum(run.nonfinite_steps)
    if missing:
        scores.append(missing / SMOOTH / NO_GRADIENT)
        evidence["stepsWithoutGradient"] = float(missing)
    if len(run.first_gradients) == GRADIENTS:
        now, before = run.series[GRADIENT].level(GRADIENTS), median(run.first_gradients)
        limit = max(limits.GRADIENT_GROWTH.value * before, limits.GRADIENT_LEAST.value)
        scores.append(_ratio(now, limit))
        evidence |= {"gradNorm": now, "firstGradNorm": before}
    sides = ["clip_ratio_low", "clip_ratio_high"]
    keys = ["clip_ratio"] if run.has_values("clip_ratio") else sides
    if all(map(run.has_values, keys)):
        now = sum(run.level(key) for key in keys)
        before = sum(run.series[key].first_level for key in keys)
        scores.append((now - before) / limits.CLIPPED.value)
        evidence |= {"clippedTokens": now, "firstClippedTokens": before}
    return Verdict(max(scores), evidence) if scores else None


def _reward_evidence(run: RunNumbers) -> dict[str, float]:
    return {"reward": run.level(REWARD)} if run.has_values(REWARD, 1) else {}


def _worst(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    judged = [verdict for verdict in verdicts if verdict is not None]
    return max(judged, key=lambda verdict: verdict.score, default=None)


def _ratio(value: float, limit: float) -> float:
    """`value / limit`, where the limit may be zero or negative and the value as well."""
    if limit <= 0:
        return 1.0 if value > limit else 0.0
    return value / limit
