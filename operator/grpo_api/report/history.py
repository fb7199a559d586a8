"""A run's own history: a row for each logged step, and samples of what the policy wrote.

Rank 0 writes both files into its attempt's folder, beside the checkpoints. Each checkpoint contains
what was written by then, so a resumed attempt begins its files with exactly the steps that it goes
on from. The newest attempt's files are therefore the history of the whole run; rows after the step
that a rollback resumed from stay in them, marked.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..text.contract import ATTEMPT_PREFIX
from ..text.log_lines import finite_values

METRICS_FILE = "metrics.jsonl"
"""A JSON object for each logged step: TRL's keys, and ours of what it does not log."""
SAMPLES_FILE = "samples.jsonl"
"""A JSON object for each sampled step: whole groups of completions."""
HISTORY_FILES = (SAMPLES_FILE, METRICS_FILE)
"""In the order in which an attempt begins them: with the second one the first one is there."""
STEP = "step"
ATTEMPT = "attempt"
"""The attempt that took the step; 0 for a step of the run that spec.resumeFrom names."""
ROLLED_BACK = "rolledBack"
"""True in rows of steps that a later attempt did not go on from."""
FINDINGS = "findings"
"""Names of the findings that held at the step."""

Row = dict[str, Any]


def parse_lines(text: str) -> list[Row]:
    """The JSON objects among lines. The start of a line that a kill has cut off is no JSON."""
    # str.splitlines() would also break lines at characters inside of texts.
    objects = (parse_json(line) for line in text.split("\n") if line.lstrip().startswith("{"))
    return [each for each in objects if isinstance(each, dict)]


def parse_json(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_line(row: Mapping[str, Any]) -> str:
    """A row on one line. JSON has no NaN and no infinity: they are text.

    Names are in order, so that a row is the same bytes before and after transformers has written it
    into a checkpoint and read it back.
    """
    # What is no value of JSON, such as an image in a prompt, is text, too.
    line = json.dumps(finite_values(dict(row)), ensure_ascii=False, default=str, sort_keys=True)
    # Half of a surrogate pair has no UTF-8.
    return line.encode(errors="replace").decode()


def begin_rows(sealed: Iterable[Row], earlier: Iterable[Row]) -> list[Row]:
    """The rows that an attempt begins its file with, in the order in which they were made.

    Args:
        sealed: those of the checkpoint that it goes on from.
        earlier: those in the files of the attempts before it, a row maybe in several. What the
            checkpoint does not have of them was rolled back.
    """
    standing = list(sealed)
    sealed_positions = {_position(row) for row in standing}
    rolled_back = {
        _position(row): {**row, ROLLED_BACK: True}
        for row in earlier
        if _position(row) not in sealed_positions
    }
    return sorted([*rolled_back.values(), *standing], key=_position)


def _position(row: Row) -> tuple[int, int]:
    """The attempt and the step of a row; zeros where they are no numbers."""
    attempt, step = row.get(ATTEMPT), row.get(STEP)
    return (
        attempt if isinstance(attempt, int) else 0,
        step if isinstance(step, int) else 0,
    )


def standing_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows of the steps that the run consists of: those that were not rolled back."""
    return [row for row in rows if not row.get(ROLLED_BACK)]


def thin_out(lines: Sequence[str], max_bytes: int) -> list[str]:
    """Lines that have `max_bytes` together at most, with the first and the newest.

    Every second line goes until they fit: old steps get rare, and the whole run stays covered. What
    is left depends on the lines alone, so that a resumed run has the undisturbed one's.
    """
    remaining = list(lines)
    while len(remaining) > 1 and _size(remaining) > max_bytes:
        first, rest = remaining[:1], remaining[1:]
        every_second = rest[::-2][::-1]
        remaining = [*first, *every_second] if len(remaining) > 2 else rest
    return remaining


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def newest_attempt(paths: Iterable[str]) -> str | None:
    """The newest attempt's folder among paths such as `attempt-3/metrics.jsonl`; None for none."""
    numbers = []
    for path in paths:
        folder, _, name = path.partition("/")
        number = folder.removeprefix(ATTEMPT_PREFIX)
        if name == METRICS_FILE and folder.startswith(ATTEMPT_PREFIX) and number.isdecimal():
            numbers.append(int(number))
    return f"{ATTEMPT_PREFIX}{max(numbers)}" if numbers else None


def newest_history(paths: Collection[str]) -> dict[str, str]:
    """The paths of the newest attempt's history files, by their names."""
    newest = newest_attempt(paths)
    return {name: f"{newest}/{name}" for name in HISTORY_FILES if f"{newest}/{name}" in paths}
