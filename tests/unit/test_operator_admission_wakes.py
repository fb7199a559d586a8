"""Whoever waits is looked at again when what it waits for has changed: no answer of the queue
outlives its reason, whoever admits the job.

A job is asked about only when an event, a deadline or the queue calls for it. A queue that begins
now must answer each of them as it was answered last.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from grpo_api.effective_spec import applied_class
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.admission import queue as queue_module
from grpo_operator.admission.inventory import node_facts
from grpo_operator.admission.queue import AdmissionQueue
from grpo_operator.admission.scheduler import Verdict, plan_without_queue
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.job_class import JobClasses, with_class
from grpo_operator.records.records import GRPOJobRecord
from tests.generated import cases
from tests.unit.operator_world import LIMITS, NOW, PLAN, at, condition, make_job, make_seen
from tests.unit.queue_world import Jobs, cluster, gang, gpu_pod
from tests.unit.test_operator_inventory import GFD, node

PODS = PodDefaults(image="trainer:1", preflight=True)
A100 = "NVIDIA-A100-SXM4-80GB"
NODES: dict[str, Snapshot] = {
    "none": cluster(),
    "one": cluster(8),
    "full": cluster(8, pods=[gpu_pod("p", 8)]),
    "half": cluster(8, pods=[gpu_pod("p", 4)]),
    "others": Snapshot(nodes=(node_facts(node({**GFD, "nvidia.com/gpu.product": A100})),)),
}


def limited(limits: dict[str, Any]) -> dict[str, Any]:
    """The class h100 with these limits, as a fact."""
    applied = applied_class("h100", 1, {"limits": limits})
    return {"job_classes": JobClasses(by_name={"h100": applied})}


DISK, SHARED = ("gp3", "ebs.csi.aws.com"), ("efs", "efs.csi.aws.com")
FACTS: dict[str, dict[str, Any]] = {
    "disks": {"storage_classes": {"": DISK, "gp3": DISK}},
    "shared storage": {"storage_classes": {"": SHARED, "efs": SHARED}},
    "no class": {"job_classes": JobClasses()},
    "class of few GPUs": limited({"gpus": 4}),
    "class of many GPUs": limited({"gpus": 64}),
    "class of labels": limited({"requiredLabels": ["team"]}),
    "no priorities": {"priorities": {"": 0, "low": 1}},
    "priorities": {"priorities": {"": 0, "low": 1, "high": 10}},
    "no account": {"service_accounts": {"team-a": frozenset({"default"})}},
    "account": {"service_accounts": {"team-a": frozenset({"default", "trainer"})}},
}
CLAIM = {"volumeClaimTemplate": {"size": "10Gi"}}
SOURCE = {"grpoJob": "first", "uid": "uid-first", "folder": "first-uid", "claimName": "data"}
EDITS: dict[str, dict[str, Any]] = {
    "claim": {"checkpoint": CLAIM},
    "no claim": {"checkpoint": {}},
    "class": {"jobClassName": "h100"},
    "no class": {"jobClassName": None},
    "priority": {"placement": {"priorityClassName": "high"}},
    "account": {"podTemplate": {"spec": {"serviceAccountName": "trainer"}}},
    "other product": {"placement": {"gpuProduct": A100}},
    "suspend": {"suspend": True},
    "resume": {"suspend": False},
}
META: dict[str, dict[str, Any]] = {
    "team": {"labels": {"team": "a"}},
    "no team": {"labels": {}},
    "long notes": {"annotations": {"note": "x" * 210_000}},
    "notes": {"annotations": {"note": "x"}},
    "queue": {"labels": {"team": "a", "kueue.x-k8s.io/queue-name": "team"}},
}
BY_NAME = (
    "JobClassNotFound",
    "RefusedByJobClass",
    "PriorityClassNotFound",
    "ServiceAccountNotFound",
)
"""Reasons that follow from objects that a job names."""
CHECKS = (
    ("Passed", ""),
    ("WaitingForHub", "no answer"),
    ("WaitingForHub", "503"),
    ("Checking", ""),
)


class Job:
    """A GRPOJob that begins with the checkpoints, and so by the plan, of another."""

    def __init__(self, name: str, chance: random.Random) -> None:
        on_cpus = chance.random() < 0.2
        self.plan = PLAN if on_cpus else gang(*chance.choice([(1, 4), (1, 8), (2, 4)]))
        placement: dict[str, Any] = {"accelerator": "CPU"}
        if not on_cpus:
            placement = {"accelerator": "GPU", "nodes": None}
        if chance.random() < 0.4:
            placement["queueName"] = "team"
        self.spec: dict[str, Any] = {
            "placement": placement, "resumeFrom": {"grpoJob": "first"},
            "preflight": chance.choice(["Auto", "Off", "Off"]),
        }  # fmt: skip
        self.name, self.generation, self.resource_version = name, 1, 1
        self.meta: dict[str, Any] = META[chance.choice([*META])]
        self.check = CHECKS[0]
        for edit in chance.sample([*EDITS], 2):
            self.edit(**EDITS[edit])

    def record(self) -> GRPOJobRecord:
        checked = condition("Checked", str(self.check[0] == "Passed"), self.check[0])
        checked |= {"message": self.check[1], "observedGeneration": self.generation}
        status = {
            "plan": self.plan.model_dump(mode="json", by_alias=True, exclude_none=True),
            "resumeFrom": SOURCE, "conditions": [checked],
        }  # fmt: skip
        return make_job(
            self.spec, status, name=self.name, uid=f"uid-{self.name}", generation=self.generation,
            creationTimestamp=at(-100), resourceVersion=str(self.resource_version), **self.meta,
        )  # fmt: skip

    def edit(self, **spec: Any) -> None:
        for field, value in spec.items():
            before = self.spec.get(field)
            if isinstance(value, dict) and isinstance(before, dict):
                self.spec[field] = before | value
            else:
                self.spec[field] = value
        self.generation += 1


class World:
    """Jobs that wait, and what their queue knows of the cluster."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.snapshot = NODES["one"]
        self.called: set[ObjectKey] = set()
        self.answers: dict[str, Decision] = {}
        self.records = Jobs(job.record() for job in jobs)
        self.queue = self.new_queue(self.tell)

    def new_queue(self, tell: Callable[..., None]) -> AdmissionQueue:
        return AdmissionQueue(
            self.records,
            lambda: self.snapshot,
            tell,
            limits=LIMITS,
            clock=ProcessClock(lambda: NOW, lambda: Observed(NOW)),
            first_seen_tracker=FirstSeenTracker(),
            pods=PODS,
        )

    def tell(self, keys: Iterable[ObjectKey], **_: bool) -> None:
        self.called |= {*keys}

    def change(self, **facts: Any) -> None:
        self.snapshot = replace(self.snapshot, **facts)
        self.queue.wake()

    def touch(self, job: Job) -> None:
        """The watch shows the job as it is now, after a write."""
        job.resource_version += 1
        record = job.record()
        self.records[:] = [record if old.key == record.key else old for old in self.records]
        self.called.add(record.key)

    async def ask(self, queue: AdmissionQueue, record: GRPOJobRecord) -> Decision | None:
        """What a reconcile asks."""
        queue.record_job(record.key, record)
        if record.is_suspended:
            return Decision(Action.SUSPEND)
        record = with_class(record, self.snapshot.job_classes)
        return await queue.answer(make_seen(record), Decision(Action.ADMIT))

    async def settle(self) -> None:
        """All that is called for happens; jobs that start have ended at once."""
        for _ in range(50):
            called, self.called = self.called, set()
            for key in called:
                record = self.records.get(key)
                answer = await self.ask(self.queue, record) if record else None
                if answer and record:
                    self.answers[key.name] = answer
                if answer and answer.action is Action.COMMIT:
                    self.records[:] = [old for old in self.records if old.key != key]
                    self.queue.record_job(key, None)
            if self.queue._is_due.is_set():
                await self.queue.run_cycle()
            self.queue._publisher.publish_one_message()
            if not (self.called or self.queue._is_due.is_set() or self.queue._publisher._pending):
                return
        raise AssertionError("no rest")

    async def check(self) -> None:
        """A new queue has no other answer, but to those that are asked about soon."""
        fresh = self.new_queue(lambda *_, **__: None)
        for record in self.records:
            await self.ask(fresh, record)
        await fresh.run_cycle()
        for record in self.records:
            answer, last = await self.ask(fresh, record), self.answers[record.name]
            assert answer is not None
            # Kueue's answer comes with an event of its own, and the plan stays whatever nodes there
            # are; but not without what the job names.
            if last.reason != "WaitingForKueue":
                assert parts(answer) == parts(last), record.name
            else:
                assert answer.reason not in BY_NAME, record.name


