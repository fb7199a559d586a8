"""A pure world of several GRPOJobs on a few nodes: the operator's real queue, policies and status,
with a small model of the scheduler, the Job controller, kubelets and trainers.

Nodes vanish, are cordoned and come back, strangers take GPUs, pods die, and users suspend jobs.
"""

import random
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import ConditionType
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.admission.inventory import PodFacts
from grpo_operator.admission.queue import AdmissionQueue
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation, observe
from grpo_operator.records.names import COMPONENT_TRAINER
from grpo_operator.records.parsing import pod_record
from grpo_operator.records.records import GRPOJobRecord, JobRecord, PodRecord
from grpo_operator.report.status import build_status, to_json
from tests.unit.operator_world import (
    LIMITS,
    NOW,
    PODS,
    active_status,
    at,
    condition,
    make_child,
    make_job,
    pod_object,
    said,
    terminated,
)
from tests.unit.queue_world import gang, packs
from tests.unit.test_operator_admission_safety import facts

GPU = "nvidia.com/gpu"
WAITS = [condition("Admitted", "False", "WaitingForGPUs")]
T = TypeVar("T")
PRIORITIES = {"high": 10, "low": 1}


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


@dataclass
class Job:
    """A Job of the attempt with this number."""

    uid: str
    attempt: int
    ended: str = ""
    ended_at: float = 0.0
    deleting: bool = False


@dataclass
class Pod:
    """A pod; times are seconds of the world."""

    uid: str
    job: str
    attempt: int
    index: int
    node: str = ""
    bound_at: float = 0.0
    end: str = ""
    ended_at: float = 0.0
    deleting: bool = False
    clock: float = 0.0
    """Seconds by which its kubelet's clock is fast."""

    @property
    def is_live(self) -> bool:
        return not self.end and not self.deleting


@dataclass
class Gang:
    """A GRPOJob with what belongs to it."""

    name: str
    namespace: str
    plan: ExecutionPlan
    spec: dict[str, Any]
    created: float
    seconds_to_run: float
    status: dict[str, Any] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)
    tracker: FirstSeenTracker = field(default_factory=FirstSeenTracker)
    generation: int = 1
    held: float = 0.0
    """GPU-seconds that its pods have held."""
    unseen: float = 0.0
    """GPU-seconds by which the account may be off."""
    runs_since: float | None = None
    last: tuple[dict[str, Any], int, GRPOJobRecord] | None = None
    """Status and generation that were parsed last, and what they gave."""

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.namespace, self.name)

    def record(self) -> GRPOJobRecord:
        if self.last and self.last[0] is self.status and self.last[1] == self.generation:
            return self.last[2]
        record = make_job(
            self.spec, self.status, name=self.name, uid=f"uid-{self.name}",
            namespace=self.namespace, generation=self.generation,
            creationTimestamp=at(self.created),
        )  # fmt: skip
        self.last = self.status, self.generation, record
        return record


