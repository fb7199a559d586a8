"""Reads the logged steps of a run from a file: JSON lines, a JSON list, CSV, or transformers'
trainer_state.json.

Keys are TRL's, with or without a tracker's prefix, or ours (grpo_api/findings/step_row.py). Lines
of a pod's log that are not JSON are skipped.
"""

import csv
import io
import json
from pathlib import Path
from typing import Any

from grpo_api.report.history import Row, parse_lines

from ..show.errors import ManifestError

HISTORY_KEY = "log_history"
"""Where trainer_state.json has its steps."""


def load_rows(path: Path) -> list[Row]:
    """The logged dictionaries of a file, in its order.

    Raises:
        ManifestError: it can't be read.
    """
    try:
        # A kill may have cut a character in two.
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    return _dictionaries(text, is_csv=path.suffix == ".csv")


def _dictionaries(text: str, *, is_csv: bool) -> list[Row]:
    if is_csv:
        # None is the key of what a line has beyond the header.
        lines = csv.DictReader(io.StringIO(text, newline=""))
        return [{str(key): value for key, value in line.items()} for line in lines]
    whole = _parsed(text)
    if isinstance(whole, dict) and isinstance(whole.get(HISTORY_KEY), list):
        whole = whole[HISTORY_KEY]
    if isinstance(whole, list):
        return [each for each in whole if isinstance(each, dict)]
    return parse_lines(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
