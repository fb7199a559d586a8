"""A job that Kueue sends to another cluster: this operator asks Kueue for it, and the other one's runs it.

Its status is copied from there, all of it, so nothing is read from it or written to it; what there is to say is in the
log. The plan goes along with the Workload.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from .admission.queue import AdmissionQueue
from .cluster.workloads import Workloads
from .content import unstarted
from .decisions import Action, Decision
from .observe import Observation
from .reasons import Reason
from .records import GRPOJobRecord
from .times import Observed

log = logging.getLogger(__name__)


class Dispatcher:
    """Keeps the Workloads of jobs that Kueue sends to another cluster."""

    def __init__(
        self,
        queue: AdmissionQueue,
        workloads: Workloads,
        clock: Callable[[], float],
        monotonic: Callable[[], Observed],
    ) -> None:
        """`clock` gives unix seconds."""
        self._queue = queue
        self._workloads = workloads
        self._clock = clock
        self._monotonic = monotonic

    async def __call__(self, job: GRPOJobRecord) -> float | None:
        """One look and one step. Returns the seconds until time alone may change something.

        Raises:
            ClusterError: the API server refused or did not answer; nothing is lost by trying again.
        """
        if job.finished or job.deleting or not job.queue_name:
            return None
        here = replace(job, typed=unstarted(job.spec))
        seen = self._workloads.look(Observation(job=here, now=self._clock(), at=self._monotonic()))
        decision = await self._workloads.step(seen, await self._decision(seen))
        if decision.action in (Action.QUEUE, Action.REJECT):
            log.info("%s: %s %s", job.key, decision.reason, decision.message)
        return decision.look_again

    async def _decision(self, seen: Observation) -> Decision:
        if seen.job.suspended:
            return Decision(Action.SUSPEND, Reason.SUSPENDED)
        return await self._queue.answer(seen, Decision(Action.ADMIT)) or Decision(Action.WAIT)