class World:
    """Jobs, nodes and an operator."""

    requeue_after: float | None = None

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.gangs: dict[ObjectKey, Gang] = {}
        sizes = [chance.choice([2, 4, 8]) for _ in range(chance.randint(1, 5))]
        self.nodes = {f"node-{n}": facts(f"node-{n}", size) for n, size in enumerate(sizes)}
        self.foreign: list[tuple[str, int]] = []
        self.count = 0
        self.records: dict[ObjectKey, GRPOJobRecord] = {}
        self.queue = self.new_queue()
        for _ in range(chance.randint(2, 8)):
            self.come()

    def new_queue(self) -> AdmissionQueue:
        return AdmissionQueue(
            self,
            self.snapshot,
            self.tell,
            limits=LIMITS,
            clock=ProcessClock(lambda: NOW + self.now, lambda: Observed(self.now)),
            first_seen_tracker=FirstSeenTracker(),
            pods=PODS,
        )

    def __iter__(self) -> Iterator[GRPOJobRecord]:
        return iter(list(self.records.values()))

    def get(self, key: ObjectKey) -> GRPOJobRecord | None:
        return self.records.get(key)

    def tell(self, keys: Iterable[ObjectKey], *, slow: bool = False) -> None:
        """Each job is looked at in every round."""

    def snapshot(self) -> Snapshot:
        pods = [
            PodFacts(namespace="other", name=f"p{n}", node=node, takes={GPU: float(gpus)})
            for n, (node, gpus) in enumerate(self.foreign)
        ]
        for one in self.gangs.values():
            takes = {GPU: float(one.plan.gpus_per_node)}
            pods += [
                PodFacts(
                    namespace=one.namespace, name=pod.uid, node=pod.node, takes=takes,
                    grpojob=one.name, grpojob_uid=f"uid-{one.name}", attempt=str(pod.attempt),
                )
                for pod in one.pods
                if pod.node and not pod.end
            ]  # fmt: skip
        return Snapshot(
            nodes=tuple(self.nodes.values()), gpu_pods=tuple(pods), priorities=PRIORITIES
        )

    def free(self) -> dict[str, int]:
        room = {name: int(one.offers[GPU]) for name, one in self.nodes.items()}
        for pod in self.snapshot().gpu_pods:
            if pod.node in room:
                room[pod.node] -= int(pod.takes[GPU])
        assert min(room.values(), default=0) >= 0, "a node has more than it has"
        return {name: gpus for name, gpus in room.items() if self.nodes[name].usable}

    # what happens

    def come(self) -> None:
        """A user creates a job."""
        self.count += 1
        plan = gang(*self.chance.choice([(1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (3, 1), (1, 8)]))
        status = active_status(plan=plan, progress={"step": 5, "totalSteps": 9})
        status["conditions"] = WAITS
        del status["attemptStartTime"], status["jobUid"]
        placement: dict[str, Any] = {"accelerator": "GPU", "nodes": None}
        if kind := self.chance.choice(["", "", "high", "low"]):
            placement["priorityClassName"] = kind
        one = Gang(
            f"j{self.count}", self.chance.choice(["a", "b", "c"]), plan,
            {"placement": placement, "restarts": {"limit": 1000, "uncountedLimit": 10000}},
            self.now, self.chance.uniform(10, 300), status,
        )  # fmt: skip
        self.gangs[one.key] = one
        self.keep(one)

    def keep(self, one: Gang) -> GRPOJobRecord:
        """The watch shows the job as it is."""
        record = self.records[one.key] = one.record()
        self.queue.record_job(one.key, record)
        return record

    def disturb(self) -> None:
        """Somebody does something."""
        what = self.chance.choice(
            [self.node_goes, self.node_comes, self.cordon, self.cordon, self.stranger,
             self.stranger, self.pod_dies, self.pod_dies, self.pod_is_deleted, self.suspend,
             self.suspend, self.job_is_deleted, self.come, self.new_operator]
        )  # fmt: skip
        what()

    def node_goes(self) -> None:
        if len(self.nodes) > 1:
            name = self.chance.choice(sorted(self.nodes))
            del self.nodes[name]
            self.foreign = [(node, gpus) for node, gpus in self.foreign if node != name]
            for one in self.gangs.values():
                for pod in [pod for pod in one.pods if pod.node == name and not pod.end]:
                    one.pods.remove(pod)
                    # Nobody sees it before the round is over, and the longest takes 30 s.
                    one.unseen += 30 * one.plan.gpus_per_node

    def node_comes(self) -> None:
        if len(self.nodes) < 5:
            self.count += 1
            name = f"node-{self.count}"
            self.nodes[name] = facts(name, self.chance.choice([4, 8]))

    def cordon(self) -> None:
        name = self.chance.choice(sorted(self.nodes))
        node = self.nodes[name]
        self.nodes[name] = replace(node, usable=not node.usable)

    def stranger(self) -> None:
        if self.foreign and self.chance.random() < 0.6:
            self.foreign.pop(self.chance.randrange(len(self.foreign)))
        elif rooms := [name for name, gpus in self.free().items() if gpus]:
            self.foreign.append((self.chance.choice(rooms), 1))

    def some_pod(self) -> tuple[Gang, Pod] | None:
        pods = [(one, pod) for one in self.gangs.values() for pod in one.pods if pod.is_live]
        return self.chance.choice(pods) if pods else None

    def pod_dies(self) -> None:
        if (found := self.some_pod()) and found[1].node:
            self.end(found[1], "bad")

    def pod_is_deleted(self) -> None:
        if found := self.some_pod():
            found[1].deleting = True

    def job_is_deleted(self) -> None:
        jobs = [job for one in self.gangs.values() for job in one.jobs]
        if jobs:
            self.chance.choice(jobs).deleting = True

    def suspend(self) -> None:
        one = self.chance.choice(list(self.gangs.values()))
        one.spec["suspend"] = not one.spec.get("suspend")
        one.generation += 1
        self.keep(one)

    def new_operator(self) -> None:
        self.queue = self.new_queue()
        for one in self.gangs.values():
            one.tracker = FirstSeenTracker()
            self.keep(one)

    def end(self, pod: Pod, how: str) -> None:
        pod.end, pod.ended_at = how, self.now

    # Kubernetes

    def control(self) -> None:
        """One step of the scheduler, the kubelets, the trainers and the Job controller."""
        for one in self.gangs.values():
            for pod in list(one.pods):
                if pod.deleting and (pod.end or not pod.node):
                    one.pods.remove(pod)
                elif pod.deleting and self.chance.random() < 0.7:
                    self.end(pod, "bad")
            self.control_jobs(one)
            self.train(one)
        for one in self.gangs.values():
            for pod in one.pods:
                if not pod.node and pod.is_live:
                    self.bind(one, pod)

    def control_jobs(self, one: Gang) -> None:
        for job in list(one.jobs):
            pods = [pod for pod in one.pods if pod.job == job.uid]
            if job.deleting:
                for pod in pods:
                    pod.deleting = True
                if not pods:
                    one.jobs.remove(job)
            elif job.ended:
                for pod in pods:
                    pod.deleting |= not pod.end
            else:
                self.sync(one, job, pods)

    def sync(self, one: Gang, job: Job, pods: list[Pod]) -> None:
        missing = set(range(one.plan.nodes)) - {pod.index for pod in pods}
        is_new = not pods
        if any(pod.end == "bad" or pod.deleting for pod in pods) or (missing and not is_new):
            for pod in pods:
                pod.deleting |= not pod.end
            if all(pod.end for pod in pods):
                job.ended, job.ended_at = "Failed", self.now
        elif pods and all(pod.end == "well" for pod in pods):
            job.ended, job.ended_at = "Complete", self.now
        else:
            for index in missing:
                self.count += 1
                clock = self.chance.choice([0.0, 600.0, -600.0])
                one.pods.append(Pod(f"pod-{self.count}", job.uid, job.attempt, index, clock=clock))

    def train(self, one: Gang) -> None:
        attempt = one.status["attempt"]
        pods = [pod for pod in one.pods if pod.attempt == attempt and pod.is_live and pod.node]
        if len(pods) < one.plan.nodes:
            one.runs_since = None
            return
        one.runs_since = self.now if one.runs_since is None else one.runs_since
        if self.now - one.runs_since > one.seconds_to_run:
            for pod in pods:
                self.end(pod, "well")

    def bind(self, one: Gang, pod: Pod) -> None:
        peers = {peer.node for peer in one.pods if peer.job == pod.job}
        width = one.plan.gpus_per_node
        rooms = [name for name, gpus in self.free().items() if gpus >= width and name not in peers]
        if rooms:
            pod.node, pod.bound_at = self.chance.choice(rooms), self.now

    # the operator

    def look(self, one: Gang) -> Observation:
        job = self.keep(one)
        return observe(
            job,
            [self.child(one, child) for child in one.jobs],
            [self.pod(one, pod) for pod in one.pods],
            now=NOW + self.now,
            at=Observed(self.now),
            first_seen_tracker=one.tracker,
        )

    def child(self, one: Gang, job: Job) -> JobRecord:
        return make_child(
            job.attempt, f"uid-{one.name}", uid=job.uid, job=one.name,
            deleting=job.deleting, ended=job.ended, ended_at=job.ended_at,
        )  # fmt: skip

    def pod(self, one: Gang, pod: Pod) -> PodRecord:
        conditions: list[dict[str, Any]] = []
        state: dict[str, Any] = {}
        phase: str | None = "Pending"
        if pod.node:
            bound = {"type": "PodScheduled", "status": "True"}
            conditions = [{**bound, "lastTransitionTime": at(pod.bound_at)}]
            state, phase = {"running": {}}, None
        if pod.end:
            state = terminated(0, said("Succeeded"), clock=pod.clock + pod.ended_at)
            if pod.end == "bad":
                state = terminated(1, clock=pod.clock + pod.ended_at)
            state["terminated"]["startedAt"] = at(pod.clock + pod.bound_at)
        item = pod_object(
            pod.index, pod.attempt, state, name=pod.uid, uid=pod.uid, by=pod.job,
            owner=f"uid-{one.name}", node=pod.node, deleted=pod.deleting, conditions=conditions,
            component=COMPONENT_TRAINER, arrived=pod.clock + pod.bound_at, phase=phase,
        )  # fmt: skip
        return pod_record(item)

    def write(self, one: Gang, seen: Observation, decision: Decision) -> None:
        status = to_json(build_status(seen, decision))
        if status != one.status:
            one.status = status
            self.keep(one)

    def reconcile(self, one: Gang) -> Decision:
        """What loop/reconcile.py does."""
        seen = self.look(one)
        decision = decide(seen, LIMITS)
        if decision.action is Action.ADMIT:
            answer = result_of(self.queue.answer(seen, decision))
            if answer is None:
                return self.collect(one, decision)
            decision = answer
        if decision.action is Action.COMMIT:
            self.write(one, seen, decision)
            seen = self.look(one)
            decision = decide(seen, LIMITS)
        if decision.action is Action.START:
            self.count += 1
            attempt = seen.job.status.attempt
            job = Job(f"job-{self.count}", attempt)
            assert attempt not in [other.attempt for other in one.jobs]
            one.jobs.append(job)
            one.tracker.record_created(one.key, attempt, job.uid, seen.at)
            seen = self.look(one)
            decision = decide(seen, LIMITS)
        self.write(one, seen, decision)
        return self.collect(one, decision)

    def collect(self, one: Gang, decision: Decision) -> Decision:
        """What loop/garbage_collector.py does."""
        seen = self.look(one)
        garbage = clean_up(seen, LIMITS)
        for job in one.jobs:
            job.deleting |= f"{one.name}-{job.attempt}" in garbage.delete_jobs
        for pod in one.pods:
            pod.deleting |= pod.attempt in garbage.stop_attempts and not pod.end
        return decision

    # time

    async def round(self, seconds: float) -> float | None:
        """Time passes, Kubernetes acts, a cycle is made, and all jobs are looked at. Return until
        when time alone changes nothing."""
        for one in self.gangs.values():
            held = sum(bool(pod.node) and not pod.end for pod in one.pods)
            one.held += held * one.plan.gpus_per_node * seconds
        self.now += seconds
        self.control()
        pauses = [await self.queue.run_cycle()]
        gangs = list(self.gangs.values())
        for one in self.chance.sample(gangs, len(gangs)):
            if self.records[one.key].is_finished and not one.pods:
                continue
            pauses.append(self.reconcile(one).requeue_after)
        return min((pause for pause in pauses if pause is not None), default=None)

    def fits_alone(self, one: Gang) -> bool:
        room = self.free()
        for other in self.gangs.values():
            for pod in other.pods:
                if pod.node in room and not pod.end:
                    room[pod.node] += other.plan.gpus_per_node
        return packs([(one.name, one.plan.gpus_per_node)] * one.plan.nodes, room, {})

    def is_over(self, one: Gang) -> bool:
        """True if nothing is to be done for it any more."""
        job = self.records[one.key]
        if job.is_suspended and not job.is_finished:
            return job.is_true(ConditionType.SUSPENDED) and all(pod.end for pod in one.pods)
        return (job.is_finished or not self.fits_alone(one)) and not job.is_active