def parts(answer: Decision) -> tuple[Any, ...]:
    return answer.action, answer.reason, answer.message, answer.plan


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [("no team", "team", "RefusedByJobClass"), ("long notes", "notes", "NotSupported")],
)
async def test_a_change_of_the_metadata_calls_for_another_answer(
    before: str, after: str, reason: str
) -> None:
    job = Job("j0", random.Random(0))
    job.plan, job.meta = gang(1, 8), META[before]
    job.spec |= {"placement": {"accelerator": "GPU", "nodes": None}, "jobClassName": None}
    world = World([job])
    if reason == "RefusedByJobClass":
        job.edit(jobClassName="h100")
        world.change(**FACTS["class of labels"])
    world.change(nodes=NODES["full"].nodes, gpu_pods=NODES["full"].gpu_pods)
    world.touch(job)
    await world.settle()
    assert world.answers["j0"].reason == reason
    job.meta = META[after]
    world.touch(job)
    await world.settle()
    assert world.answers["j0"].reason == "WaitingForGPUs"


async def test_a_job_without_kueue_is_planned_once_however_often_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[str] = []

    def plan(*given: Any) -> Verdict:
        plans.append(given[1].name)
        return plan_without_queue(*given)

    monkeypatch.setattr(queue_module, "plan_without_queue", plan)
    job = Job("j0", random.Random(0))
    job.spec |= {"placement": {"accelerator": "GPU", "nodes": None, "queueName": "team"}}
    world = World([job])
    for changes, count in (({}, 1), ({"nodes": NODES["others"].nodes}, 2), ({"gpu_pods": ()}, 2)):
        world.change(**changes)
        for _ in range(9):
            seen = replace(make_seen(world.records[0]), kueue_problem="there is no Kueue")
            answer = await world.queue.answer(seen, Decision(Action.ADMIT))
            assert answer
            assert (answer.reason, bool(answer.plan)) == ("NoKueue", True)
        assert len(plans) == count


