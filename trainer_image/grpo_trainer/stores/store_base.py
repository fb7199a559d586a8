"""What users of a store share with its client, importable without the client's library."""

from typing import Protocol

from grpo_api.text.units import MIB

PART_BYTES = 16 * MIB
"""Bytes of one request of a large object: a request that fails costs no more than these."""
REGION = "us-east-1"
"""What a store that has no regions takes, too."""


class OnAnswer(Protocol):
    """Called when data has been sent or received, and during pauses: a sign of work."""

    def __call__(self, problem: str = "") -> None:
        """`problem`: why the store is asked again; empty once it has answered."""


def ignore_answer(problem: str = "") -> None:
    """An OnAnswer that does nothing."""
