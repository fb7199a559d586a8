"""`grpo gpus`: the GPU products that the planner knows, with the short names that `--gpus` and
inventories take."""

from argparse import ArgumentParser, Namespace
from typing import Any

from grpo_planner.hardware.products import Product, obstacle_message, short_names
from grpo_planner.hardware.products import table as products

from ..show.documents import add_output, print_document
from ..show.terminal import console, show_table

HEADINGS = ("product", "short names", "GiB", "TFLOP/s", "GB/s", "the trainer's image")


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_output(parser)


def run(options: Namespace) -> int:
    """Prints the list."""
    entries = [_entry(label, product) for label, product in products().items()]
    if options.output != "table":
        print_document(options.output, entries)
        return 0
    out = console()
    rows = [_row(entry) for entry in entries]
    show_table(out, HEADINGS, rows, tuple, right=HEADINGS[2:5])
    out.print(
        "[dim]TFLOP/s dense in bfloat16, in float32 where there is no bfloat16; data sheets, not "
        "measured[/dim]"
    )
    return 0


def _entry(label: str, product: Product) -> dict[str, Any]:
    """What programs read of a product."""
    return {
        "product": label,
        "shortNames": [short for short, meant in short_names().items() if meant == label],
        "gib": product.memory_mib / 1024,
        "teraflops": product.teraflops,
        "gigabytesPerSecond": product.bandwidth,
        "computes": not obstacle_message(label, "", product.capability),
    }


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    """The same for people: GiB, TFLOP/s and GB/s in whole numbers."""
    numbers = (f"{entry[key]:.0f}" for key in ("gib", "teraflops", "gigabytesPerSecond"))
    image = "computes there" if entry["computes"] else "can't compute there"
    return entry["product"], ", ".join(entry["shortNames"]), *numbers, image
