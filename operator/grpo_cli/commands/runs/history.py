"""`grpo history`: the logged steps of a run as CSV, as curves in the terminal, or as a picture."""

import csv
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_api.report.history import ATTEMPT, STEP, Row, standing_rows

from ...cluster.delivery_pod import add_pod_arguments
from ...inputs.run_history import SOURCE_HELP, load_history, number_steps
from ...show import pictures
from ...show.documents import print_document
from ...show.errors import ManifestError, NotYet, OptionError
from ...show.pictures import write_figure
from ...show.terminal import console

USUAL = (
    "reward",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "frac_reward_zero_std",
)
"""Curves that show whether a run learns."""

USUAL_COLUMNS = (ATTEMPT, "reward", "kl", "loss")
"""First in CSV, where a run has them."""
ROW_FORMS = ("csv", "json", "yaml")
"""Outputs that list the rows; others draw them."""


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("run_name", metavar="RUN", help=SOURCE_HELP)
    parser.add_argument(
        "-o",
        "--output",
        choices=(*ROW_FORMS, "plot", "svg", "png"),
        default="csv",
        help="unset: csv",
    )
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="file for svg or png; unset: svg to stdout"
    )
    parser.add_argument(
        "--key",
        action="append",
        help=f"curve or column, may be repeated. Unset: all columns; curves {', '.join(USUAL)}",
    )
    parser.add_argument(
        "--rolled-back", action="store_true", help="list the steps that were rolled back, too"
    )
    add_pod_arguments(parser)


def run(options: Namespace) -> int:
    """Prints or draws the run's steps."""
    if options.output == "png" and options.to is None:
        raise OptionError("-o png: name its file by --to")
    rows = load_history(options, options.run_name)
    if not rows:
        raise ManifestError(f"{options.run_name} has no logged steps")
    with_rolled_back = options.rolled_back and options.output in ROW_FORMS
    shown = rows if with_rolled_back else standing_rows(rows)
    if not shown:
        raise NotYet(f"all steps of {options.run_name} were rolled back; --rolled-back lists them")
    if options.output in ROW_FORMS:
        _print_rows(options.output, shown, options.key)
        return 0
    drawn = pictures.curves_of(number_steps(shown), options.key or USUAL)
    if not drawn:
        raise OptionError(
            f"{options.run_name} has no numbers under {', '.join(options.key or USUAL)}; choose by "
            "--key"
        )
    _draw(options, drawn)
    return 0


def _draw(options: Namespace, drawn: list[pictures.Curve]) -> None:
    """Writes the curves in the asked form."""
    if options.output == "plot":
        out = console()
        for line in pictures.plot_lines(drawn, out.width):
            out.print(line, markup=False, soft_wrap=True)
        return
    figure = pictures.draw_curves(drawn, options.run_name)
    write_figure(figure, options.output, options.to)


def _print_rows(form: str, rows: Sequence[Row], keys: Sequence[str] | None) -> None:
    """All rows; the columns that most people look for first, then those that appear."""
    all_columns = dict.fromkeys(key for row in rows for key in row)
    if unknown := [key for key in keys or () if key not in all_columns]:
        raise OptionError(f"--key {unknown[0]}: there are {', '.join(all_columns)}")
    usual = [key for key in USUAL_COLUMNS if key in all_columns]
    others = [key for key in all_columns if key not in (STEP, *usual)]
    columns = [STEP, *(keys or [*usual, *others])]
    if form != "csv":
        print_document(form, [_in_order(row, columns) for row in rows])
        return
    table = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({key: _cell(value) for key, value in row.items()})


def _in_order(row: Row, columns: Sequence[str]) -> Row:
    return {key: row[key] for key in columns if key in row}


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
