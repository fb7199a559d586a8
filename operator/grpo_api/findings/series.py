"""One number of a run over its steps: where it began, where it stands, how much it jumps.

All levels are medians, so that one odd step decides nothing. The memory of a series is bounded, and
a step costs the same at any length of a run: the trainer judges every step.
"""

import math
from collections import deque
from itertools import islice
from statistics import median

SMOOTH = 10
"""Values in a level: ten steps of a usual batch, after which the error of a median is 0.4 of the
noise of one step."""
KEPT = 64
"""Newest values that are kept."""
KEPT_JUMPS = 256
"""Jumps between neighbours that the noise is taken from: fewer would make it noisy itself."""
_MAD_OF_DIFFERENCES = 0.9539
"""Median of |x - y| for independent normal x and y of standard deviation 1: 0.6745 * sqrt(2)."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median of n normal values, times sqrt(n): sqrt(pi / 2)."""


def error_of_level(usual_jump: float, count: int) -> float:
    """Standard error of a median of so many values, by the median jump between neighbours."""
    noise = usual_jump / _MAD_OF_DIFFERENCES
    return _MEDIAN_ERROR * noise / math.sqrt(count)


class Series:
    """A number that some steps log."""

    __slots__ = ("_error", "_first", "_jumps", "_recent", "count", "highest")

    def __init__(self) -> None:
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=KEPT)
        self._jumps: deque[float] = deque(maxlen=KEPT_JUMPS)
        self._error: float | None = None
        self.count = 0
        """Values so far."""
        self.highest = -math.inf
        """Highest median of three neighbours so far."""

    def add(self, value: float) -> None:
        """Take the value of the newest step; values that are not finite are left out."""
        if not math.isfinite(value):
            return
        self._error = None
        if self._recent:
            self._jumps.append(abs(value - self._recent[-1]))
        self._recent.append(value)
        if len(self._first) < SMOOTH:
            self._first.append(value)
        self.count += 1
        if self.count >= 3:
            self.highest = max(
                self.highest, median(islice(self._recent, len(self._recent) - 3, None))
            )

    @property
    def first(self) -> float:
        """Level of the first steps."""
        return median(self._first)

    @property
    def last(self) -> float:
        """The newest value."""
        return self._recent[-1]

    def level(self, size: int = SMOOTH, ago: int = 0) -> float:
        """Median of the `size` newest values before the last `ago`."""
        return median(self.newest(size, ago))

    def newest(self, size: int, ago: int = 0) -> list[float]:
        """The `size` newest values before the last `ago`, oldest first; fewer where there are no
        more."""
        end = len(self._recent) - ago
        return list(islice(self._recent, max(0, end - size), max(0, end)))

    @property
    def error(self) -> float:
        """Standard error of a level, from the jumps between neighbours, which a trend hardly
        changes."""
        if not self._jumps:
            return 0.0
        if self._error is None:
            self._error = error_of_level(median(self._jumps), SMOOTH)
        return self._error


class Peak:
    """The best level of a series so far, and what other series were at when it was reached."""

    __slots__ = ("beside", "count", "lowest", "value")

    def __init__(self) -> None:
        self.value = -math.inf
        """The level."""
        self.lowest = math.inf
        """The lowest level before it."""
        self.count = 0
        """Values of the series when it was reached."""
        self.beside: dict[str, float] = {}
        """Levels of other series at that time."""

    def is_reached(self, series: Series, errors: float = 1.0) -> bool:
        """Return True if the series stands above its best level by more than so many errors of a
        level."""
        least_gain = errors * series.error if math.isfinite(self.value) else 0.0
        return series.count >= SMOOTH and series.level() > self.value + least_gain

    def move(self, series: Series, beside: dict[str, float]) -> None:
        """Take the series' level as the best one."""
        self.value, self.count, self.beside = series.level(), series.count, beside
        self.lowest = min(self.lowest, self.value)

    @property
    def height(self) -> float:
        """How far the series has risen up to its best level."""
        return self.value - self.lowest
