"""Logging as a cluster wants it: one JSON object per line on stderr, or plain text for people.

kopf configures logging only when it is run by its own command.
"""

import json
import logging
from typing import Any

_LEFT_OUT = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "settings"}
"""Attributes of a log record that are no field of the line: those of every record, and kopf's own `settings`."""


class JsonFormatter(logging.Formatter):
    """One line: time, level, logger, message, and whatever `extra` held."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        fields: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {key: value for key, value in vars(record).items() if key not in _LEFT_OUT}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def configure(log_format: str, level: str) -> None:
    """Sets up the root logger; kopf only speaks up when something is wrong."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)
        logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
