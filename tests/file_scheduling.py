"""A pytest plugin that gives a process whole files, and some files to one process.

What these share costs many core-seconds to start, and each process would start it for itself.
"""

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

TOGETHER = (
    {"test_kueue", "test_kueue_dirt"},
    {"test_engine_faults", "test_engine_servers", "test_engine_start"},
)
"""Test files that share a cluster with Kueue's kinds, or a server that has imported vLLM."""


def scope_of(file: str) -> str:
    """The name of what goes to one process as a whole: the file, or those that it belongs to."""
    return next((min(files) for files in TOGETHER if Path(file).stem in files), file)


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """`--dist loadfile` with the scopes above."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Take the place of `--dist loadfile`."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None
