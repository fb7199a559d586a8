"""Writes pictures by matplotlib, which nothing else needs.

A plan's memory is drawn per phase against the card: at a glance one sees which phase is the tight
one.
"""

import io
from pathlib import Path
from typing import Any, Literal

from grpo_api.plan.plan import ExecutionPlan

from .errors import OptionError
from .terminal import gib

_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "grpo"}
"""Text stays text, and the same numbers give the same file."""
PEAK, OTHER, LIMIT = "#c2410c", "#2563eb", "#b91c1c"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("a picture needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


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


def draw_memory(plan: ExecutionPlan) -> Any:
    """A figure of the plan's memory.

    Raises:
        OptionError: matplotlib is not installed, or the plan has no prediction (accelerator CPU).
    """
    memory = plan.memory
    if memory is None:
        raise OptionError("a CPU plan has no GPU memory to draw")
    bars = {name: gib(count) for name, count in memory.phases.model_dump().items() if count}
    usable, needed = gib(memory.usable_bytes), gib(memory.device_bytes)
    where = f"{plan.gpus} x {plan.gpu_product or plan.gpu_resource}"
    title = f"{plan.parameters} {plan.method}, reference {plan.strategy}, on {where}"
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    colours = [PEAK if name == memory.peak_phase else OTHER for name in bars]
    drawn_bars = axes.barh(list(bars), list(bars.values()), color=colours)
    axes.bar_label(drawn_bars, fmt="%.1f GiB", padding=4)
    axes.axvline(usable, color=LIMIT, label=f"usable {usable:.1f} GiB")
    label = f"needed with margin {needed:.1f} GiB"
    axes.axvline(needed, color=LIMIT, linestyle="--", label=label)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on one GPU")
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.legend(loc="lower right")
    return figure
