"""Draws a plan's memory per phase against the card: at a glance one sees which phase is the tight
one."""

from typing import Any

from grpo_api.plan.plan import ExecutionPlan

from .errors import OptionError
from .pictures import new_figure
from .terminal import gib

PEAK, OTHER, LIMIT = "#c2410c", "#2563eb", "#b91c1c"


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
