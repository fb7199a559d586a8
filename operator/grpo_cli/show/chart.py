"""Draws a plan's memory per phase against the card, as SVG by hand or as PNG by matplotlib.

At a glance one sees which phase is the tight one.
"""

from html import escape
from pathlib import Path

from grpo_api.plan.plan import ExecutionPlan, MemoryPrediction

from .errors import OptionError
from .terminal import gib

WIDTH, HEIGHT, LEFT, TOP, BAR, STEP = 720, 330, 90, 60, 24, 36
PEAK, OTHER, LIMIT = "#c2410c", "#2563eb", "#b91c1c"


def phases(memory: MemoryPrediction) -> dict[str, float]:
    """GiB of each phase in the order of the step."""
    return {name: gib(count) for name, count in memory.phases.model_dump().items() if count}


def title(plan: ExecutionPlan) -> str:
    """What is drawn, in a line."""
    where = f"{plan.gpus} x {plan.gpu_product or plan.gpu_resource}"
    return f"{plan.parameters} {plan.method}, reference {plan.strategy}, on {where}"


def draw_svg(plan: ExecutionPlan) -> str:
    """The picture as an SVG document.

    Raises:
        OptionError: the plan has no prediction (accelerator CPU).
    """
    memory = _memory(plan)
    bars = phases(memory)
    usable, device = gib(memory.usable_bytes), gib(memory.device_bytes)
    scale = (WIDTH - LEFT - 90) / max(usable, device, *bars.values())
    bottom = TOP + STEP * len(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="26" font-size="16">{escape(title(plan))}</text>',
    ]
    for row, (name, size) in enumerate(bars.items()):
        colour = PEAK if name == memory.peak_phase else OTHER
        width = size * scale
        y = TOP + row * STEP
        text_y = y + 17
        lines.append(f'<text x="{LEFT - 8}" y="{text_y}" text-anchor="end">{name}</text>')
        lines.append(
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
        )
        lines.append(f'<text x="{LEFT + width + 6:.1f}" y="{text_y}">{size:.1f} GiB</text>')
    for value, label, dash in ((usable, "usable", ""), (device, "needed with margin", "4 3")):
        x = LEFT + value * scale
        height = bottom + (18 if dash else 36)
        place = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 14}"'
        line = f'<line {place} stroke="{LIMIT}" stroke-dasharray="{dash}"/>'
        text = (
            f'<text x="{x:.1f}" y="{height}" text-anchor="middle" fill="{LIMIT}">{label} '
            f"{value:.1f} GiB</text>"
        )
        lines.append(line + text)
    return "\n".join([*lines, "</svg>", ""])


def write_png(plan: ExecutionPlan, path: Path) -> None:
    """Writes the picture as PNG.

    Raises:
        OptionError: matplotlib is not installed, or the plan has no prediction.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "-o png needs matplotlib: pip install matplotlib, or take -o svg"
        ) from error
    memory = _memory(plan)
    bars = phases(memory)
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    colours = [PEAK if name == memory.peak_phase else OTHER for name in bars]
    axes.barh(list(bars), list(bars.values()), color=colours)
    axes.axvline(gib(memory.usable_bytes), color=LIMIT, label="usable")
    axes.axvline(gib(memory.device_bytes), color=LIMIT, linestyle="--", label="needed with margin")
    axes.invert_yaxis()
    axes.set_xlabel("GiB on one GPU")
    axes.set_title(title(plan), fontsize=10)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _memory(plan: ExecutionPlan) -> MemoryPrediction:
    """The plan's prediction.

    Raises:
        OptionError: there is none.
    """
    if plan.memory is None:
        raise OptionError("a CPU plan has no GPU memory to draw")
    return plan.memory
