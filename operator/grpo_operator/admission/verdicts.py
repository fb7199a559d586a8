"""Publishes verdicts to jobs, and keeps the attempts that are admitted but not yet in their jobs'
status.

A new status or reason is published at once. When one job starts, the place of every job behind it
changes. A write per job and change would cost the API server more than the jobs themselves, and
users can't read two hundred sentences a second. So a verdict that differs only in its sentence
waits for its turn.

Between a verdict and its commit there are a work queue and a write. During that time the GPUs of an
admitted attempt must count as taken, and the commit is valid only while they do. Such an attempt is
assumed, in the word that kube-scheduler's cache uses, too.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed

from ..records.records import GRPOJobRecord
from .capacity import Claim
from .scheduler import Verdict

NEWS_PAUSE = 0.5
"""Seconds between two jobs whose sentence is updated."""


class Notify(Protocol):
    """Wakes the jobs whose verdict has changed."""

    def __call__(self, keys: Iterable[ObjectKey], *, slow: bool = False) -> None:
        """Queue these jobs for a reconcile; `slow` puts them behind jobs that wait for a step."""


class VerdictPublisher:
    """The newest verdict of each waiting job."""

    def __init__(self, notify: Notify) -> None:
        """Start without verdicts; the callback queues jobs for a reconcile."""
        self._notify = notify
        self._verdicts: Mapping[str, Verdict] = {}
        self._published: dict[str, Verdict] = {}
        self._pending: dict[str, ObjectKey] = {}
        self._has_pending = asyncio.Event()

    def verdict_for(self, uid: str) -> Verdict | None:
        """Return the verdict that the job's status shows, or is about to show; None without one."""
        return self._published.get(uid)

    def publish(
        self,
        verdicts: Mapping[str, Verdict],
        keys: Mapping[str, ObjectKey],
        others: Collection[str],
    ) -> None:
        """Store the verdicts of a cycle and queue jobs with news.

        The uids in `others` keep their last verdict; all remaining ones lose theirs.
        """
        self._verdicts = verdicts
        uids_in_queue = verdicts.keys() | others
        self._published = {
            uid: verdict for uid, verdict in self._published.items() if uid in uids_in_queue
        }
        self._pending = {uid: key for uid, key in self._pending.items() if uid in verdicts}
        urgent = []
        for uid, verdict in verdicts.items():
            before = self._published.get(uid)
            is_news = before is None or before.published_part != verdict.published_part
            # a job that is admitted now was not admitted when it read its last verdict
            if is_news or verdict.admitted:
                self._published[uid] = verdict
                self._pending.pop(uid, None)
                urgent.append(keys[uid])
            elif before != verdict:
                # Only the place in the queue has changed: it waits for its turn, and keeps the turn
                # that it has.
                self._pending.setdefault(uid, keys[uid])
        if self._pending:
            self._has_pending.set()
        self._notify(urgent)

    async def run(self) -> None:
        """Wake jobs whose message has changed, one after the other, until cancelled."""
        while True:
            await self._has_pending.wait()
            self.publish_one_message()
            await asyncio.sleep(NEWS_PAUSE)

    def publish_one_message(self) -> None:
        """Wake the job that has waited longest for its new message."""
        # the dictionary keeps the order in which jobs came, so the first has waited longest
        if self._pending:
            uid = next(iter(self._pending))
            key = self._pending.pop(uid)
            self._published[uid] = self._verdicts[uid]
            self._notify([key], slow=True)
        if not self._pending:
            self._has_pending.clear()


DENIED_PAUSE = 15.0
"""Seconds for which a job whose commit the API server denied takes no place."""


class JobSource(Protocol):
    """Gives all GRPOJobs as they are known now."""

    def __iter__(self) -> Iterator[GRPOJobRecord]:
        """Each of them."""

    def get(self, key: ObjectKey) -> GRPOJobRecord | None:
        """Return the GRPOJob of this namespace and name."""

    @property
    def requeue_after(self) -> float | None:
        """Seconds until time alone takes a job out of these; None while it doesn't."""


class Assumptions:
    """The assumed attempts, and the jobs whose commit was denied."""

    def __init__(self, jobs: JobSource) -> None:
        """Start without assumptions; `jobs` shows which of them have been committed since."""
        self._jobs = jobs
        self._claims: dict[str, Claim] = {}
        self._denied_until: dict[str, Observed] = {}

    def claims(self) -> dict[str, Claim]:
        """The claims of assumed attempts by uid, without committed and unwanted ones."""
        self._claims = {uid: claim for uid, claim in self._claims.items() if self._is_open(claim)}
        return dict(self._claims)

    def add(self, job: GRPOJobRecord, plan: ExecutionPlan) -> None:
        """Assumes the job's next attempt, unless the job has changed since it was judged."""
        next_attempt = job.status.attempt + 1
        claim = Claim(job=job, plan=plan, attempt=next_attempt)
        if self._is_open(claim):
            self._claims[job.uid] = claim

    def is_assumed(self, uid: str) -> bool:
        """True if the job is assumed, so that its attempt may be committed."""
        claim = self._claims.get(uid)
        return claim is not None and self._is_open(claim)

    def _is_open(self, claim: Claim) -> bool:
        """True if the attempt is still to be committed."""
        job = self._jobs.get(claim.job.key)
        # A changed spec has another plan, and a job made again under the name is another one: both
        # are judged again.
        if job is None or job.uid != claim.job.uid:
            return False
        if job.generation != claim.job.generation:
            return False
        may_commit = job.is_waiting_for_admission or job.is_active
        next_attempt = job.status.attempt + 1
        return may_commit and next_attempt == claim.attempt

    def drop_denied(self, uid: str, at: Observed) -> bool:
        """Drop the assumption of a job whose commit was denied; False if it had none."""
        if self._claims.pop(uid, None) is None:
            return False
        # Else the next cycle would admit it again at once, and its denial would keep the place from
        # all behind it.
        self._denied_until[uid] = Observed(at.at + DENIED_PAUSE)
        return True

    def denial_pauses(self, at: Observed) -> dict[str, float]:
        """By uid, the seconds for which a job takes no place because its commit was denied."""
        self._denied_until = {uid: until for uid, until in self._denied_until.items() if until > at}
        return {uid: until - at for uid, until in self._denied_until.items()}
