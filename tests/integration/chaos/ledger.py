"""What chaos did to each job, written down before it is done: the truth that statuses are held
against.

Pure. A deed may not have come to pass (the API server was just gone), so `sure` tells those that
have.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum

from grpo_api.report.report import Result
from grpo_api.report.root_cause import DIVERGED


class Deed(StrEnum):
    """What may bring an attempt to its end."""

    ENDED = "Ended"
    """A pod's container ended; `result` says how."""
    DISRUPTED = "Disrupted"
    """A pod was deleted, evicted or refused by its node, or its node was lost."""
    JOB_DELETED = "JobDeleted"
    SUSPENDED = "Suspended"
    SPOILED = "Spoiled"
    """Its status was made unreadable, so nothing is done for it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One deed to one attempt of the job with this uid."""

    job: str
    attempt: int
    deed: Deed
    _: KW_ONLY
    at: float
    """Unix time."""
    rank: int = 0
    result: Result | None = None
    """What the trainer's word or the container's state says; None for an end that says nothing that
    can be read."""
    sure: bool = False

    @property
    def counts(self) -> bool:
        """Whether it is an end that counts against spec.restarts.limit; rollbacks don't."""
        return self.deed is Deed.ENDED and self.result not in (
            Result.SUCCEEDED,
            Result.PREEMPTED,
            *DIVERGED,
        )


class Ledger:
    """All deeds, in their order."""

    def __init__(self) -> None:
        """Empty."""
        self._entries: list[Entry] = []

    def intend(self, entry: Entry) -> int:
        """Writes a deed down before it is done; the number is for `done`."""
        self._entries.append(entry)
        return len(self._entries) - 1

    def done(self, number: int) -> None:
        """It has come to pass."""
        self._entries[number] = replace(self._entries[number], sure=True)

    def of(self, job: str, attempt: int | None = None) -> Iterator[Entry]:
        """The deeds to a job, or to one of its attempts."""
        for entry in self._entries:
            if entry.job == job and attempt in (None, entry.attempt):
                yield entry