@pytest.mark.parametrize(
    ("spec", "fact", "reason"),
    [
        ({"jobClassName": "h100"}, "no class", "JobClassNotFound"),
        (EDITS["account"], "no account", "ServiceAccountNotFound"),
    ],
)
async def test_a_job_that_waits_for_kueue_stops_when_what_it_names_disappears(
    spec: dict[str, Any], fact: str, reason: str
) -> None:
    job = Job("j0", random.Random(0))
    job.spec |= {"placement": {"accelerator": "GPU", "nodes": None, "queueName": "team"}, **spec}
    world = World([job])
    world.change(**FACTS["class of many GPUs"])
    world.change(**FACTS["account"])
    world.touch(job)
    await world.settle()
    assert world.answers["j0"].reason == "WaitingForKueue"
    world.change(nodes=NODES["half"].nodes, gpu_pods=NODES["half"].gpu_pods)
    await world.settle()
    assert world.answers["j0"].reason == "WaitingForKueue"
    world.change(**FACTS[fact])
    await world.settle()
    assert world.answers["j0"].reason == reason


async def live(chance: random.Random) -> None:
    world = World([Job(f"j{number}", chance) for number in range(chance.randint(1, 3))])
    world.called |= {record.key for record in world.records}
    for _ in range(8):
        what = chance.choice(["facts", "facts", "facts", "nodes", "edit", "meta", "check"])
        job = chance.choice(world.jobs)
        if what == "facts":
            world.change(**FACTS[chance.choice([*FACTS])])
        elif what == "nodes":
            other = NODES[chance.choice([*NODES])]
            world.change(nodes=other.nodes, gpu_pods=other.gpu_pods)
        elif what == "edit":
            job.edit(**EDITS[chance.choice([*EDITS])])
        elif what == "meta":
            job.meta = job.meta | META[chance.choice([*META])]
        else:
            job.check = chance.choice(CHECKS)
        if what in ("edit", "meta", "check"):
            world.touch(job)
        await world.settle()
        await world.check()


@pytest.mark.seeded
def test_no_answer_outlives_its_reason(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(work: Callable[..., Any], *given: Any) -> Any:
        return work(*given)

    monkeypatch.setattr("asyncio.to_thread", at_once)
    for _ in range(cases(160, gate=16)):
        asyncio.run(live(random.Random(chance.getrandbits(64))))
