"""Reads and writes files of measured runs, as `grpo calibrate` collects them.

A row is the same as in the planner's calibration.yaml, on one line each, so that two files can be
compared and joined. A file may also be the ConfigMap of the operator, or its text.
"""

import json
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from grpo_planner.time.measured_runs import (
    FIT,
    MeasuredRow,
    MeasuredRuns,
    read_rows,
    written_rows,
)

from ..show.errors import InventoryError
from ..show.kubectl_yaml import load_value

HEAD = "# Step times of finished jobs, by `grpo calibrate`; for `grpo plan --calibration`.\n"
MOST_PROBLEMS = 5
"""Wrong rows that are listed."""


@lru_cache(maxsize=4)
def read_calibration(file: str | None) -> MeasuredRuns:
    """The runs of a file; none without one.

    Raises:
        InventoryError: it can't be read, or a row is wrong.
    """
    if file is None:
        return MeasuredRuns()
    rows = load_measured_rows(Path(file))
    outdated = sum(row.fit != FIT for row in rows)
    if outdated:
        print(
            f"grpo: {file}: {outdated} of {len(rows)} rows are of another version of the time "
            "model and count for nothing; run `grpo calibrate` again",
            file=sys.stderr,
        )
    return MeasuredRuns.newest(rows)


def load_measured_rows(file: Path) -> list[MeasuredRow]:
    """The rows of a file, or of the ConfigMap in it.

    Raises:
        InventoryError: it can't be read, or a row is wrong.
    """
    try:
        document = load_value(file.read_text(encoding="utf-8"))
        if isinstance(document, dict) and document.get("kind") == "ConfigMap":
            texts = document.get("data") or {}
            document = next((json.loads(text) for text in texts.values()), None)
        rows, problems = read_rows(document)
    except OSError as error:
        raise InventoryError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise InventoryError(f"{file} is no YAML: {error}") from error
    if problems:
        more = len(problems) - MOST_PROBLEMS
        listed = [f"{file}: {problem}" for problem in problems[:MOST_PROBLEMS]]
        raise InventoryError(*listed, *([f"{file}: {more} more"] if more > 0 else []))
    return rows


def save_measured_rows(file: Path, rows: Iterable[MeasuredRow]) -> None:
    """Write a file of these rows.

    Raises:
        InventoryError: it can't be written.
    """
    lines = [f"- {json.dumps(row)}\n" for row in written_rows(rows)]
    try:
        # A kill or a full disk must not lose the rows that the file has.
        target = file.resolve()
        part = target.with_name(f".{target.name}.part")
        part.write_text(HEAD + "runs:\n" + "".join(lines), encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise InventoryError(f"{file}: {error.strerror}") from error
