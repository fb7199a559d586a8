"""One line of a log: JSON for collectors, and the same line as text for people.

Operator, trainer and engines write the same fields. So a collector finds all lines of a job by its
namespace and name, whatever wrote them. `grpo logs` reads the lines of pods back as text.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from .messages import hide_secrets, printable_text
from .quantity import MAX_COUNT

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "settings",
}
"""Attributes of a log record that are no field of the line: those of every record, and kopf's own
`settings`."""
_CONTEXT = (
    "time",
    "level",
    "namespace",
    "grpojob",
    "attempt",
    "rank",
    "engine",
    "logger",
    "message",
)
"""Fields that text leaves out, or has in a place of their own."""
FieldsOf = Callable[[logging.LogRecord], Mapping[str, Any]]


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, whose line it is, logger, message, and whatever
    `extra` held."""

    def __init__(
        self, fields: Mapping[str, Any] | None = None, fields_of: FieldsOf | None = None
    ) -> None:
        """`fields` are in every line, such as the job; `fields_of` gives those of a record."""
        super().__init__()
        self.fields = dict(fields or {})
        self._fields_of = fields_of

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **self.fields,
            **(self._fields_of(record) if self._fields_of else {}),
            "logger": record.name,
            "message": hide_secrets(record.getMessage()),
        }
        for key, value in vars(record).items():
            if key not in _OF_EVERY_RECORD:
                line[key] = finite_values(value)
        if record.exc_info:
            line["traceback"] = hide_secrets(self.formatException(record.exc_info))
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(JsonFormatter):
    """The same line as text."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return as_text(super().format(record))


def as_text(line: str) -> str:
    """A line of a log as text: time of the day, level, rank, message and further fields.

    What is no line of ours, such as a library's output, stays as it is. Characters that would move
    a terminal's cursor are replaced.
    """
    fields = _fields(line)
    if fields is None:
        return printable_text(line)
    time, level, message = (str(fields[key]) for key in ("time", "level", "message"))
    rank = f" rank {fields['rank']}" if fields.get("rank") else ""
    traceback = fields.pop("traceback", "")
    others = [f"{key}={_short_text(value)}" for key, value in fields.items() if key not in _CONTEXT]
    first_line = " ".join([f"{time[11:19]} {level:<7}{rank} {message}".rstrip(), *others])
    return printable_text(f"{first_line}\n{traceback}" if traceback else first_line)


def _fields(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(fields, dict) and {"time", "level", "message"} <= fields.keys()
    return fields if is_ours else None


def _short_text(value: Any) -> str:
    if isinstance(value, float):
        is_count = value.is_integer() and abs(value) < MAX_COUNT
        return f"{value:.0f}" if is_count else f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def finite_values(value: Any) -> Any:
    """The value with NaN and infinities as text, also in lists and maps: JSON has no such
    numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_values(each) for each in value]
    return value
