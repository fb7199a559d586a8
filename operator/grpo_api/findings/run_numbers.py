"""Keeps a bounded summary of a run's steps for the rules to judge. Verdict is the result of one
rule.

All levels of a series are medians, so that one odd step decides nothing. A step costs the same at
any length of a run: the trainer judges every step.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from .evaluations import Evaluation, Evaluations, in_errors
from .step_row import REWARD, StepRow
from .thresholds import BEST_OF_NOISE, NOTICEABLE, SIGNIFICANT
from .thresholds import DEAD_GROUPS as DEAD_GROUPS_LIMIT


class Verdict(NamedTuple):
    """How ill a run is by one rule."""

    score: float
    """1 at the limit, more beyond it."""
    evidence: dict[str, float]
    """The numbers that it was judged by, by their names for users."""


SMOOTH = 10
"""Values in a level: ten steps of a usual batch, after which the error of a median is 0.4 of the
noise of one step."""
LONG_LEVEL = 4 * SMOOTH
"""Values in a level with half of that noise."""
KEPT = 64
"""First and newest values that are kept."""
KEPT_JUMPS = 256
"""Jumps between neighbours that the noise is taken from: fewer would make it noisy itself."""
_QUARTILE_OF_DIFFERENCES = 1.6268
"""Upper quartile of |x - y| for independent normal x and y of standard deviation 1:
1.1503 * sqrt(2)."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median of n normal values, times sqrt(n): sqrt(pi / 2)."""


def error_of_level(noise: float, count: int) -> float:
    """Standard error of a median of `count` values with this standard deviation."""
    return _MEDIAN_ERROR * noise / math.sqrt(count)


