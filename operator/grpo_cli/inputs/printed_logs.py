"""Reads logged steps as programs print and number them, so that `grpo diagnose` takes a run's own
terminal output.

transformers prints each step's logs as a Python dict beside its progress bar. Such a dict has no
step, and ms-swift logs its step as a part of all: `"global_step/max_steps": "15/1000"`.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from grpo_api.findings.step_row import (
    REWARD,
    STEP_KEYS,
    TRAINER_STEP_KEYS,
    as_number,
    step_row,
    without_prefix,
)
from grpo_api.report.history import STEP, Row

_DICT = re.compile(r"\{['\"].*\}")
_NOT_FINITE = re.compile(r"(?<=: )-?(?:nan|inf)(?=[,}])")
_PARTS = "global_step/max_steps"


def printed_rows(text: str) -> Iterator[Row]:
    """Yield the dicts in lines of a terminal, whatever text is around them."""
    for line in text.splitlines():  # a progress bar ends its lines by "\r"
        match = _DICT.search(line)
        if match is None:
            continue
        # Python prints NaN and infinity as names, which no literal has.
        literal = _NOT_FINITE.sub(lambda name: repr(name[0]), match[0])
        try:
            row = ast.literal_eval(literal)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def number_steps(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows with their steps; where none has one, each reward that was logged is one more."""
    rows = [_with_whole_step(row) for row in rows]
    known_steps = [_trainer_step(row) for row in rows]
    if any(step is not None for step in known_steps):
        return _fill_steps(rows, known_steps)
    if any(without_prefix(key) in STEP_KEYS for row in rows for key in map(str, row)):
        return rows
    step, steps = 0, []
    for row in rows:
        # Of an evaluation and of the run's end no reward is logged under TRL's key of a step.
        parsed = step_row({STEP: 1, **row})
        if parsed is not None and REWARD in parsed.values:
            step += 1
        steps.append({STEP: max(1, step), **row})
    return steps


def _trainer_step(row: Row) -> float | None:
    """The row's step as the trainer counts it; None where it has none."""
    for key, value in row.items():
        if without_prefix(str(key)).lower() in TRAINER_STEP_KEYS:
            step = as_number(value)
            if step is not None and math.isfinite(step):
                return step
    return None


def _fill_steps(rows: Sequence[Row], steps: Sequence[float | None]) -> Sequence[Row]:
    """The rows with the trainer's steps. W&B also has rows without one, of durations that TRL logs
    before their step, and counts all rows as `_step`."""
    step = [step for step in steps if step is not None][-1]
    filled = []
    for row, own_step in zip(reversed(rows), reversed(steps), strict=True):
        step = step if own_step is None else own_step
        filled.append({**row, STEP: step})
    return filled[::-1]


def _with_whole_step(row: Mapping[str, object]) -> Row:
    step, _, _ = str(row.get(_PARTS, "")).partition("/")
    return {STEP: int(step), **row} if step.isdecimal() else dict(row)
