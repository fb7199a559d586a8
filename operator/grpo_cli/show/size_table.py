"""Prints the curve of GPUs against time: what every number of GPUs would give, and which of them
the plan takes.

"How many GPUs should I rent?" is answered by the numbers beside each other, not by the one that was
chosen.
"""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from grpo_planner.search.scaling_curve import Size

from .plan_table import CHOSEN
from .terminal import show_table

HEADINGS = (
    "GPUs",
    "nodes",
    "product",
    "method",
    "s/step",
    "GPU-s/step",
    "GPU-hours",
    "price",
    "free",
    "",
)
NUMBERS = ("GPUs", "nodes", "s/step", "GPU-s/step", "GPU-hours", "price", "free")
UNKNOWN = "-"


def show_sizes(out: Console, sizes: Sequence[Size], planned: int = 0) -> None:
    """Prints one row per number of GPUs, fewest first, and what would fill the columns that are
    empty.

    `planned`: GPUs of the plan on what is free; 0 without a plan.
    """
    show_table(out, HEADINGS, sizes, _cells, _stacked_cells, right=NUMBERS, style=_style)
    if chosen := next((size for size in sizes if size.rule), None):
        out.print(Text(f"{CHOSEN}: {chosen.rule}"))
        if planned not in (0, chosen.gpus):
            out.print(f"sizes are of empty nodes; on what is free now {planned} GPUs are planned")
    if any(size.engine_gpus for size in sizes):
        out.print("[dim]+ GPUs of the engines beside the trainer's[/dim]")
    for line in _missing_facts(sizes):
        out.print(f"[dim]{line}[/dim]")


def _style(size: Size) -> str:
    return "bold green" if size.chosen else ""


def _cells(size: Size) -> list[str]:
    """A size's cells under HEADINGS."""
    hours = UNKNOWN if size.gpu_hours is None else f"{size.gpu_hours:.1f}"
    price = UNKNOWN if size.price is None else f"{size.price:.2f}"
    engines = f"+{size.engine_gpus}" if size.engine_gpus else ""
    return [
        f"{size.gpus}{engines}", str(size.nodes), size.gpu_product, size.method,
        f"{size.step_seconds:.1f}", f"{size.step_gpu_seconds:.0f}", hours, price,
        f"{size.headroom:.0%}", CHOSEN if size.chosen else "",
    ]  # fmt: skip


def _stacked_cells(size: Size) -> tuple[Text, ...]:
    """A size in lines, for a narrow terminal."""
    gpus, nodes, product, method, seconds, gpu_seconds, hours, price, free, chosen = _cells(size)
    numbers = f"{seconds} s/step, {gpu_seconds} GPU-s/step, {free} of a GPU's memory free"
    numbers += "" if hours == UNKNOWN else f", {hours} GPU-hours"
    numbers += "" if price == UNKNOWN else f", price {price}"
    where = Text(f"{gpus} x {product}, nodes {nodes}", _style(size) or "bold")
    return where, Text(method), Text(numbers), *([Text(chosen, _style(size))] if chosen else [])


def _missing_facts(sizes: Sequence[Size]) -> Iterable[str]:
    """What is not known, and what would make it known."""
    if not sizes:
        yield "nothing fits on any number of these GPUs"
    elif all(size.gpu_hours is None for size in sizes):
        yield (
            "GPU-hours to the end are known where spec.training.maxSteps says how far the run goes"
        )
    elif all(size.price is None for size in sizes):
        yield "prices are known where an inventory's nodes have gpuHourPrice"
