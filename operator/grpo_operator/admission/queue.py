"""Who may start: the answer to a job that asks for an attempt.

A gang starts only when all of it fits, in order of priority, then age. A smaller job may go first only on GPUs that
those ahead don't wait for: what they wait for is reserved for them. The commit of an attempt and its plan to the status
is the reservation that lasts; nothing is remembered here but the last pass, for as long as its snapshot is fresh.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from grpo_api.plan import ExecutionPlan
from grpo_planner import Inventory, PlanResult, plan_job

from ..decisions import Action, Decision, Limits
from ..names import ObjectKey
from ..observe import Observation
from ..reasons import Reason
from ..records import GRPOJobRecord
from ..restarting import pausing
from .capacity import Capacity, fits
from .checks import plan_problem, spec_problem
from .snapshot import Snapshot, SnapshotSource

log = logging.getLogger(__name__)

DEPTH = 32
"""Jobs of the queue that a pass looks at; those behind wait for one of these to start."""
LOOK_AGAIN, LOOK_AGAIN_FOR_NODES = 5.0, 30.0
"""Seconds until a waiting job is looked at again: for GPUs to be freed, and for the cluster to grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a pass found for one job, on the spec of that generation."""

    generation: int
    plan: ExecutionPlan | None = None
    admitted: bool = False
    reason: str = Reason.ADMITTED
    message: str = ""


Pass = dict[str, Verdict]
"""Verdicts by uid."""


class AdmissionQueue:
    """Answers ADMIT decisions."""

    def __init__(
        self,
        jobs: Callable[[], Iterable[GRPOJobRecord]],
        snapshots: SnapshotSource,
        *,
        limits: Limits,
        clock: Callable[[], float],
        default_image: str = "",
    ) -> None:
        """`jobs` gives all GRPOJobs; `default_image` is for those without spec.image; `clock` gives unix seconds."""
        self._jobs = jobs
        self._snapshots = snapshots
        self._limits = limits
        self._default_image = default_image
        self._clock = clock
        self._pass: tuple[Snapshot, Pass] | None = None

    def freed(self) -> list[ObjectKey]:
        """A gang has ended: the jobs in the queue, which should look at the cluster anew."""
        self._snapshots.expire()
        return [job.key for job in self._jobs() if job.wants_admission]

    async def answer(self, seen: Observation, asked: Decision) -> Decision:
        """COMMIT with a plan, QUEUE with what the gang waits for, or REJECT."""
        spec = seen.job.spec
        if spec is None:
            return asked
        if problem := spec_problem(spec, self._default_image):
            return Decision(Action.REJECT, *problem)
        verdict = await (self._in_queue(seen) if seen.job.competes else self._alone(seen))
        if verdict.plan and (found := plan_problem(seen.job, verdict.plan)):
            return Decision(Action.REJECT, *found)
        if verdict.admitted:
            return replace(asked, action=Action.COMMIT, plan=verdict.plan)
        pause = LOOK_AGAIN if verdict.plan else LOOK_AGAIN_FOR_NODES
        return replace(
            asked,
            action=Action.QUEUE,
            reason=verdict.reason,
            message=verdict.message,
            plan=verdict.plan,
            look_again=pause,
        )

    async def _alone(self, seen: Observation) -> Verdict:
        """A job that nobody else's GPUs stand in the way of: on CPUs, or admitted by Kueue, on an empty cluster."""
        job = seen.job
        if plan := kept_plan(job):
            return Verdict(generation=job.generation, plan=plan, admitted=True)
        if not job.queue_name:
            return _verdict(job, _planned(job, Inventory()), admitted=True)
        emptied = Capacity(await self._snapshots.take(), ()).inventory(job).emptied
        # planning for many nodes may take a while; watches and probes must not wait for it
        return _verdict(job, await asyncio.to_thread(_planned, job, emptied), admitted=True)

    async def _in_queue(self, seen: Observation) -> Verdict:
        """The job's place in the queue, from a pass over everybody ahead of it; a restart doesn't queue."""
        snapshot = await self._snapshots.take()
        if seen.job.active:
            return restart(seen.job, list(self._jobs()), snapshot)
        # jobs ask one after the other; while nothing was freed or committed, one pass answers them all
        known = self._pass[1].get(seen.job.uid) if self._pass and self._pass[0] is snapshot else None
        if known and known.generation == seen.job.generation:
            return known
        jobs = list(self._jobs())
        # planning a whole queue may take seconds; watches and probes must not wait for it
        found = await asyncio.to_thread(judge, jobs, snapshot, self._clock(), self._limits)
        self._pass = (snapshot, found)
        return found.get(seen.job.uid) or _behind(seen.job, len(found))


