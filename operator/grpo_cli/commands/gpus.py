"""`grpo gpus`: the GPU products that the planner knows, with the short names that `--gpus` and
inventories take."""

from argparse import ArgumentParser, Namespace

from grpo_planner.hardware.products import Product, obstacle_message, short_names
from grpo_planner.hardware.products import table as products

from ..show.terminal import console, show_table

HEADINGS = ("product", "short names", "GiB", "TFLOP/s", "GB/s", "the trainer's image")


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments: there are none."""


def run(_: Namespace) -> int:
    """Prints the list."""
    out = console()
    rows = [_row(label, product) for label, product in products().items()]
    show_table(out, HEADINGS, rows, tuple, right=HEADINGS[2:5])
    out.print(
        "[dim]TFLOP/s dense in bfloat16, in float32 where there is no bfloat16; data sheets, not "
        "measured[/dim]"
    )
    return 0


def _row(label: str, product: Product) -> tuple[str, str, str, str, str, str]:
    """Label, short names, memory, speed, and whether the image computes there."""
    names = ", ".join(
        short for short, product_label in short_names().items() if product_label == label
    )
    image = (
        "can't compute there"
        if obstacle_message(label, "", product.capability)
        else "computes there"
    )
    return (
        label,
        names,
        f"{product.memory_mib / 1024:.0f}",
        f"{product.teraflops:.0f}",
        f"{product.bandwidth:.0f}",
        image,
    )
