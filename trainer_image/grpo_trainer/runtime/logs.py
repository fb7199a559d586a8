"""Sets up the log of a process of a training or engine pod: JSON lines, or text on a terminal.

Each line says whose it is, so that a collector finds a job's lines without the pod's name. Lines of
libraries, warnings among them, come the same way. What C++ code and users' code prints stays as it
is.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import JobIdentity
from grpo_api.text.log_lines import JsonFormatter, TextFormatter

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
"""Variables that turn progress bars off: in a file they are a line of noise per change."""

LIBRARIES = r"(accelerate|datasets|deepspeed|peft|torch|transformers|trl|vllm)(\.|$)"
"""Modules that the trainer calls, and no code of users."""


def configure_logs(job: JobIdentity | None = None, **fields: int) -> None:
    """Write this process's log to stdout. `fields`, such as the rank, are in every line."""
    of_job: dict[str, Any] = {}
    if job is not None:
        of_job = {"namespace": job.namespace, "grpojob": job.name, "attempt": job.attempt}
    is_terminal = sys.stdout.isatty()
    formatter = TextFormatter if is_terminal else JsonFormatter
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter({**of_job, **fields}))
    # A library's INFO lines, such as one for each request to the hub, would bury ours.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(__package__.partition(".")[0]).setLevel(logging.INFO)
    warnings.formatwarning = _warning_message
    # What libraries announce to one another: no user can act on it, and it would hide what they can
    # act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module=LIBRARIES)
    logging.captureWarnings(True)
    if not is_terminal:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)


def _warning_message(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,  # noqa: ARG001
) -> str:
    """A warning as one line that begins with what it says; Python's own begins with a path and ends
    with a line of the library's source."""
    place = filename.rpartition("site-packages/")[2]
    return f"{category.__name__}: {' '.join(str(message).split())} ({place}:{lineno})"


def adopt_library_logs() -> None:
    """Pass on what imported libraries log to the process's own handler: transformers, DeepSpeed and
    torch each have handlers of their own, which write text."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def vllm_logging(folder: Path) -> dict[str, str]:
    """Variables with which vLLM's processes, too, log as this one does; writes a file that they
    read into the folder."""
    formatters = [handler.formatter for handler in logging.root.handlers]
    ours = [formatter for formatter in formatters if isinstance(formatter, JsonFormatter)]
    if not ours:
        return {}
    formatter = ours[0]
    made_by = f"{type(formatter).__module__}.{type(formatter).__qualname__}"
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": made_by, "fields": formatter.fields}},
        "handlers": {
            "stdout": {
                "class": "logging.StreamHandler",
                "stream": "ext://sys.stdout",
                "formatter": "lines",
            }
        },
        "loggers": {"vllm": {"handlers": ["stdout"], "level": "INFO", "propagate": False}},
    }
    path = folder / f"vllm-logging-{os.getpid()}.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return {"VLLM_LOGGING_CONFIG_PATH": str(path)}
