"""Reads the history that a run has left, and what of it a repeated run must have alike."""

from pathlib import Path

from grpo_api.report.history import (
    ATTEMPT,
    FINDINGS,
    METRICS_FILE,
    ROLLED_BACK,
    SAMPLES_FILE,
    Row,
    newest_attempt,
    parse_lines,
)

CLOCKS = ("time", "tokens_per_second", "straggler_ratio")
"""Numbers that no two runs have alike, beside those with `time` or `seconds` in their name."""
OF_TIMES = ("CheckpointSlow", "Straggler", "WaitingForRewards")
"""Findings that depend on them."""


def of_folder(folder: Path) -> tuple[list[Row], list[Row]]:
    """Rows and samples of an attempt or an export."""
    metrics, samples = (
        parse_lines((folder / name).read_text(encoding="utf-8"))
        for name in (METRICS_FILE, SAMPLES_FILE)
    )
    return metrics, samples


def of_run(folder: Path) -> tuple[list[Row], list[Row]]:
    """Rows and samples of a run's newest attempt."""
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob(METRICS_FILE)]
    newest = newest_attempt(paths)
    assert newest, f"{folder} has no history"
    return of_folder(folder / newest)


def without_clocks(row: Row) -> Row:
    """A row without times and what follows from them, and without who made it."""
    values = {
        key: value
        for key, value in row.items()
        if key not in (*CLOCKS, ATTEMPT, ROLLED_BACK)
        and not any(word in key for word in ("seconds", "_time"))
    }
    if FINDINGS in values:
        values[FINDINGS] = [name for name in values[FINDINGS] if name not in OF_TIMES]
    return values
