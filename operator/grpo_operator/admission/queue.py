"""Decides which jobs may start: runs a cycle over the queue per change, and answers each job that
asks for an attempt.

A cycle is due after a change of the cluster's facts, and at the earliest deadline of the last
cycle. It is also due after a job comes, changes, starts, ends or is released. It runs in a thread,
on immutable input. Only jobs whose verdict changed are queued for a reconcile, which reads the last
verdict. Jobs on CPUs and those of Kueue are answered without a cycle. One of them that waits for
what the cluster lacks is queued for a reconcile when the facts have changed.

GPUs are never given twice, although a cycle takes time and a commit does, too:

- A job that a cycle admits is assumed to be there from then on (verdicts.py). Later cycles and
  restarts count its plan as taken. The assumption ends when its commit is in the cache, when it no
  longer wants the attempt, or when the commit was denied.
- A commit is made only while the job's assumption holds. It carries the resourceVersion that was
  read, so that a change of the job meanwhile makes it fail.
- A gang that restarts is answered at once, on the newest facts and all assumptions. A cycle that
  was in its thread then knew nothing of the places that it takes: its verdicts are thrown away, and
  it runs again.

Nothing here must survive a restart of the operator: committed attempts are read from the jobs'
status, and all other jobs are judged again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from grpo_api.report.report import Result
from grpo_api.status.status import Condition, ConditionType
from grpo_kube.objects.errors import ClusterError
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import ProcessClock, shortest_pause
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.time.measured_runs import NO_RUNS, MeasuredRuns

from ..decide.decisions import Action, Decision, Limits
from ..decide.first_seen import FirstSeenTracker
from ..decide.observation import Observation
from ..decide.restarts import pausing
from ..kueue.pod_sets import planned_for
from ..kueue.workload_steps import WAITS_FOR_KUEUE, gate_by_workload
from ..pods.pod_spec import PodDefaults
from ..records.job_class import with_class
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord
from .capacity import empty_nodes
from .node_fit import has_disk_report
from .plan_cache import Plans
from .quota_gate import missing_object
from .resume_plan import NO_BETTER_PLAN, learning
from .scheduler import (
    Cycle,
    CycleInput,
    Verdict,
    class_verdict,
    hold_until_checked,
    plan_without_queue,
    refusal,
    restart,
    schedule,
)
from .snapshot import LastingFacts, Snapshot
from .spec_checks import Problem, plan_problem, queue_problem, spec_problem
from .storage_classes import shared_claim, storage_problem
from .verdicts import Assumptions, JobSource, Notify, VerdictPublisher

log = logging.getLogger(__name__)

GATHER = 0.02
"""Seconds between the first change that calls for a cycle and the cycle, or as long as the last
cycle took: however much changes, cycles take at most half of a core."""
NOT_KNOWN_PAUSE = 2.0
"""Seconds until the next try while no snapshot of the cluster can be made."""


class _Mark(NamedTuple):
    """What of a job concerns the queue: when it changes, a cycle is due."""

    uid: str
    generation: int
    wants: bool
    active: bool
    attempt: int
    pausing: bool
    checked: Condition | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    """A class may require labels, and annotations take room of the pods'."""