def noise_of_jumps(jumps: Iterable[float]) -> float:
    """Standard deviation of a series by the jumps between its neighbours.

    Their upper quartile and not their median: where a step has one prompt, or one data set of
    several, up to half of the neighbours are alike by chance.
    """
    in_order = sorted(jumps)
    return in_order[3 * len(in_order) // 4] / _QUARTILE_OF_DIFFERENCES


class Series:
    """A number that some steps log."""

    __slots__ = ("_first", "_jumps", "_noise", "_recent", "count", "highest")

    def __init__(self) -> None:
        self._first: list[float] = []
        self._recent: list[float] = []
        self._jumps: deque[float] = deque(maxlen=KEPT_JUMPS)
        self._noise: float | None = None
        self.count = 0
        """Values so far."""
        self.highest = -math.inf
        """Highest median of three neighbours so far."""

    def add(self, value: float) -> None:
        """Take the value of the newest step; values that are not finite are left out."""
        if not math.isfinite(value):
            return
        self._noise = None
        if self._recent:
            self._jumps.append(abs(value - self._recent[-1]))
        self._recent.append(value)
        del self._recent[:-KEPT]
        if len(self._first) < KEPT:
            self._first.append(value)
        self.count += 1
        if self.count >= 3:
            self.highest = max(self.highest, median(self._recent[-3:]))

    @property
    def first_level(self) -> float:
        """Level of the first steps."""
        return median(self._first[:SMOOTH])

    def first_average(self, size: int) -> float:
        """Mean of the first `size` values."""
        window = self._first[:size]
        return sum(window) / len(window)

    def level(self, size: int = SMOOTH, ago: int = 0) -> float:
        """Median of the `size` newest values before the last `ago`."""
        return median(self.newest(size, ago))

    @property
    def average(self) -> float:
        """Mean of all values that are kept: less noisy than a median."""
        return sum(self._recent) / len(self._recent)

    def change_in_errors(self, size: int) -> float:
        """How far the mean of all values that are kept stands above that of the first `size`, in
        standard errors of this difference; negative where it stands below."""
        change = self.average - self.first_average(size)
        return in_errors(change, self.noise * math.sqrt(1 / size + 1 / KEPT))

    def bounds(self, size: int = SMOOTH) -> tuple[float, float]:
        """Median and mean of the `size` newest values, the lower one first.

        Values that are all either high or low, as of one prompt a step, make the median jump; one
        odd value moves the mean.
        """
        window = self.newest(size)
        middle, average = median(window), sum(window) / len(window)
        return min(middle, average), max(middle, average)

    def newest(self, size: int, ago: int = 0) -> list[float]:
        """The `size` newest values before the last `ago`, oldest first; fewer where there are no
        more."""
        end = len(self._recent) - ago
        return self._recent[max(0, end - size) : max(0, end)]

    @property
    def noise(self) -> float:
        """Standard deviation by the jumps between neighbours, which a trend hardly changes."""
        if not self._jumps:
            return 0.0
        if self._noise is None:
            self._noise = noise_of_jumps(self._jumps)
        return self._noise

    @property
    def error(self) -> float:
        """Standard error of a level."""
        return error_of_level(self.noise, SMOOTH)


class Peak:
    """The best level of a series so far, and what other series were at then."""

    __slots__ = ("beside", "count", "least", "lowest", "size", "value")

    def __init__(self, size: int = SMOOTH) -> None:
        self.size = size
        """Values in a level."""
        self.value = -math.inf
        """The level."""
        self.least = -math.inf
        """The level, by its lower bound."""
        self.lowest = math.inf
        """The lowest level before it."""
        self.count = 0
        """Values of the series when it was reached."""
        self.beside: dict[str, float] = {}
        """Levels of other series when it was last held."""

    def is_reached(self, series: Series) -> bool:
        """Return True if the series stands above its best level by more than a level's standard
        error."""
        least_gain = self.error(series) if math.isfinite(self.value) else 0.0
        return series.count >= self.size and series.level(self.size) > self.value + least_gain

    def is_held(self, series: Series) -> bool:
        """Return True if the series still stands at its best level, as far as noise lets see."""
        least = self.value - self.error(series)
        return math.isfinite(self.value) and series.level(self.size) >= least

    def move(self, series: Series, beside: dict[str, float]) -> None:
        """Take the series' level as the best one."""
        self.value, self.count, self.beside = series.level(self.size), series.count, beside
        self.least = max(self.least, series.bounds(self.size)[0])
        self.lowest = min(self.lowest, self.value)

    @property
    def height(self) -> float:
        """How far the series has risen up to its best level."""
        return self.value - self.lowest

    def loss(self, series: Series) -> float:
        """How far the series has fallen since, from lower bound to upper bound."""
        return self.least - series.bounds(self.size)[1]

    def least_loss(self, size: float, series: Series) -> float:
        """Loss that counts as one of this size: the best of many levels was so high by chance."""
        error = self.error(series)
        return max(size + BEST_OF_NOISE.value * error, SIGNIFICANT.value * error)

    def error(self, series: Series) -> float:
        """Standard error of a level."""
        return series.error * math.sqrt(SMOOTH / self.size)


KL = "kl"
DEAD_GROUPS = "zero_variance_groups"
LENGTH = "completion_length"
GRADIENT = "grad_norm"
GRADIENTS = 2 * SMOOTH
"""Values in a level of the gradient norm: a usual step's is half or twice as large."""
LOSS = "loss"
LEARNING_RATE = "learning_rate"
SAMPLED = (LENGTH, "completion_clipped_ratio", DEAD_GROUPS)
"""TRL logs these of every generation, as it does the reward."""
MOST_REPEATS = 16
"""Rows in a row that may log one generation again: numbers that stay equal for longer are those of
new generations, of a run that stands still."""
LENGTH_ENDS = ("completion_length_min", "completion_length_max")
EQUAL_REWARDS = 1e-4
"""Spread of the rewards within groups, over 1 + |reward|, that counts as none."""
RECORDED = (LENGTH, KL, LEARNING_RATE)
"""Numbers of which each rise is remembered, with the reward then."""
HIGHER = 1.05
"""Level over the highest so far from which it is remembered."""
KEPT_RECORDS = 256
"""Enough to remember a length that grows from one token to 200,000."""
SAVES = 3
"""Checkpoints over which their time is taken."""
WAITED, WORKED = "reward_seconds", "generation_seconds"
"""Seconds of a step from one generation to the next: of the rewards, and of all."""


def has_generation(row: StepRow) -> bool:
    """Return True if the step logs a new generation; others reuse the one before."""
    return any(key in row.values for key in (REWARD, *SAMPLED))


def has_reward(row: StepRow) -> bool:
    """Return True if the step's generation has rewards to learn from. A mean over none is logged as
    NaN, or without the key; one infinite reward makes the mean infinite."""
    return math.isfinite(row.values.get(REWARD, math.nan))


def generation_numbers(row: StepRow) -> dict[str, float]:
    """The numbers by which two generations differ, even if all of their rewards are equal; empty
    where too few are logged, or all completions have one length."""
    shortest, longest = (row.values.get(end, math.nan) for end in LENGTH_ENDS)
    if not shortest < longest:
        return {}
    keys = (REWARD, "reward_std", *SAMPLED, *LENGTH_ENDS)
    return {key: row.values.get(key, math.nan) for key in keys if key in row.values}


class BestReward(NamedTuple):
    """A level of the reward that was its best when it was reached."""

    value: float
    num_rewards: int
    """Rewards until then."""
    kl: float | None
    """Highest level of the KL until then; None where it had none."""


class Record(NamedTuple):
    """A level of a number that was its highest when it was reached."""

    value: float
    step: int
    num_values: int
    """Values of the number until then."""
    num_rewards: int
    """Rewards until then."""
    average_reward: float
    """Mean of the rewards that were kept then; NaN where none was logged."""


class RunNumbers:
    """The run so far."""

    def __init__(self, max_kl: float | None) -> None:
        self.max_kl = max_kl
        """guard.maxKL of its spec, in nats per token; None where that is unset or not known."""
        self.step = 0
        self.series: defaultdict[str, Series] = defaultdict(Series)
        self.rewards: defaultdict[str, Series] = defaultdict(Series)
        self.reward_peak = Peak()
        self.long_reward_peak = Peak(LONG_LEVEL)
        """Shows what falls below the noise of a few steps, as those of one prompt each."""
        self._best_rewards: deque[BestReward] = deque()
        """The best levels so far that noise may explain the newest by, oldest first."""
        self._records: dict[str, deque[Record]] = {
            key: deque(maxlen=KEPT_RECORDS) for key in RECORDED
        }
        self.peaks: dict[str, tuple[Peak, Peak]] = {}
        """Best level of each reward function and best long one, with the levels of the others
        then."""
        self.evaluations = Evaluations()
        self.steps_without_reward = 0
        """Generations in a row of which no completion had a reward."""
        self.first_gradients: list[float] = []
        """Gradient norms of the first steps with a signal: without one the norm is close to 0."""
        self.nonfinite_steps: deque[bool] = deque(maxlen=SMOOTH)
        """Of the newest steps: whether the gradient norm or the loss is infinite or NaN."""
        self.saves: deque[float] = deque(maxlen=SAVES)
        """Seconds of the newest checkpoints."""
        self.seconds_since_saves: deque[float] = deque(maxlen=SAVES)
        """Seconds of the steps before each of them."""
        self.failed_saves = 0
        """Checkpoints in a row that could not be written."""
        self.rank_seconds: deque[tuple[float, ...]] = deque(maxlen=2 * SMOOTH)
        """Of the newest measured steps."""
        self._last_generation: dict[str, float] = {}
        self._num_repeats = 0
        self._last_values: dict[str, float] = {}
        self._seconds_since_save = 0.0
        self._rows_since_rewards, self._seconds_since_rewards = 0, 0.0
        self._failures = 0.0
        """Checkpoints that the process of the step before could not write."""

    def add(self, row: StepRow) -> None:
        """Take one more step."""
        self.step = row.step
        row = self._without_repeated_generation(row)
        values = dict(row.values)
        if DEAD_GROUPS not in values and "reward_std" in values:
            is_dead = values["reward_std"] <= EQUAL_REWARDS * (1 + abs(values.get(REWARD, 0.0)))
            values[DEAD_GROUPS] = float(is_dead)
        self._add_waiting(row)
        for key, value in values.items():
            self.series[key].add(value)
        for name, value in row.rewards.items():
            self.rewards[name].add(value)
        if row.rank_seconds:
            self.rank_seconds.append(row.rank_seconds)
        self._count_missing_rewards(row)
        self._add_gradient(values)
        self._count_saves(values)
        self._move_peaks(row)
        if row.evaluation is not None and math.isfinite(row.evaluation):
            num_rewards = self.series[REWARD].count
            self.evaluations.add(Evaluation(row.evaluation, self.level(REWARD), num_rewards))
        self._last_values |= values

    def has_values(self, key: str, count: int = SMOOTH) -> bool:
        """Return True if at least `count` steps have logged this number."""
        series = self.series.get(key)
        return series is not None and series.count >= count

    def level(self, key: str) -> float:
        """Level of a number now; NaN where it was never logged."""
        series = self.series.get(key)
        return series.level() if series is not None and series.count else math.nan

    @property
    def first_best_reward(self) -> BestReward | None:
        """The first best level that only noise may set apart from the newest: since then the reward
        has not risen. None before the reward has a level.

        The newest itself would be a late one: noise alone sets new ones for ever.
        """
        return self._best_rewards[0] if self._best_rewards else None

    def first_above(self, key: str, value: float) -> Record | None:
        """What was when one of the recorded numbers became higher than this; None if it never
        did."""
        return next((record for record in self._records[key] if record.value > value), None)

    @property
    def num_rewards_after_warm_up(self) -> int:
        """Rewards since the learning rate was last raised; all of them where it was not."""
        count, records = self.series[REWARD].count, self._records[LEARNING_RATE]
        # The first record is the first level.
        return count - records[-1].num_rewards if len(records) > 1 else count

    def has_moved(self, key: str) -> bool:
        """Return True if a number stands clearly above or below its beginning."""
        if not self.has_values(key, 2 * KEPT):
            return False
        return abs(self.series[key].change_in_errors(KEPT)) > BEST_OF_NOISE.value

    def has_learned(self, since: int | None) -> bool:
        """Return True if the reward stands noticeably above its level `since` steps ago, or
        clearly above that at the run's beginning: a beginning that was low by chance stays so."""
        series = self.series.get(REWARD)
        if series is None or series.count < 2 * SMOOTH:
            return False
        has_earlier = since is not None and len(series.newest(SMOOTH, since)) == SMOOTH
        before = series.level(ago=since or 0) if has_earlier else series.first_level
        gain = BEST_OF_NOISE if since is None else NOTICEABLE
        return series.level() > before + gain.value * series.error

    def _without_repeated_generation(self, row: StepRow) -> StepRow:
        """The row without the numbers of a generation that an earlier row has logged. Some programs
        log them again in each step that reuses it, and TRL does not."""
        generation = generation_numbers(row)
        is_same = bool(generation) and generation == self._last_generation
        self._num_repeats = self._num_repeats + 1 if is_same else 0
        self._last_generation = generation or self._last_generation
        if not is_same or self._num_repeats > MOST_REPEATS:
            return row
        values = {key: value for key, value in row.values.items() if key not in generation}
        return replace(row, values=values, rewards={})

    def _add_gradient(self, values: Mapping[str, float]) -> None:
        numbers = [values[key] for key in (GRADIENT, LOSS) if key in values]
        if not numbers:
            return
        is_missing = not all(map(math.isfinite, numbers))
        self.nonfinite_steps.append(is_missing)
        # A step that reuses a generation has the groups of the step before.
        dead_groups = values.get(DEAD_GROUPS, self._last_values.get(DEAD_GROUPS, 0.0))
        has_signal = not dead_groups >= DEAD_GROUPS_LIMIT.value
        is_needed = len(self.first_gradients) < GRADIENTS
        if GRADIENT in values and has_signal and is_needed and not is_missing:
            self.first_gradients.append(values[GRADIENT])

    def _add_waiting(self, row: StepRow) -> None:
        """Take the seconds of a step; one that reuses a generation waits for no reward."""
        self._rows_since_rewards += 1
        self._seconds_since_rewards += row.values.get("step_seconds", sum(row.phases.values()))
        waited = row.phases.get("reward", 0.0)
        if waited > 0:
            self.series[WAITED].add(waited / self._rows_since_rewards)
            self.series[WORKED].add(self._seconds_since_rewards / self._rows_since_rewards)
            self._rows_since_rewards, self._seconds_since_rewards = 0, 0.0

    def _count_missing_rewards(self, row: StepRow) -> None:
        if has_generation(row):
            self.steps_without_reward = 0 if has_reward(row) else self.steps_without_reward + 1

    def _count_saves(self, values: Mapping[str, float]) -> None:
        self._seconds_since_save += max(0.0, values.get("step_seconds", 0.0))
        # A process counts its own: after a restart the number begins again, and is not logged at 0.
        failures = values.get("checkpoint_failures", 0.0)
        if failures > 0 and failures != self._failures:
            self.failed_saves += 1
        self._failures = failures
        sealed = self._has_grown("checkpoint_step", values) or self._has_grown(
            "checkpoints", values
        )
        if sealed:
            self.failed_saves = 0
            # A restart logs the checkpoint that it begins with, without its seconds.
            if "checkpoint_seconds" in values:
                self.saves.append(values["checkpoint_seconds"])
                self.seconds_since_saves.append(self._seconds_since_save)
            self._seconds_since_save = 0.0

    def _has_grown(self, key: str, values: Mapping[str, float]) -> bool:
        return values.get(key, 0.0) > self._last_values.get(key, 0.0)

    def _move_peaks(self, row: StepRow) -> None:
        if REWARD in row.values:
            self._move_reward_peak(self.series[REWARD])
        for key in RECORDED:
            self._add_record(key, row.step)
        for name in row.rewards:
            series = self.rewards[name]
            for peak in self.peaks.setdefault(name, (Peak(), Peak(LONG_LEVEL))):
                if peak.is_reached(series):
                    peak.move(series, self._levels())
                elif peak.is_held(series):
                    peak.beside = self._levels()

    def _move_reward_peak(self, reward: Series) -> None:
        peak, long_peak = self.reward_peak, self.long_reward_peak
        if long_peak.is_reached(reward):
            long_peak.move(reward, {})
        if not peak.is_reached(reward):
            return
        peak.move(reward, self._levels())
        # The highest so far: the KL falls where reference.sync moves the reference.
        kl = peak.beside.get(KL)
        if kl is not None and self._records[KL]:
            kl = max(kl, self._records[KL][-1].value)
        self._best_rewards.append(BestReward(peak.value, peak.count, kl))
        # Those that are worse by more than noise explains are forgotten.
        least = peak.value - BEST_OF_NOISE.value * reward.error
        while self._best_rewards[0].value < least:
            self._best_rewards.popleft()

    def _add_record(self, key: str, step: int) -> None:
        """Remember the level, with the reward then, if it is clearly higher than ever."""
        if not self.has_values(key):
            return
        level, records = self.level(key), self._records[key]
        if records and level <= HIGHER * records[-1].value:
            return
        series = self.series.get(REWARD)
        num_rewards = series.count if series else 0
        average = series.average if series and num_rewards else math.nan
        count = self.series[key].count
        records.append(Record(level, step, count, num_rewards, average))

    def _levels(self) -> dict[str, float]:
        """Levels of the numbers that are compared with those at a best one; a reward function's is
        under `rewards/NAME`."""
        watched = (KL, LENGTH, REWARD)
        levels = {key: self.level(key) for key in watched if self.has_values(key)}
        for name, series in self.rewards.items():
            if series.count >= SMOOTH:
                levels[f"rewards/{name}"] = series.level()
        return levels
