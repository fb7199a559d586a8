"""GPUs are never given twice: passes, commits, restarts and changes of the cluster in every order
that chance makes.

A small world stands in for the API server and the scheduler: commits land, are denied, conflict, or
lose their answer; pods are bound wherever they fit and end when they like; nodes come, go and are
cordoned; foreign pods come. Some of it happens while a pass is in its thread. At every commit the
gangs that lack pods must be placeable beside what is bound, if they were before: by brute force,
unless somebody else took or moved something between the verdict and the commit.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.admission.capacity import gpu_roles
from grpo_operator.admission.inventory import NodeFacts, PodFacts, node_facts
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.queue import AdmissionQueue
from grpo_operator.admission.scheduler import Cycle, CycleInput, schedule
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.pods.roles import Role
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.report.status import build_status, to_json
from tests.generated import cases
from tests.unit.operator_world import LIMITS, NOW, PODS, make_job, make_seen
from tests.unit.queue_world import ASKED, gang, job, packs
from tests.unit.test_operator_inventory import GFD, node
from tests.virtual_time import virtually

GPU = "nvidia.com/gpu"
STEPS = 120
ALONE = [(1, 1), (1, 2), (1, 3), (2, 2), (1, 4), (2, 4), (1, 8)]
SERVED = [(1, 2, 2, 1), (2, 2, 1, 4), (1, 4, 3, 1), (1, 1, 2, 2)]
GANGS = [gang(*one) for one in ALONE] + [gang(*one) for one in SERVED]
"""Of pods and GPUs of each, and of engines beside them and GPUs of each."""


def facts(name: str, gpus: int) -> NodeFacts:
    """A node with so many GPUs."""
    item = node({**GFD, "nvidia.com/gpu.count": str(gpus)}, {GPU: str(gpus)})
    item["metadata"] = {**item["metadata"], "name": name}
    return node_facts(item)


class World:
    """Jobs, nodes and bound pods, as the operator is told of them, and the queue that decides."""

    requeue_after: float | None = None

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.jobs: dict[ObjectKey, GRPOJobRecord] = {}
        self.unseen: dict[ObjectKey, GRPOJobRecord] = {}
        """Commits that landed and whose answers were lost."""
        self.nodes = [
            facts(f"node-{number}", chance.choice([4, 8])) for number in range(chance.randint(1, 4))
        ]
        self.pods: list[PodFacts] = []
        self.count = self.committed = 0
        self.judging = False
        self.calm = chance.random() < 0.7
        """Whether others take and move things only while no verdict waits for its commit."""
        self.disturbed = False
        """Whether they have done so since a verdict that is not committed yet."""
        self.queue = AdmissionQueue(
            self,
            self.take,
            self.tell,
            limits=LIMITS,
            clock=ProcessClock(lambda: NOW, lambda: Observed(NOW)),
            first_seen_tracker=FirstSeenTracker(),
            pods=PODS,
        )

    def __iter__(self) -> Iterator[GRPOJobRecord]:
        return iter(self.jobs.values())

    def get(self, key: ObjectKey) -> GRPOJobRecord | None:
        return self.jobs.get(key)

    def take(self) -> Snapshot:
        return Snapshot(nodes=tuple(self.nodes), gpu_pods=tuple(self.pods))

    def tell(self, keys: Iterable[ObjectKey], *, slow: bool = False) -> None:
        """A job is looked at when chance wants it."""

    # what is true

    @property
    def truth(self) -> list[GRPOJobRecord]:
        return list((self.jobs | self.unseen).values())

    @property
    def promised(self) -> bool:
        """Whether there are verdicts that are not committed yet."""
        return self.judging or bool(self.queue._assumptions.claims())

    def free(self) -> dict[str, int]:
        taken: dict[str, int] = {}
        for pod in self.pods:
            taken[pod.node] = taken.get(pod.node, 0) + int(pod.takes[GPU])
        return {
            one.name: int(one.offers[GPU]) - taken.get(one.name, 0)
            for one in self.nodes
            if one.usable
        }

    def own(self, one: GRPOJobRecord) -> list[PodFacts]:
        return [
            pod
            for pod in self.pods
            if (pod.grpojob_uid, pod.attempt) == (one.uid, str(one.status.attempt))
        ]

    def lacking(self) -> list[tuple[GRPOJobRecord, Role]]:
        """Each pod that an admitted gang still lacks, by its role, the widest first."""
        active = [(one, one.status.plan) for one in self.truth if one.is_active]
        pods = [
            (one, role)
            for one, plan in active
            if plan
            for role in gpu_roles(one, plan)
            for _ in range(
                role.plan.nodes - sum(pod.engine == role.is_engines for pod in self.own(one))
            )
        ]
        return sorted(pods, key=lambda pair: -pair[1].plan.gpus_per_node)

    def avoided(self, one: GRPOJobRecord, role: Role) -> set[str]:
        """Nodes that a pod of the role can't go to, for its gang's ranks keep apart."""
        return set() if role.is_engines else {pod.node for pod in self.own(one) if not pod.engine}

    def placeable(self) -> bool:
        """Whether all that admitted gangs lack can be bound once the pods of their earlier attempts
        have ended."""
        live = {one.uid: str(one.status.attempt) for one in self.truth if one.is_active}
        room = self.free()
        for pod in self.pods:
            if pod.node in room and live.get(pod.grpojob_uid, pod.attempt) != pod.attempt:
                room[pod.node] += int(pod.takes[GPU])
        avoid = {
            one.uid: {pod.node for pod in self.own(one) if not pod.engine} for one in self.truth
        }
        lacking = [
            ("" if role.is_engines else one.uid, role.plan.gpus_per_node)
            for one, role in self.lacking()
        ]
        return packs(lacking, room, avoid)

    # what happens

    def store(self, one: GRPOJobRecord, **changes: Any) -> None:
        self.jobs[one.key] = replace(one, version=one.version + 1, **changes)
        self.queue.record_job(one.key, self.jobs[one.key])

    def gone(self, key: ObjectKey) -> None:
        self.jobs.pop(key)
        self.unseen.pop(key, None)
        self.queue.record_job(key, None)

    def disturb(self) -> None:
        self.disturbed |= self.promised
        self.queue.wake()

    def comes(self) -> None:
        self.count += 1
        one = job(f"j{self.count}", self.chance.choice(GANGS), age=1000 - self.count)
        self.store(replace(one, key=ObjectKey(self.chance.choice(["team-a", "team-b"]), one.name)))

    def leaves(self) -> None:
        if self.jobs:
            self.gone(self.chance.choice(sorted(self.jobs)))

    def is_edited(self) -> None:
        waiting = [
            one
            for one in self.jobs.values()
            if one.is_waiting_for_admission and one.key not in self.unseen
        ]
        if waiting:
            one = self.chance.choice(waiting)
            self.store(one, generation=one.generation + 1)

    def is_bound(self) -> None:
        """The scheduler binds a pod wherever it fits."""
        lacking = self.lacking()
        for one, role in self.chance.sample(lacking, len(lacking)):
            avoid, width = self.avoided(one, role), role.plan.gpus_per_node
            rooms = [
                name for name, free in self.free().items() if free >= width and name not in avoid
            ]
            if rooms:
                self.bind(self.chance.choice(rooms), width, one, engine=role.is_engines)
                return

    def bind(
        self, where: str, gpus: int, by: GRPOJobRecord | None = None, *, engine: bool = False
    ) -> None:
        self.count += 1
        name, uid, attempt = (by.name, by.uid, str(by.status.attempt)) if by else ("", "", "")
        pod = PodFacts(
            namespace=by.key.namespace if by else "other",
            name=f"p{self.count}",
            node=where,
            takes={GPU: float(gpus)},
            grpojob=name,
            grpojob_uid=uid,
            attempt=attempt,
            engine=engine,
        )
        self.pods.append(pod)
        self.disturb()

    def foreign(self) -> None:
        rooms = [name for name, free in self.free().items() if free > 0]
        if rooms:
            self.bind(self.chance.choice(rooms), 1)

    def pod_ends(self) -> None:
        """Of a stranger, of an earlier attempt, or of a job that is gone."""
        live = {(one.uid, str(one.status.attempt)) for one in self.truth if one.is_active}
        over = [pod for pod in self.pods if (pod.grpojob_uid, pod.attempt) not in live]
        if over:
            self.pods.remove(self.chance.choice(over))
            self.queue.wake()

    def succeeds(self) -> None:
        active = [one for one in self.jobs.values() if one.is_active]
        if active:
            one = self.chance.choice(active)
            self.pods = [pod for pod in self.pods if pod.grpojob_uid != one.uid]
            self.gone(one.key)

    def node_is_cordoned_or_not(self) -> None:
        one = self.chance.choice(self.nodes)
        self.nodes[self.nodes.index(one)] = replace(one, usable=not one.usable)
        self.disturb()

    def node_comes_or_goes(self) -> None:
        if len(self.nodes) > 1 and self.chance.random() < 0.5:
            lost = self.nodes.pop(self.chance.randrange(len(self.nodes)))
            self.pods = [pod for pod in self.pods if pod.node != lost.name]
        elif len(self.nodes) < 4:
            self.count += 1
            self.nodes.append(facts(f"node-{self.count}", self.chance.choice([4, 8])))
        self.disturb()

    def is_heard(self) -> None:
        """The event of a commit whose answer was lost."""
        if self.unseen:
            key = self.chance.choice(sorted(self.unseen))
            self.store(self.jobs[key], typed=self.unseen.pop(key).typed)

    async def is_looked_at(self, asking: list[GRPOJobRecord]) -> None:
        """A reconcile of a job that asks for an attempt."""
        one = self.chance.choice(asking)
        if one.key in self.unseen:
            self.is_heard()  # the write conflicts, and the object is read again
            return
        answer = await self.queue.answer(make_seen(one), ASKED)
        fate = self.chance.choice(["lands", "lands", "lands", "denied", "conflict", "lost"])
        if answer is None or answer.action is Action.REJECT or fate == "conflict":
            return
        if answer.action is Action.COMMIT and fate == "denied":
            self.queue.release_denied(one)
            return
        status = make_job(
            {}, to_json(build_status(make_seen(one), answer)), generation=one.generation
        ).status
        typed = replace(one.content, status=status)
        self.write(
            replace(one, typed=typed), lost=answer.action is Action.COMMIT and fate == "lost"
        )
        self.committed += answer.action is Action.COMMIT

    def write(self, written: GRPOJobRecord, lost: bool) -> None:
        sound = self.placeable()
        if lost:
            self.unseen[written.key] = written
        else:
            self.store(written)
        assert self.placeable() or not sound or self.disturbed, (
            f"{written.key} was given what is others'"
        )
        self.disturbed &= self.promised

    async def something_happens(self) -> None:
        others = (
            self.is_bound,
            self.is_bound,
            self.foreign,
            self.node_comes_or_goes,
            self.node_is_cordoned_or_not,
        )
        jobs = (
            self.comes,
            self.comes,
            self.pod_ends,
            self.leaves,
            self.is_edited,
            self.succeeds,
            self.is_heard,
        )
        things = (*others, *jobs)
        number = self.chance.randrange(len(things) + 8)
        if number < len(things):
            if number >= len(others) or not (self.calm and self.promised):
                things[number]()
            return
        restarts = number < len(things) + 3
        if asking := [
            one
            for one in self.jobs.values()
            if (one.is_active if restarts else one.is_waiting_for_admission)
        ]:
            await self.is_looked_at(asking)


async def live(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world's life."""

    async def in_thread(work: Any, asked: CycleInput, plans: Plans) -> Cycle:
        """The pass sees the world as it was; things happen before its verdicts come back."""
        found, world.judging = schedule(asked, plans), True
        for _ in range(world.chance.randrange(4)):
            await world.something_happens()
        world.judging = False
        return found

    monkeypatch.setattr("asyncio.to_thread", in_thread)
    for _ in range(STEPS):
        if world.chance.random() < 0.4:
            await world.queue.run_cycle()
        else:
            await world.something_happens()


@pytest.mark.seeded
def test_gpus_are_never_given_twice(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [World(random.Random(chance.getrandbits(64))) for _ in range(cases(32, gate=4))]
    for world in worlds:
        virtually(live(world, monkeypatch))
    assert sum(world.committed for world in worlds) > 4 * len(worlds)


def test_the_check_knows_what_can_be_placed() -> None:
    assert packs([("a", 4), ("a", 4)], {"x": 4, "y": 4}, {})
    assert not packs([("a", 4), ("a", 4)], {"x": 8, "y": 3}, {})
    assert not packs([("a", 4)], {"x": 8}, {"a": {"x"}})
