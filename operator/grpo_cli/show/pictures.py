"""Draws curves in the terminal, and by matplotlib, which nothing else needs."""

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grpo_api.findings.step_row import as_number
from grpo_api.text.quantity import MAX_COUNT

from .errors import OptionError

_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "grpo"}
"""Text stays text, and the same numbers give the same file."""


def write_figure(figure: Any, kind: Literal["svg", "png"], path: Path | None) -> None:
    """Write a figure into a file; without one print it, as svg.

    Raises:
        OptionError: the file can't be written.
    """
    from matplotlib import rc_context

    picture = io.BytesIO()
    with rc_context(_SETTINGS):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(picture, format=kind, dpi=120, metadata=metadata)
    if path is None:
        print(picture.getvalue().decode(), end="")
        return
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise OptionError(f"{path} can't be written: {error.strerror}") from error


BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 5
LEAST_COLUMNS = 20
COLOUR = "#2563eb"
LARGEST_VALUE = 1e100
"""Axes of larger numbers overflow."""


class Curve(NamedTuple):
    """The values of a number, by step."""

    key: str
    points: list[tuple[int, float]]

    @property
    def values(self) -> list[float]:
        """Without their steps."""
        return [value for _, value in self.points]


def curves_of(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Curve]:
    """The curves of these keys; a key without a number that can be drawn has no curve."""
    curves = []
    for key in keys:
        points = []
        for row in rows:
            # W&B's exports have a prefix before the trainer's keys.
            logged = row.get(key, row.get(f"train/{key}"))
            step, value = as_number(row.get("step")), as_number(logged)
            if step is None or value is None:
                continue
            if 0 <= step <= MAX_COUNT and abs(value) <= LARGEST_VALUE:
                points.append((int(step), value))
        if points:
            curves.append(Curve(key, points))
    return curves


def plot_lines(curves: Sequence[Curve], width: int) -> Iterator[str]:
    """Each curve as a bar plot of block characters, with its range beside it."""
    for curve in curves:
        low, high = min(curve.values), max(curve.values)
        labels = [f"{high:.4g}", *[""] * (ROWS - 2), f"{low:.4g}"]
        margin = max(map(len, labels))
        columns = _columns(curve.values, max(LEAST_COLUMNS, width - margin - 3))
        first, last = curve.points[0], curve.points[-1]
        yield f"{curve.key}: {first[1]:.4g} at step {first[0]}, {last[1]:.4g} at step {last[0]}"
        scale = (high - low) or 1.0
        heights = [round((value - low) / scale * (8 * ROWS - 1)) + 1 for value in columns]
        for index, label in enumerate(labels):
            below = 8 * (ROWS - 1 - index)
            cells = [BLOCKS[min(8, max(0, height - below))] for height in heights]
            yield f"{label:>{margin}} │{''.join(cells)}"


def _columns(values: Sequence[float], count: int) -> list[float]:
    """At most `count` means of neighbouring values."""
    if len(values) <= count:
        return list(values)
    bounds = [index * len(values) // count for index in range(count + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]


def draw_curves(curves: Sequence[Curve], title: str) -> Any:
    """A figure of the curves, one below the other.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 1.8 * len(curves)), layout="constrained")
    all_axes = figure.subplots(len(curves), squeeze=False, sharex=True)
    for (axes,), curve in zip(all_axes, curves, strict=True):
        axes.plot(*zip(*curve.points, strict=True), color=COLOUR, linewidth=1.2)
        axes.set_title(curve.key, fontsize=9, parse_math=False)
    figure.suptitle(title, fontsize=10, parse_math=False)
    return figure
