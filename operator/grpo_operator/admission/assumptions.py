"""Attempts that were admitted and are not in their jobs' status yet: their GPUs count as taken meanwhile.

Between a verdict and its commit there are a work queue and a write. A pass in that time must count the place as taken,
and the commit is valid only while it does. kube-scheduler's cache uses the same word.
"""

from collections.abc import Iterator
from typing import Protocol

from grpo_api.plan import ExecutionPlan

from ..names import ObjectKey
from ..records import GRPOJobRecord
from .capacity import Claim

DENIED_PAUSE = 15.0
"""Seconds for which a job whose commit the API server denied takes no place."""


class JobSource(Protocol):
    """Gives all GRPOJobs as they are known now."""

    def __iter__(self) -> Iterator[GRPOJobRecord]:
        """Each of them."""
        ...

    def get(self, key: ObjectKey) -> GRPOJobRecord | None:
        """Return the GRPOJob of this namespace and name."""
        ...

    @property
    def look_again(self) -> float | None:
        """Seconds until time alone takes a job out of these; None while it doesn't."""
        ...


class Assumptions:
    """The assumed attempts, and the jobs whose commit was denied."""

    def __init__(self, jobs: JobSource) -> None:
        """Start without assumptions; `jobs` shows which of them have been committed since."""
        self._jobs = jobs
        self._claims: dict[str, Claim] = {}
        self._resting: dict[str, float] = {}

    def claims(self) -> dict[str, Claim]:
        """Return the claims of assumed attempts by uid, without those that are committed or no longer wanted."""
        self._claims = {uid: claim for uid, claim in self._claims.items() if self._open(claim)}
        return dict(self._claims)

    def add(self, job: GRPOJobRecord, plan: ExecutionPlan) -> None:
        """Assumes the job's next attempt, unless the job has changed since it was judged."""
        claim = Claim(job=job, plan=plan, attempt=job.status.attempt + 1)
        if self._open(claim):
            self._claims[job.uid] = claim

    def holds(self, uid: str) -> bool:
        """True if the job is assumed, so that its attempt may be committed."""
        claim = self._claims.get(uid)
        return claim is not None and self._open(claim)

    def _open(self, claim: Claim) -> bool:
        """True if the attempt is still to be committed."""
        job = self._jobs.get(claim.job.key)
        # A changed spec has another plan, and a job made again under the name is another one: both are judged again.
        if job is None or (job.uid, job.generation) != (claim.job.uid, claim.job.generation):
            return False
        may_commit = job.wants_admission or job.active
        return may_commit and job.status.attempt + 1 == claim.attempt

    def deny(self, uid: str, now: float) -> bool:
        """Drop the assumption of a job whose commit the API server denied; return False if it had none."""
        if self._claims.pop(uid, None) is None:
            return False
        # Else the next pass would admit it again at once, and its denial would keep the place from all behind it.
        self._resting[uid] = now + DENIED_PAUSE
        return True

    def resting(self, now: float) -> dict[str, float]:
        """Return, by uid, the seconds for which a job takes no place because its commit was denied."""
        self._resting = {uid: until for uid, until in self._resting.items() if until > now}
        return {uid: until - now for uid, until in self._resting.items()}
