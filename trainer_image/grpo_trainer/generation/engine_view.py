"""An engine pod as rank 0 knows it: which process it is, which weights it was proven to have, what it was lost to.

The rules alone. An engine is used only under a version that this process of it was proven to have: one that was out of
reach, restarted, or answered wrongly has to be brought the weights again first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_STRIKES = 2
"""Failed syncs after which a process is given up."""


@dataclass(slots=True)
class EngineView:
    """Rank 0's view of one engine pod, over all processes that the pod starts."""

    index: int
    """Of its pod, from 0."""
    host: str
    """DNS name or address."""
    incarnation: str | None = None
    """The process that last answered; None while it doesn't answer."""
    version: int | None = None
    """What that process was proven to have."""
    given_up: str | None = None
    """The process that gets no further chance."""
    losses: int = 0
    """Times that it was given up or lost while it had weights."""
    strikes: int = 0
    """Syncs in a row that this process failed."""
    last: str = "has not answered yet"
    """What is known of it, for messages."""

    @property
    def name(self) -> str:
        """Name of the engine for messages."""
        return f"engine {self.index} at {self.host}"

    @property
    def usable(self) -> bool:
        """Whether the engine may be sent weights."""
        return self.incarnation is not None and self.incarnation != self.given_up

    @property
    def condemned(self) -> bool:
        """Whether the process that answers has been given up, and should make room for another."""
        return self.incarnation is not None and self.incarnation == self.given_up

    def serves(self, version: int | None) -> bool:
        """Whether the engine may sample completions of this version."""
        return self.usable and version is not None and self.version == version

    def seen(self, incarnation: str) -> None:
        """Note that the engine answered as this process."""
        if incarnation != self.incarnation:
            # The new process has random weights until a sync.
            self._lose("has restarted")
            self.incarnation, self.strikes = incarnation, 0
        if self.version is None and self.usable:
            self.last = "is up and waits for weights"

    def gone(self, reason: str) -> None:
        """Note that the engine does not answer, or answers wrongly."""
        self._lose(reason)
        self.incarnation = None

    def stale(self, reason: str) -> None:
        """Note that the engine lives but lost its proven weights; it may be sent weights again."""
        self._lose(reason)

    def proven(self, version: int) -> None:
        """Note that the engine was proven to have this version."""
        self.version, self.strikes = version, 0
        self.last = f"serves version {version}"

    def failed(self, reason: str) -> None:
        """Note a failed sync or proof. After MAX_STRIKES in a row the process is given up."""
        # The first failure may be one of the transfer, so the weights are sent once more.
        self.strikes += 1
        if self.strikes >= MAX_STRIKES:
            self.give_up(reason)
        else:
            self._lose(reason)

    def give_up(self, reason: str) -> None:
        """Give up the present process. The next process of the pod is used again."""
        had = self.version is not None
        self._lose(reason)
        # `_lose` has counted a process that had weights.
        self.losses += 0 if had else 1
        self.given_up = self.incarnation

    def _lose(self, reason: str) -> None:
        if self.version is not None:
            self.losses += 1
        self.version = None
        self.last = reason


def told(engines: Iterable[EngineView]) -> str:
    """The names and states of all engines, for messages."""
    return "; ".join(f"{engine.name} {engine.last}" for engine in engines)