class AdmissionQueue:
    """Runs the cycles and answers ADMIT decisions."""

    def __init__(
        self,
        jobs: JobSource,
        snapshot: Callable[[], Snapshot],
        notify: Notify,
        *,
        limits: Limits,
        clock: ProcessClock,
        first_seen_tracker: FirstSeenTracker,
        pods: PodDefaults,
    ) -> None:
        """`jobs` are all GRPOJobs; `snapshot` gives the cluster as it is known now, the same object
        while nothing has changed; `pods` is what their pods have by default."""
        self._jobs = jobs
        self._snapshot = snapshot
        self._limits = limits
        self._pods = pods
        self._clock = clock
        self._first_seen_tracker = first_seen_tracker
        self._plans = Plans()
        self._measured = NO_RUNS
        self._assumptions = Assumptions(jobs)
        self._notify = notify
        self._publisher = VerdictPublisher(notify)
        self._is_due = asyncio.Event()
        self._epoch = 0
        """Rises when a restart takes places that a cycle in its thread doesn't know of."""
        self._marks: dict[ObjectKey, _Mark] = {}
        self._passed_over: dict[str, int] = {}
        """By uid; a job's status may be behind."""
        self._known_facts: LastingFacts | None = None
        self._held_up: dict[ObjectKey, object] = {}
        """Jobs that no cycle judges and that wait, each with the facts that this follows from: all
        of them where the cluster lacks something, and of a job that waits for Kueue the objects."""
        self._kueue_plans: dict[ObjectKey, tuple[object, Verdict]] = {}
        """The last plan of each job that has no Workload of Kueue's yet, with what it follows
        from: without Kueue it is asked for every few seconds."""

    def take_measured_runs(self, measured: MeasuredRuns) -> None:
        """Plan by these runs from now on."""
        self._measured = measured
        self.wake()

    def wake(self) -> None:
        """Make a cycle due."""
        self._is_due.set()

    def record_job(self, key: ObjectKey, job: GRPOJobRecord | None) -> None:
        """Record a job after a reconcile (None: gone or unreadable); a change wakes a cycle."""
        if job is None or job.is_finished:
            self._kueue_plans.pop(key, None)
        # The source knows whose place a job has.
        job = self._jobs.get(key) or job
        mark: _Mark | None = None
        if job and not job.is_finished and job.is_competing:
            mark = self._mark(job)
        if mark == self._marks.get(key):
            return
        if mark:
            self._marks[key] = mark
        else:
            del self._marks[key]
        self.wake()

    def _mark(self, job: GRPOJobRecord) -> _Mark:
        return _Mark(
            job.uid,
            job.generation,
            job.is_waiting_for_admission,
            job.is_active,
            job.status.attempt,
            self._pause(job) > 0,
            job.condition(ConditionType.CHECKED),
            job.labels,
            job.annotations,
        )

    def _pause(self, job: GRPOJobRecord) -> float:
        """Seconds that a released gang still stays out of the queue; 0 when it is in."""
        if not job.is_released:
            return 0.0
        times = self._first_seen_tracker.times(job.key)
        released_for = times.released_for(job, self._clock.wall(), self._clock.monotonic())
        return pausing(job, released_for, self._limits)

    def _admitted_for(self, job: GRPOJobRecord) -> float:
        """Seconds since the commit of the job's attempt."""
        times = self._first_seen_tracker.times(job.key)
        return times.admitted_for(job, self._clock.wall(), self._clock.monotonic())

    async def run(self) -> None:
        """Runs cycles when they are due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publisher.run(), name="queue-notices")
            clock = asyncio.get_running_loop().time
            pause: float = GATHER
            requeue_after: float | None = None
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(requeue_after):
                        await self._is_due.wait()
                await asyncio.sleep(pause)
                began_at = clock()
                requeue_after = await self._run_cycle_safely()
                cycle_seconds = clock() - began_at
                pause = min(max(GATHER, cycle_seconds), NOT_KNOWN_PAUSE)

    async def _run_cycle_safely(self) -> float | None:
        """One cycle; a mistake in it must not end the process, which has gangs to look after."""
        try:
            return await self.run_cycle()
        except Exception:
            log.exception("a cycle over the queue failed; trying again in %.0f s", NOT_KNOWN_PAUSE)
            return NOT_KNOWN_PAUSE

    async def run_cycle(self) -> float | None:
        """Judge all waiting jobs; return the seconds until time alone may change a verdict."""
        self._is_due.clear()
        self._wake_held_up()
        waiting_uids = {mark.uid for mark in self._marks.values() if mark.wants}
        self._passed_over = {
            uid: count for uid, count in self._passed_over.items() if uid in waiting_uids
        }
        # An empty queue needs no snapshot, which may be missing while the operator starts.
        if not waiting_uids:
            return None
        try:
            cycle_input = self._cycle_input()
        except ClusterError as error:
            log.info("nobody is admitted for now: %s", error)
            return NOT_KNOWN_PAUSE
        # Work that changes places while the cycle is in its thread raises the epoch, and its
        # verdicts are thrown away.
        epoch = self._epoch
        # planning a whole queue may take a while; watches and probes must not wait for it
        cycle = await asyncio.to_thread(schedule, cycle_input, self._plans)
        # A restart took places that the cycle did not know of: its verdicts could give the same
        # GPUs twice.
        if epoch != self._epoch:
            self.wake()
            return None
        self._accept(cycle_input, cycle)
        denial_pauses = self._assumptions.denial_pauses(self._clock.monotonic()).values()
        return shortest_pause(cycle.requeue_after, self._jobs.requeue_after, *denial_pauses)

    def _wake_held_up(self) -> None:
        """Queue the jobs for a reconcile that wait for what may be there by now."""
        facts = self._facts() if self._held_up else None
        _, objects = facts or (None, None)
        keys = [
            key
            for key, known in self._held_up.items()
            if known is not facts and known is not objects
        ]
        for key in keys:
            del self._held_up[key]
        self._notify(keys, slow=True)

    def _facts(self) -> LastingFacts | None:
        """The facts as they are known now, the same object while they are equal; None if they
        aren't known."""
        try:
            snapshot = self._snapshot()
        except ClusterError:
            return None
        facts, known = snapshot.lasting_facts, self._known_facts
        if facts != known:
            # Nodes change more often than what jobs name.
            if known and facts[1] == known[1]:
                facts = (facts[0], known[1])
            self._known_facts = facts
        return self._known_facts

    def _cycle_input(self) -> CycleInput:
        snapshot = self._snapshot()
        jobs = tuple(self._jobs)
        assumed = self._assumptions.claims()
        denied_recently = frozenset(self._assumptions.denial_pauses(self._clock.monotonic()))
        waiting = (job for job in jobs if job.is_waiting_for_admission)
        pauses = {job.uid: self._pause(job) for job in waiting}
        counted = jobs if snapshot.quotas else ()
        admitted_for = {job.uid: self._admitted_for(job) for job in counted if job.is_active}
        return CycleInput(
            jobs=jobs,
            snapshot=snapshot,
            limits=self._limits,
            assumed=assumed,
            passed_over=dict(self._passed_over),
            pauses=pauses,
            admitted_for=admitted_for,
            denied_recently=denied_recently,
            default_image=self._pods.image,
            preflight=self._pods.preflight,
            measured=self._measured,
        )

    def _accept(self, cycle_input: CycleInput, cycle: Cycle) -> None:
        """Assume the attempts that the cycle admitted, and publish its verdicts."""
        verdicts = cycle.verdicts
        jobs = {job.uid: job for job in cycle_input.jobs if job.uid in verdicts}
        for uid, verdict in verdicts.items():
            self._passed_over[uid] = verdict.passed_over
            if verdict.admitted and verdict.plan:
                job = verdict.apply_to(jobs[uid])
                self._assumptions.add(job, verdict.plan)
        # Jobs that this cycle did not come to, or whose place is taken already, keep the verdict
        # that they have.
        others = cycle.not_reached | self._assumptions.claims().keys()
        keys = {uid: job.key for uid, job in jobs.items()}
        self._publisher.publish(verdicts, keys, others)

    def release_denied(self, job: GRPOJobRecord) -> None:
        """Release the place of a job whose commit the API server denied."""
        if self._assumptions.drop_denied(job.uid, self._clock.monotonic()):
            self.wake()

    async def answer(self, observation: Observation, decision: Decision) -> Decision | None:
        """COMMIT with a plan, QUEUE with what the gang waits for, or REJECT; None until a cycle has
        considered the job.

        Between a COMMIT and the write that it asks for, the caller may not wait for anything.

        Raises:
            ClusterError: what the cluster has is unknown.
        """
        key = observation.job.key
        self._held_up.pop(key, None)
        if observation.job.is_competing:
            return await self._answer(observation, decision)
        facts = self._facts()
        answer = await self._answer(observation, decision)
        if answer and answer.action in (Action.QUEUE, Action.REJECT):
            # Kueue's answer comes by an event of the Workload, and whatever nodes come or go, the
            # job keeps its plan. What it names it needs until it starts.
            waits_for_kueue = answer.plan and answer.reason in WAITS_FOR_KUEUE
            self._held_up[key] = facts[1] if facts and waits_for_kueue else facts
            # They may have changed while the job was planned.
            if facts is not self._facts():
                self.wake()
        return answer

    async def _answer(self, observation: Observation, decision: Decision) -> Decision | None:
        job = observation.job
        if job.is_active:
            # the next attempt takes the class as it is now
            job = with_class(job, self._snapshot().job_classes)
        if decision.learned is not None:
            job = learning(job, decision.learned)
        if job.spec is None:
            # an attempt that was started under an older CRD may need its next attempt
            problems = "; ".join(job.problems)
            return _decision(decision, refusal(job, (Reason.INVALID_SPEC, problems)))
        if unclassed := class_verdict(job):
            return _decision(decision, unclassed)
        if problem := spec_problem(job.spec, self._pods.image) or queue_problem(job):
            return _decision(decision, refusal(job, problem))
        if problem := self._storage_problem(job):
            return _decision(decision, refusal(job, problem))
        if job.queue_name:
            return await self._decide_by_kueue(observation, decision, job)
        if not job.is_competing:
            return self._on_cpus(decision, job)
        # A gang that restarts is answered at once, ahead of the queue: its GPUs are idle until
        # then.
        if job.is_active:
            if decision.avoided_nodes is not None:
                job = job.avoiding(decision.avoided_nodes)
            return _decision(decision, self._restart_at_once(job))
        verdict = self._publisher.verdict_for(job.uid)
        if verdict is None or not self._is_valid(verdict, job):
            self.wake()
            return None
        return _decision(decision, verdict)

    def _on_cpus(self, request: Decision, job: GRPOJobRecord) -> Decision:
        """A job without GPUs does not queue, but it needs the objects that it names."""
        verdict = plan_without_queue(self._cpus(), job, self._measured)
        decision = _decision(request, replace(verdict, job_class=job.content.job_class))
        return self._hold_without_named_objects(decision, job)

    def _hold_without_named_objects(self, decision: Decision, job: GRPOJobRecord) -> Decision:
        """Queue a job whose PriorityClass or ServiceAccount is missing: its pods would not be
        created."""
        # The pods of a dispatched job need those objects on another cluster.
        if decision.action is not Action.COMMIT or job.is_dispatched:
            return decision
        try:
            missing = missing_object(self._snapshot(), job)
        except ClusterError:
            missing = None
        if missing is None:
            return decision
        reason, message = missing
        return replace(
            decision,
            action=Action.QUEUE,
            reason=reason,
            message=message,
        )

    def _storage_problem(self, job: GRPOJobRecord) -> Problem | None:
        """Why the claim of a new job can't be mounted; ClusterError if that is not known."""
        if shared_claim(job) is None:
            return None
        return storage_problem(job, self._snapshot().storage_classes)

    def _is_valid(self, verdict: Verdict, job: GRPOJobRecord) -> bool:
        """True if a verdict is on the current spec and an admitted job's place is still taken."""
        if verdict.generation != job.generation:
            return False
        return not verdict.admitted or self._assumptions.is_assumed(job.uid)

    async def _decide_by_kueue(
        self, observation: Observation, decision: Decision, job: GRPOJobRecord
    ) -> Decision:
        """A job that Kueue admits keeps its Workload's plan as long as it can run by it."""
        plan = None if decision.learned else planned_for(job, observation.workload)
        if plan and not plan_problem(job, plan):
            self._kueue_plans.pop(job.key, None)
            verdict = Verdict(
                generation=job.generation, plan=plan, admitted=True, message=plan.reason
            )
        else:
            verdict = await self._plan_on_empty_cluster(job)
        verdict = hold_until_checked(job, verdict, self._pods.preflight)
        ungated = _decision(decision, replace(verdict, job_class=job.content.job_class))
        ungated = self._hold_without_named_objects(ungated, job)
        return gate_by_workload(observation, ungated, self._pods)

    async def _plan_on_empty_cluster(self, job: GRPOJobRecord) -> Verdict:
        """A plan on the whole cluster as if it were empty: Kueue decides who gets what."""
        basis = (job.uid, job.version, job.status.learned, self._facts(), self._measured)
        known_basis, verdict = self._kueue_plans.get(job.key, (None, None))
        if verdict is not None and known_basis == basis:
            return verdict
        if job.valid_spec.placement.accelerator == "CPU":
            inventory = self._cpus()
        else:
            inventory = empty_nodes(job, self._snapshot)
        # planning for many nodes may take a while; watches and probes must not wait for it
        verdict = await asyncio.to_thread(plan_without_queue, inventory, job, self._measured)
        self._kueue_plans[job.key] = basis, verdict
        return verdict

    def _cpus(self) -> Inventory:
        """For jobs on CPUs: no nodes, only whether they report their disks, if known."""
        try:
            nodes = self._snapshot().nodes
        except ClusterError:
            return Inventory()
        return Inventory(reports_disk=has_disk_report(nodes))

    def _restart_at_once(self, job: GRPOJobRecord) -> Verdict:
        """Decide at once on the newest facts: the job's GPUs are idle until then."""
        cycle_input = self._cycle_input()
        verdict = restart(job, cycle_input)
        if verdict.admitted and verdict.plan:
            self._assumptions.add(verdict.apply_to(job), verdict.plan)
            self._epoch += 1
        return verdict


