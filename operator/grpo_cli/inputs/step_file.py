"""Reads the logged steps of a run from a file: JSON lines, a JSON list, CSV, or transformers'
trainer_state.json.

Keys are TRL's, with or without a tracker's prefix, or ours (grpo_api/findings/step_row.py). Lines
of a pod's log that are not JSON are skipped.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_api.findings.step_row import StepRow, step_row

from ..show.errors import ManifestError

HISTORY_KEY = "log_history"
"""Where trainer_state.json has its steps."""


def load_steps(path: str) -> list[StepRow]:
    """The steps of a file, in its order.

    Raises:
        ManifestError: it can't be read, or has no step with a number that the rules know.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ManifestError(f"{path}: {reason}") from error
    rows = [step_row(logged) for logged in _dictionaries(text, is_csv=path.endswith(".csv"))]
    steps = [row for row in rows if row is not None]
    if not steps:
        raise ManifestError(
            f"{path} has no logged steps: write one JSON object per line, CSV with a header, or "
            "trainer_state.json, with `step` and TRL's keys such as reward, kl, entropy"
        )
    return steps


def _dictionaries(text: str, *, is_csv: bool) -> Iterable[Mapping[str, Any]]:
    if is_csv:
        # None is the key of what a line has beyond the header.
        lines = csv.DictReader(io.StringIO(text, newline=""))
        return [{str(key): value for key, value in line.items()} for line in lines]
    whole = _parsed(text)
    if isinstance(whole, dict) and isinstance(whole.get(HISTORY_KEY), list):
        whole = whole[HISTORY_KEY]
    if isinstance(whole, list):
        return [each for each in whole if isinstance(each, dict)]
    each_line = (_parsed(line) for line in text.splitlines() if line.lstrip().startswith("{"))
    return [parsed for parsed in each_line if isinstance(parsed, dict)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