def restart(job: GRPOJobRecord, jobs: list[GRPOJobRecord], snapshot: Snapshot) -> Verdict:
    """A gang that ended takes its own place again, with its own plan, ahead of all who wait."""
    capacity, plan = Capacity(snapshot, [other for other in jobs if other.uid != job.uid]), job.status.plan
    if plan is None:
        raise ValueError(f"{job.key} is active without a plan")
    if fits(capacity.inventory(job), plan):
        return Verdict(generation=job.generation, plan=plan, admitted=True, message=plan.reason)
    return _wait(job, plan, capacity, "")


def judge(jobs: list[GRPOJobRecord], snapshot: Snapshot, now: float, limits: Limits) -> Pass:
    """Plays the queue through: each job in turn is planned on what those ahead leave, and takes its place."""
    waiting = [job for job in jobs if job.wants_admission and not pausing(job, now, limits)]
    # what is left after those ahead decides; what would be left without them tells each job whom it waits for
    capacity, alone = Capacity(snapshot, jobs), Capacity(snapshot, jobs)
    found: Pass = {}
    ahead = ""
    for job in sorted(waiting, key=lambda job: place(job, snapshot))[:DEPTH]:
        verdict = _survived(job, capacity, alone, ahead)
        found[job.uid] = verdict
        if verdict.plan:
            # also where it does not fit yet: nobody behind may take what a bigger gang ahead is waiting for
            capacity.reserve(job, verdict.plan)
            ahead = ahead or str(job.key)
    return found


def place(job: GRPOJobRecord, snapshot: Snapshot) -> tuple[int, float, str]:
    """Sorts the queue: highest priority first, then oldest."""
    name = (job.spec.placement.priority_class_name if job.spec else None) or ""
    return -snapshot.priorities.get(name, 0), job.created, job.uid


def _survived(job: GRPOJobRecord, capacity: Capacity, alone: Capacity, ahead: str) -> Verdict:
    """The verdict on one job. A spec that the planner stumbles over must not keep everybody behind it waiting."""
    try:
        return _judge_one(job, capacity, alone, ahead)
    except Exception as error:
        log.exception("%s: the planner failed", job.key)
        message = f"the planner failed, please report it: {error!r}"
        return Verdict(generation=job.generation, reason=Reason.PLANNER_FAILED, message=message)


def _judge_one(job: GRPOJobRecord, capacity: Capacity, alone: Capacity, ahead: str) -> Verdict:
    inventory, plan = capacity.inventory(job), kept_plan(job)
    if plan is None:
        result = _planned(job, inventory)
        plan = result.chosen
        if plan is None:
            return _verdict(job, result, admitted=False)
    if fits(inventory, plan):
        return Verdict(generation=job.generation, plan=plan, admitted=True, message=plan.reason)
    return _wait(job, plan, alone, ahead)


def _wait(job: GRPOJobRecord, plan: ExecutionPlan, alone: Capacity, ahead: str) -> Verdict:
    shortage = alone.shortage(job, plan)
    if ahead and fits(alone.inventory(job), plan):
        message = f"{shortage}; {ahead} is ahead in the queue"
        return Verdict(generation=job.generation, plan=plan, reason=Reason.WAITING_IN_QUEUE, message=message)
    return Verdict(generation=job.generation, plan=plan, reason=Reason.WAITING_FOR_GPUS, message=shortage)


def _verdict(job: GRPOJobRecord, result: PlanResult, admitted: bool) -> Verdict:
    return Verdict(
        generation=job.generation,
        plan=result.chosen,
        admitted=admitted and bool(result.chosen),
        reason=result.reason,
        message=result.message,
    )


def _behind(job: GRPOJobRecord, ahead: int) -> Verdict:
    message = f"{ahead} jobs are ahead in the queue"
    return Verdict(generation=job.generation, reason=Reason.WAITING_IN_QUEUE, message=message)


def _planned(job: GRPOJobRecord, inventory: Inventory) -> PlanResult:
    if job.spec is None:
        raise ValueError(f"{job.key} has no valid spec to plan")
    return plan_job(job.spec, inventory)


def kept_plan(job: GRPOJobRecord) -> ExecutionPlan | None:
    """The plan of a run that has made progress: it resumes as it began, whatever the cluster has become.

    Another number of ranks or another batch split would make other steps of the same checkpoint.
    """
    progress = job.status.progress
    return job.status.plan if progress and progress.step else None