def _decision(request: Decision, verdict: Verdict) -> Decision:
    """What to do about a verdict; `request` is the decision that asks for an attempt."""
    if not verdict.avoids:
        request = replace(request, avoided_nodes=())
    if verdict.refused:
        return Decision(Action.REJECT, verdict.reason, verdict.message)
    if verdict.admitted:
        return replace(
            request, action=Action.COMMIT, plan=verdict.plan, job_class=verdict.job_class
        )
    # No plan that answers how the last attempt ended: waiting for GPUs would not help.
    if request.learned and verdict.plan is None and verdict.reason in NO_BETTER_PLAN:
        return _without_better_plan(request, verdict)
    return replace(
        request,
        action=Action.QUEUE,
        reason=verdict.reason,
        message=verdict.message,
        plan=verdict.plan,
        passed_over=verdict.passed_over,
    )


def _without_better_plan(request: Decision, verdict: Verdict) -> Decision:
    """The end of a job whose plan made its attempt fail, and which has no other."""
    ended = request.ended
    message = verdict.message
    if ended and ended.result is not Result.OUT_OF_MEMORY:
        message = f"{ended.message}; no other engine answers that: {message}"
    result = ended.result if ended else Result.OUT_OF_MEMORY
    return replace(request, action=Action.FAIL, reason=result, message=message)
