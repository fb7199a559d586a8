"""Findings: what a check says, as the report shows it and as it travels between processes.

Plain dataclasses and JSON: they are read and written where nothing is installed but Python.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path


class State(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report."""

    what: str
    """What was looked at."""
    state: State
    """How it ended."""
    message: str
    """What was seen; why it failed, or why it was not run."""
    numbers: dict[str, float | str] = field(default_factory=dict)
    """What was measured, by name; bytes and seconds unless the name says otherwise."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a check knows of its surroundings; travels as JSON to its process."""

    device: str
    """cuda or cpu."""
    folder: str
    """Where models and results of this acceptance run are; shared by all checks, gone afterwards."""
    rank: int = 0
    """This process among those of the check."""
    world: int = 1
    """Processes of the check, one per device."""
    port: int = 29500
    """Where they meet, on loopback."""

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def gpu(self) -> bool:
        """Whether this is about GPUs."""
        return self.device == "cuda"


def judged(what: str, problems: Sequence[str], seen: str, numbers: dict[str, float | str] | None = None) -> Finding:
    """Passed without problems, failed with them."""
    state = State.FAILED if problems else State.PASSED
    return Finding(what, state, "; ".join([*problems, seen]), numbers or {})


def not_run(what: str, why: str) -> Finding:
    """A finding of something that was not looked at."""
    return Finding(what, State.NOT_RUN, why)


def dumped(findings: Sequence[Finding]) -> str:
    """The findings as JSON."""
    return json.dumps([asdict(finding) for finding in findings])


def loaded(text: str) -> list[Finding]:
    """Findings from that JSON."""
    return [Finding(**(item | {"state": State(item["state"])})) for item in json.loads(text)]
