"""kopf with everything off that costs a request, a wait or CPU time and that a level-triggered loop does not need.

By default kopf copies and compares every object on every event, to find out what changed since its handlers last
succeeded: half of this operator's CPU time in a burst.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import kopf


class _ForEver(Iterable[float]):
    """Pauses between the tries of a request, in seconds: however long the API server is away or says "forbidden"."""

    def __iter__(self) -> Iterator[float]:
        """Growing at first, then all alike, without an end."""
        return itertools.chain((0.5, 1.0, 2.0, 5.0), itertools.repeat(10.0))


class _NoDifference(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Remembers nothing about objects: an event is only a reason to look."""

    def build(self, **_: Any) -> Any:
        """No essence to compare."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:
        """Keeps nothing."""


class _NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """Remembers nothing about handlers: theirs can't fail, and what they start is retried by our own queue."""

    def fetch(self, **_: Any) -> Any:
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:
        """Keeps nothing."""

    def purge(self, **_: Any) -> None:
        """Has nothing to remove."""

    def touch(self, **_: Any) -> None:
        """Never waits for a handler."""

    def clear(self, *, essence: Any) -> Any:
        """Leaves no traces that would have to be removed."""
        return essence


def settings() -> kopf.OperatorSettings:
    """kopf with everything off that costs a request or a wait."""
    chosen = kopf.OperatorSettings()
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.queueing.worker_limit = None
    chosen.queueing.idle_timeout = 1.0
    chosen.networking.request_timeout = 30.0
    chosen.networking.connect_timeout = 10.0
    chosen.networking.error_backoffs = _ForEver()
    chosen.watching.server_timeout = 300  # the API server takes whole seconds only
    chosen.watching.client_timeout = 310
    # kopf would kill the whole process so long after its own end, also when it only begins anew; kubelets do that
    chosen.process.ultimate_exiting_timeout = None
    chosen.persistence.diffbase_storage = _NoDifference()
    chosen.persistence.progress_storage = _NoProgress()
    return chosen
