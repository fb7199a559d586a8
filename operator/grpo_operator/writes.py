"""What is remembered of the status writes of each job: when the last one was, and what the API server did not keep.

It is memory, not truth: without it a status is written once more.
"""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from .names import ObjectKey
from .times import Observed

log = logging.getLogger(__name__)


class StatusWrites:
    """The last status write of each job."""

    def __init__(self, longest: float) -> None:
        """`longest`: the seconds after which it doesn't matter any more when a status was written."""
        self._longest = longest
        self._written: dict[ObjectKey, Observed] = {}
        self._dropped: dict[ObjectKey, Mapping[str, Any]] = {}

    def forget(self, key: ObjectKey) -> None:
        """Drop what is remembered of a job that is gone."""
        self._written.pop(key, None)
        self._dropped.pop(key, None)

    def is_known(self, key: ObjectKey, patch: Mapping[str, Any]) -> bool:
        """True if the patch has nothing but what the API server did not keep when it was written last."""
        return patch == self._dropped.get(key, {})

    def wait(self, key: ObjectKey, now: Observed, pause: float) -> float:
        """Seconds until such a pause after the last write is over; 0 and less when it is."""
        last = self._written.get(key)
        return pause - (now - last) if last else 0.0

    def written(self, key: ObjectKey, now: Observed, dropped: Mapping[str, Any]) -> None:
        """A status was written, of which the API server did not keep this: an older definition drops new fields.

        Written again and again, those would make a loop of writes.
        """
        self._written.pop(key, None)
        self._written[key] = now
        for oldest, at in list(itertools.islice(self._written.items(), 2)):
            if now - at > self._longest:
                del self._written[oldest]
        if dropped and dropped != self._dropped.get(key):
            log.warning("%s: the API server did not keep %s of the status", key, ", ".join(dropped))
        if dropped:
            self._dropped[key] = dropped
        else:
            self._dropped.pop(key, None)
