"""Draws numbers of a run over its steps: in the terminal, as SVG by hand, or as PNG by matplotlib.

SVG needs a few lines and no library. PNG is matplotlib's, as for `grpo plan`: who wants one has it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from grpo_api.findings.step_row import as_number

from .errors import OptionError

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 5
LEAST_COLUMNS = 20
WIDTH, HEIGHT, LEFT, TOP, GAP = 720, 110, 90, 40, 34
COLOUR = "#2563eb"


class Curve(NamedTuple):
    """The finite values of a number, by step."""

    key: str
    points: list[tuple[int, float]]

    @property
    def values(self) -> list[float]:
        """Without their steps."""
        return [value for _, value in self.points]


def curves_of(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Curve]:
    """The curves of these keys; of a key without a finite number there is none."""
    curves = []
    for key in keys:
        points = []
        for row in rows:
            step, value = as_number(row.get("step")), as_number(row.get(key))
            if step is not None and value is not None and math.isfinite(value + step):
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


def draw_svg(curves: Sequence[Curve], title: str) -> str:
    """The curves one below the other, as an SVG document."""
    height = TOP + (HEIGHT + GAP) * len(curves)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="22" font-size="16">{escape(title)}</text>',
    ]
    for index, curve in enumerate(curves):
        lines += _panel(curve, TOP + (HEIGHT + GAP) * index)
    return "\n".join([*lines, "</svg>", ""])


def _panel(curve: Curve, top: int) -> Iterator[str]:
    """A curve in its frame, with its range at the left and its steps below."""
    low, high = min(curve.values), max(curve.values)
    first, last = curve.points[0][0], curve.points[-1][0]
    scale_x = (WIDTH - LEFT - 20) / ((last - first) or 1)
    scale_y = (HEIGHT - 24) / ((high - low) or 1.0)
    bottom = top + HEIGHT
    points = " ".join(
        f"{LEFT + (step - first) * scale_x:.1f},{bottom - (value - low) * scale_y:.1f}"
        for step, value in curve.points
    )
    yield f'<text x="{LEFT}" y="{top + 10}" font-weight="bold">{escape(curve.key)}</text>'
    for y, value in ((bottom - HEIGHT + 28, high), (bottom, low)):
        yield f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{value:.4g}</text>'
    yield f'<path d="M{LEFT},{bottom}H{WIDTH - 20}" stroke="#9ca3af"/>'
    yield f'<polyline points="{points}" fill="none" stroke="{COLOUR}" stroke-width="1.5"/>'
    yield f'<text x="{LEFT}" y="{bottom + 15}">step {first}</text>'
    yield f'<text x="{WIDTH - 20}" y="{bottom + 15}" text-anchor="end">{last}</text>'


def write_png(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Writes the picture as PNG.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "-o png needs matplotlib: pip install matplotlib, or take -o svg"
        ) from error
    figure = Figure(figsize=(8, 1.8 * len(curves)), layout="constrained")
    all_axes = figure.subplots(len(curves), squeeze=False, sharex=True)
    for (axes,), curve in zip(all_axes, curves, strict=True):
        axes.plot(*zip(*curve.points, strict=True), color=COLOUR, linewidth=1.2)
        axes.set_title(curve.key, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
