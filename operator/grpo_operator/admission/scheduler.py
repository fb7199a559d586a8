"""Plans the jobs of the queue in one admission cycle: each job on what those ahead of it leave, and
reserves its place.

A gang starts only when all of it fits. A waiting job reserves what it waits for, so jobs behind it
may take only what is left. Only jobs that can be planned take a place: a job that can never run, or
whose planning fails, delays no other job. Two kinds of jobs compete with no other and are planned
without the queue. One runs on CPUs. The other is admitted by Kueue and planned as if all GPUs were
free. Pure: a CycleInput in, a Cycle out.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from grpo_api.effective_spec import gpus_problem
from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import AppliedJobClass
from grpo_kube.objects.times import shortest_pause
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from grpo_planner.result.result import PlanResult
from grpo_planner.time.measured_runs import NO_RUNS, MeasuredRuns

from ..decide.decisions import Limits
from ..decide.preflight import checked_condition, is_checked, should_check
from ..pods.roles import replicas
from ..records.job_class import with_class
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord
from .capacity import Capacity, Claim, claim_of
from .node_fit import Suitability
from .plan_cache import Plans
from .queue_order import age, priority, sort_queue
from .quota_gate import Allowance, missing_object
from .resume_plan import next_plan
from .snapshot import Snapshot
from .spec_checks import Problem, plan_problem, spec_problem
from .storage_classes import storage_problem

log = logging.getLogger(__name__)

MOST_NEW_SPECS = 64
"""Specs that a cycle plans for the first time, at some ten milliseconds each. It ends there: those
ahead need not wait until everybody behind them has been planned, too."""
UNCOUNTED_SECONDS = 10.0
"""Seconds after its commit until a gang without a bound pod is taken to be in its quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of an admission cycle for one job, for the generation that was read."""

    generation: int
    plan: ExecutionPlan | None = None
    admitted: bool = False
    refused: bool = False
    """True if the job can't run until it is changed; it takes no place."""
    blocked: bool = False
    """True if the job waits for something other than GPUs; it takes no place meanwhile."""
    reason: str = Reason.ADMITTED
    message: str = ""
    passed_over: int = 0
    """Younger jobs of its priority that have started first."""
    job_class: AppliedJobClass | None = None
    """The class that the job was planned with."""
    avoids: bool = True
    """False: there are not enough nodes without those that the job should be kept away from."""

    def apply_to(self, job: GRPOJobRecord) -> GRPOJobRecord:
        """The job, kept away from nodes as the verdict was found."""
        return job if self.avoids else job.avoiding(())

    @property
    def published_part(self) -> tuple[object, ...]:
        """The parts whose change is published at once; a new sentence alone can wait."""
        return self.generation, self.admitted, self.refused, self.reason, self.plan is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleInput:
    """The input of a cycle."""

    jobs: tuple[GRPOJobRecord, ...]
    snapshot: Snapshot
    limits: Limits
    assumed: Mapping[str, Claim] = field(default_factory=dict)
    """By uid, attempts that were admitted and are not in their jobs' status yet."""
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """By uid, as counted by earlier cycles; a job's status may be behind."""
    pauses: Mapping[str, float] = field(default_factory=dict)
    """By uid, seconds that gangs still stay out of the queue after their release."""
    admitted_for: Mapping[str, float] = field(default_factory=dict)
    """By uid, seconds since the commit of attempts that are under way, where there are quotas."""
    denied_recently: frozenset[str] = frozenset()
    """uids of jobs whose commit the API server has just denied."""
    default_image: str = ""
    preflight: bool = False
    """See pods.pod_spec.PodDefaults."""
    measured: MeasuredRuns = NO_RUNS
    """Runs that were measured on this cluster."""

    def measured_for(self, job: GRPOJobRecord) -> MeasuredRuns:
        """The measured runs as a job may believe them."""
        return self.measured.of_namespace(job.key.namespace)

    def claims(self) -> list[Claim]:
        """The claims of admitted attempts; an assumed one replaces that of its job's status."""
        committed = (claim_of(job) for job in self.jobs if job.uid not in self.assumed)
        return [*filter(None, committed), *self.assumed.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The verdicts of a cycle by uid, and the seconds until time alone may change them."""

    verdicts: Mapping[str, Verdict]
    requeue_after: float | None = None
    not_reached: frozenset[str] = frozenset()
    """uids of jobs that the cycle did not reach; the next one goes on from its plans."""


def schedule(cycle_input: CycleInput, plans: Plans) -> Cycle:
    """Judge all waiting jobs in the order of the queue."""
    waiting: list[GRPOJobRecord] = []
    requeue_after: float | None = None
    for job in cycle_input.jobs:
        # an assumed job has its place already, although its status still says that it waits
        if job.uid in cycle_input.assumed or not job.is_waiting_for_admission:
            continue
        if pause := cycle_input.pauses.get(job.uid):
            requeue_after = shortest_pause(requeue_after, pause)
        elif job.uid not in cycle_input.denied_recently:
            waiting.append(with_class(job, cycle_input.snapshot.job_classes))
    plans.expect(len(waiting))
    if not waiting:
        return Cycle(verdicts={}, requeue_after=requeue_after)
    cycle_run = _CycleRun(cycle_input, plans)
    verdicts = cycle_run.run(waiting)
    not_reached = frozenset(job.uid for job in waiting if job.uid not in verdicts)
    requeue_after = shortest_pause(requeue_after, cycle_run.seconds_until_counted)
    if not_reached:
        requeue_after = 0.0
    return Cycle(verdicts=verdicts, requeue_after=requeue_after, not_reached=not_reached)


def restart(job: GRPOJobRecord, cycle_input: CycleInput) -> Verdict:
    """A gang that ended takes its own place again, with its own plan, ahead of all who wait.

    Where that plan ran out of memory, or its engine failed, it takes the one that answers that.
    """
    plan = job.status.plan
    if plan is None:
        raise ValueError(f"{job.key} is active without a plan")
    other_claims = [claim for claim in cycle_input.claims() if claim.job.uid != job.uid]
    capacity = Capacity(cycle_input.snapshot, other_claims)
    learned = job.status.learned
    has_failed = learned is not None and learned.has_failed_plan_of(job.status.attempt)
    if has_failed:
        inventory = capacity.inventory(job)

        def plan_on_inventory(spec: GRPOJobSpec, learned: Learned | None) -> PlanResult:
            measured = cycle_input.measured_for(job)
            return plan_job(spec, inventory, learned=learned, measured=measured)

        result, _ = next_plan(job, inventory, plan_on_inventory)
        if result.chosen is None:
            return verdict_of(job, result)
        plan = result.chosen
    if missing := missing_object(cycle_input.snapshot, job):
        reason, message = missing
        return Verdict(
            generation=job.generation, plan=plan, blocked=True, reason=reason, message=message
        )
    job_class = job.content.job_class
    if job_class and (problem := gpus_problem(job_class, plan)):
        reason = Reason.REFUSED_BY_JOB_CLASS
        return Verdict(generation=job.generation, blocked=True, reason=reason, message=problem)
    # A node that two attempts ended on is avoided only while there are enough nodes without it.
    avoids = job.should_create_pods or capacity.has_nodes_for(job, plan)
    job = job if avoids else job.avoiding(())
    admitted = job.should_create_pods or capacity.has_room_now(job, plan)
    reason = Reason.ADMITTED if admitted else Reason.WAITING_FOR_GPUS
    message = plan.reason if admitted else capacity.shortage(job, plan)
    return Verdict(
        generation=job.generation,
        plan=plan,
        admitted=admitted,
        reason=reason,
        message=message,
        job_class=job_class,
        avoids=avoids,
    )


class _CycleRun:
    """What changes while the queue is played through."""

    def __init__(self, cycle_input: CycleInput, plans: Plans) -> None:
        """Reserve the places of attempts that were admitted before."""
        self._input = cycle_input
        self._plans = plans
        snapshot = cycle_input.snapshot
        claims = cycle_input.claims()
        suitability = Suitability(snapshot.nodes)
        # the capacity that jobs ahead leave decides; the capacity without them shows each job
        # whom it waits for
        self._remaining = Capacity(snapshot, claims, suitability)
        self._without_queue = Capacity(snapshot, claims, suitability)
        self._gpus_by_namespace: dict[str, int] = {}
        for claim in claims:
            self._count_gpus(claim.job, claim.plan)
        self.seconds_until_counted: float | None = None
        """Seconds until quotas surely show the pods of all admitted gangs; None if they do."""
        self._allowance = Allowance(snapshot)
        if snapshot.quotas:
            for claim in filter(self._is_uncounted, claims):
                self._allowance.take(claim.job, claim.plan)
        self._placed_jobs: list[tuple[GRPOJobRecord, Verdict]] = []
        self._reserved_nodes: set[str] = set()
        """Nodes that are reserved for those who wait."""

    def run(self, waiting: list[GRPOJobRecord]) -> dict[str, Verdict]:
        """Return the verdicts by uid."""
        passed_over = {job.uid: self._passed_over(job) for job in waiting}
        verdicts: dict[str, Verdict] = {}
        # A queue of new specs is judged over several cycles, so that those ahead start before the
        # last is planned.
        last_spec = self._plans.made + MOST_NEW_SPECS
        priorities = self._input.snapshot.priorities
        queue = sort_queue(waiting, priorities, self._gpus_by_namespace, dict(passed_over))
        for job in queue:
            if self._plans.made >= last_spec:
                break
            verdict = replace(self._plan_job_safely(job), job_class=job.content.job_class)
            verdicts[job.uid] = verdict
            # A job that can't run, or that waits for something else, must not keep GPUs from those
            # behind it.
            if verdict.plan and not verdict.refused and not verdict.blocked:
                # also where it does not fit yet: no job behind may take GPUs that a larger gang
                # ahead waits for
                nodes = self._remaining.reserve(verdict.apply_to(job), verdict.plan)
                self._count_gpus(job, verdict.plan)
                if verdict.admitted:
                    self._allowance.take(job, verdict.plan)
                    # It has left the queue: those behind it wait for its GPUs from now on.
                    next_attempt = job.status.attempt + 1
                    claim = Claim(job=job, plan=verdict.plan, attempt=next_attempt)
                    self._without_queue.add_claims([claim])
                else:
                    self._reserved_nodes |= nodes
                self._placed_jobs.append((job, verdict))
        verdicts |= self._queue_positions()
        ages_of_admitted: dict[int, list[tuple[float, str]]] = {}
        for job, verdict in self._placed_jobs:
            if verdict.admitted:
                rank = priority(job, priorities)
                ages_of_admitted.setdefault(rank, []).append(age(job))
        for job, verdict in self._placed_jobs:
            if not verdict.admitted:
                # a job that starts while an older one of its priority waits has passed it over
                own_age = age(job)
                ages = ages_of_admitted.get(priority(job, priorities), ())
                passed_over[job.uid] += sum(other > own_age for other in ages)
        return {
            uid: replace(verdict, passed_over=passed_over[uid]) for uid, verdict in verdicts.items()
        }

    def _is_uncounted(self, claim: Claim) -> bool:
        """True if a gang has just been admitted, so that its quota may not show its pods yet."""
        if claim.job.uid in self._input.assumed:
            return True
        # quota.used follows the pods, which the Job controller creates a moment after the commit
        seconds_left = UNCOUNTED_SECONDS - self._input.admitted_for.get(claim.job.uid, inf)
        if seconds_left <= 0 or self._remaining.has_bound_pod(claim.job):
            return False
        self.seconds_until_counted = max(seconds_left, self.seconds_until_counted or 0.0)
        return True

    def _count_gpus(self, job: GRPOJobRecord, plan: ExecutionPlan) -> None:
        namespace = job.key.namespace
        before = self._gpus_by_namespace.get(namespace, 0)
        self._gpus_by_namespace[namespace] = before + plan.all_gpus

    def _passed_over(self, job: GRPOJobRecord) -> int:
        by_earlier_cycles = self._input.passed_over.get(job.uid, 0)
        by_status = job.status.passed_over or 0
        return max(by_earlier_cycles, by_status)

    def _plan_job_safely(self, job: GRPOJobRecord) -> Verdict:
        """The verdict on one job. An error of the planner must not stop those behind it."""
        try:
            verdict = self._plan_job(job)
            if not job.status.avoided_nodes or job.should_create_pods:
                return verdict
            if verdict.plan and self._remaining.has_nodes_for(job, verdict.plan):
                return verdict
            verdict_on_all_nodes = self._plan_job(job.avoiding(()))
            return replace(verdict_on_all_nodes, avoids=False)
        except Exception as error:
            log.exception("%s: the planner failed", job.key)
            what = f"{type(error).__name__}: {error}"
            message = f"the planner failed: {what}. Report it with the spec and the operator's log"
            return Verdict(generation=job.generation, reason=Reason.PLANNER_FAILED, message=message)

    def _plan_job(self, job: GRPOJobRecord) -> Verdict:
        if verdict := class_verdict(job):
            return verdict
        if problem := spec_problem(job.valid_spec, self._input.default_image):
            return refusal(job, problem)
        if problem := storage_problem(job, self._input.snapshot.storage_classes):
            return refusal(job, problem)
        inventory = self._remaining.inventory(job)

        def plan_on_inventory(spec: GRPOJobSpec, learned: Learned | None) -> PlanResult:
            measured = self._input.measured_for(job)
            return self._plans.plan(spec, inventory, learned, measured)

        result, is_reused = next_plan(job, inventory, plan_on_inventory)
        plan = result.chosen
        if plan is None:
            return verdict_of(job, result)
        # the planner has looked for the nodes of one role alone
        fits = result.fits_now
        if is_reused or replicas(plan):
            fits = self._remaining.has_room_now(job, plan)
        if problem := plan_problem(job, plan):
            return refusal(job, problem)
        if problem := self._allowance.problem(job, plan):
            reason, message = problem
            return Verdict(
                generation=job.generation, plan=plan, blocked=True, reason=reason, message=message
            )
        if job.should_create_pods:
            # its pods take any GPU that becomes free on their nodes, so no job ahead may be waiting
            # for those
            fits = self._reserved_nodes.isdisjoint(node.name for node in inventory.nodes)
        if not fits:
            verdict = self._waiting_verdict(job, plan)
        else:
            verdict = Verdict(
                generation=job.generation, plan=plan, admitted=True, message=plan.reason
            )
        return hold_until_checked(job, verdict, self._input.preflight)

    def _waiting_verdict(self, job: GRPOJobRecord, plan: ExecutionPlan) -> Verdict:
        """The verdict on a job that must wait: it fits but for those ahead of it, or not even
        without them."""
        fits_without_queue = self._without_queue.has_room_now(job, plan)
        reason = Reason.WAITING_IN_QUEUE if fits_without_queue else Reason.WAITING_FOR_GPUS
        message = self._without_queue.shortage(job, plan)
        # A run keeps its plan although its nodes may be gone for good: the GPUs that it keeps from
        # those behind it would be idle.
        has_nodes = job.should_create_pods or self._without_queue.has_nodes_for(job, plan)
        if not has_nodes:
            message = f"{message}; too few nodes could hold it if they were empty: others go first"
        return Verdict(
            generation=job.generation,
            plan=plan,
            blocked=not has_nodes,
            reason=reason,
            message=message,
        )

    def _queue_positions(self) -> dict[str, Verdict]:
        """The verdicts on those who wait with a place, and which place it is."""
        line = [(job, verdict) for job, verdict in self._placed_jobs if not verdict.admitted]
        verdicts: dict[str, Verdict] = {}
        ahead: GRPOJobRecord | None = None
        for number, (job, verdict) in enumerate(line, 1):
            place = f"{ordinal(number)} of {len(line)} in the queue{_behind(ahead, job)}"
            verdicts[job.uid] = replace(verdict, message=f"{verdict.message}; {place}")
            ahead = job
        return verdicts


def _behind(ahead: GRPOJobRecord | None, job: GRPOJobRecord) -> str:
    """Whom a job waits behind, as the end of a sentence; names of other namespaces' jobs are not
    for its users."""
    if ahead is None:
        return ""
    is_own = ahead.key.namespace == job.key.namespace
    return f", behind {ahead.key}" if is_own else ", behind another namespace's job"


def hold_until_checked(job: GRPOJobRecord, verdict: Verdict, preflight: bool) -> Verdict:
    """The verdict, without an admission before the preflight has passed.

    While the preflight runs, the job keeps its place: it has its answer in a moment. One that waits
    for something, or can't be checked, takes none. `preflight`: see CycleInput.
    """
    if verdict.plan is None or not should_check(job, preflight) or is_checked(job):
        return verdict
    condition = checked_condition(job)
    reason = condition.reason if condition else Reason.CHECKING
    is_under_way = reason == Reason.CHECKING
    if is_under_way and not verdict.admitted:
        return verdict
    message = condition.message if condition and not is_under_way else "its preflight is under way"
    return replace(
        verdict, admitted=False, blocked=not is_under_way, reason=reason, message=message
    )


def class_verdict(job: GRPOJobRecord) -> Verdict | None:
    """The verdict on a job that can't have its class; it takes no place."""
    if job.class_problem is None:
        return None
    reason, message = job.class_problem
    if reason is Reason.REFUSED_BY_JOB_CLASS:
        return refusal(job, job.class_problem)
    return Verdict(generation=job.generation, blocked=True, reason=reason, message=message)


def refusal(job: GRPOJobRecord, problem: Problem) -> Verdict:
    """The verdict on a job that can't be run as it is."""
    reason, message = problem
    # The end of an attempt is counted before its job is refused: a refusal would forget it.
    is_refused = not job.is_active
    return Verdict(
        generation=job.generation,
        refused=is_refused,
        blocked=not is_refused,
        reason=reason,
        message=message,
    )


def verdict_of(job: GRPOJobRecord, result: PlanResult, *, admitted: bool = False) -> Verdict:
    """Return the verdict that follows from the planner's answer, with or without a plan."""
    return Verdict(
        generation=job.generation,
        plan=result.chosen,
        admitted=admitted and bool(result.chosen),
        reason=result.reason,
        message=result.message,
    )


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`, `11th`, `21st`."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    is_teen = 10 < number % 100 < 14
    ending = "th" if is_teen else endings.get(number % 10, "th")
    return f"{number}{ending}"


def plan_without_queue(
    there: Inventory, job: GRPOJobRecord, measured: MeasuredRuns = NO_RUNS
) -> Verdict:
    """The verdict on a job that may have all of these nodes."""
    own_view = measured.of_namespace(job.key.namespace)

    def plan(spec: GRPOJobSpec, learned: Learned | None) -> PlanResult:
        return plan_job(spec, there, learned=learned, measured=own_view)

    result = next_plan(job, there, plan).result
    problem = plan_problem(job, result.chosen) if result.chosen else None
    return refusal(job, problem) if problem else verdict_of(job, result, admitted=True)
