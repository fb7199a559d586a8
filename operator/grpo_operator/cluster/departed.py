"""Pods that are gone, as they were last seen: how long each held its GPUs, which nobody can ask for any more.

A pod that is deleted may be gone within milliseconds of the word of its container's end: before a look at its job, or
before what that look found is in the status. This is memory, and only makes the account exact: without it a pod is
timed by the end of its Job.
"""

from collections import deque

from ..names import ObjectKey
from ..records import PodRecord

REMEMBERED = 1024
"""How many pods are remembered: those of the two largest gangs."""


class Departed:
    """The last of the pods that ended and then were deleted, by the GRPOJob that they belonged to."""

    def __init__(self) -> None:
        """Start without pods."""
        self._order: deque[PodRecord] = deque()
        self._of: dict[ObjectKey, dict[str, PodRecord]] = {}

    def keep(self, pod: PodRecord) -> None:
        """Remember a deleted pod, if its end was reported."""
        # Without its end a pod can't be timed any better than by the end of its Job.
        if pod.end is None:
            return
        self._order.append(pod)
        self._of.setdefault(pod.job_key, {})[pod.uid] = pod
        if len(self._order) > REMEMBERED:
            self._forget(self._order.popleft())

    def of(self, job_key: ObjectKey, job_uid: str) -> tuple[PodRecord, ...]:
        """Return the departed pods of a GRPOJob."""
        return tuple(pod for pod in self._of.get(job_key, {}).values() if pod.grpojob_uid == job_uid)

    def _forget(self, pod: PodRecord) -> None:
        siblings = self._of[pod.job_key]
        siblings.pop(pod.uid, None)
        if not siblings:
            del self._of[pod.job_key]
