"""The order of the queue: priority, share, age; and that nobody who can be planned waits for
ever."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.objects.resources import ObjectKey
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.queue_order import MOST_PASSED_OVER, sort_queue
from grpo_operator.admission.scheduler import CycleInput, ordinal, schedule
from grpo_operator.records.records import GRPOJobRecord
from tests.generated import cases
from tests.unit.operator_world import LIMITS, make_job
from tests.unit.queue_world import cluster, gang, gpu_pod, job, judged, own_pod


def of(
    namespace: str, name: str, gpus: int = 1, age: float = 100, **placement: Any
) -> GRPOJobRecord:
    return replace(job(name, gang(1, gpus), age=age, **placement), key=ObjectKey(namespace, name))


def turns(
    jobs: Iterable[GRPOJobRecord], held: dict[str, int], passed: dict[str, int] | None = None
) -> list[str]:
    """The order, when each job takes one GPU at its turn."""
    found = []
    for one in sort_queue(jobs, {"high": 10, "": 1}, held, passed or {}):
        found.append(one.name)
        held[one.key.namespace] = held.get(one.key.namespace, 0) + 1
    return found


def test_namespaces_take_turns_and_within_one_the_oldest_goes_first() -> None:
    jobs = [
        of("a", "a3", age=1),
        of("a", "a1", age=30),
        of("a", "a2", age=20),
        of("b", "b1", age=10),
        of("b", "b2", age=5),
    ]
    assert turns(jobs, {}) == ["a1", "b1", "a2", "b2", "a3"]
    assert turns(jobs, {"a": 2}) == ["b1", "b2", "a1", "a2", "a3"]


def test_priority_comes_before_shares() -> None:
    jobs = [of("b", "low", age=90), of("a", "urgent", age=1, priorityClassName="high")]
    assert turns(jobs, {"a": 64}) == ["urgent", "low"]


def test_who_was_passed_over_too_often_is_next_in_its_priority() -> None:
    jobs = [
        of("a", "late", age=50),
        of("a", "later", age=40),
        of("b", "b1"),
        of("c", "urgent", priorityClassName="high"),
    ]
    passed = {
        "uid-late": MOST_PASSED_OVER,
        "uid-later": MOST_PASSED_OVER + 3,
        "uid-b1": MOST_PASSED_OVER - 1,
    }
    assert turns(jobs, {"a": 64}, passed) == ["urgent", "late", "later", "b1"]


def test_only_younger_jobs_of_the_same_priority_that_start_first_are_counted() -> None:
    big = of("a", "big", gpus=8, age=50)
    small = [
        of("b", "small", age=10),
        of("b", "older", age=60),
        of("b", "up", age=5, priorityClassName="high"),
    ]
    busy = cluster(8, 4, priorities={"high": 10}, pods=[gpu_pod("p", 4)])
    found = judged([big, *small], busy)
    assert [found[one.uid].admitted for one in (big, *small)] == [False, True, True, True]
    assert found["uid-big"].passed_over == 1
    assert judged([big, *small], busy, passed_over={"uid-big": 5})["uid-big"].passed_over == 6


def test_who_can_not_be_planned_is_not_passed_over() -> None:
    never = make_job(
        {"placement": {"accelerator": "GPU", "gpuProduct": "None"}}, name="never", uid="uid-never"
    )
    found = judged([never, of("b", "small", age=10)], cluster(8))
    assert (
        found["uid-never"].plan,
        found["uid-never"].passed_over,
        found["uid-small"].admitted,
    ) == (None, 0, True)


def test_a_run_whose_nodes_are_gone_delays_nobody_until_they_are_back() -> None:
    run, small = job("run", gang(2, 8), age=50), job("small", gang(1, 4), age=10)
    found = judged([run, small], cluster(8))
    assert (found[run.uid].admitted, found[small.uid].admitted) == (False, True)
    assert (found[run.uid].reason, found[run.uid].passed_over) == ("WaitingForGPUs", 0)
    assert found[run.uid].message == (
        "needs 16 × NVIDIA-H100-80GB-HBM3 on 2 nodes; 8 free; too few nodes could hold it if they "
        "were empty: others go first"
    )
    found = judged([run, small], cluster(8, 8, pods=[gpu_pod("p", 8)]))
    assert (found[run.uid].admitted, found[small.uid].admitted) == (False, False)


def test_a_job_reads_its_place_and_who_is_before_it() -> None:
    namespaces = ("team-a", "team-a", "b")
    jobs = [of(name, f"j{number}", gpus=8, age=-number) for number, name in enumerate(namespaces)]
    found = judged(jobs, cluster(8, pods=[gpu_pod("p", 4)]))
    assert [found[one.uid].message.partition("; ")[2] for one in jobs] == [
        "4 free, 4 held by team-a/p; 1st of 3 in the queue",
        "4 free, 4 held by team-a/p; 3rd of 3 in the queue, behind another namespace's job",
        "4 free, 4 held in other namespaces; 2nd of 3 in the queue, behind another namespace's job",
    ]


@settings(max_examples=cases(100))
@given(st.randoms(use_true_random=False))
def test_no_job_reads_a_name_of_another_namespace(chance: random.Random) -> None:
    namespaces = ("red", "green", "blue")
    jobs = [
        of(namespace, f"{namespace}-{index}", gpus=chance.choice((1, 8)), age=chance.random())
        for namespace in namespaces
        for index in range(chance.randint(0, 3))
    ]
    pods = [gpu_pod(f"{namespace}-pod", 2) for namespace in namespaces]
    for pod, namespace in zip(pods, namespaces, strict=True):
        pod["metadata"]["namespace"] = namespace
    verdicts = judged(jobs, cluster(8, chance.choice((2, 8)), pods=pods))
    for reader in jobs:
        message = verdicts[reader.uid].message
        foreign_names = {*namespaces} - {reader.key.namespace}
        assert not [name for name in foreign_names if name in message]


def test_places_are_spelled() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 11, 22, 113)] == [
        "1st",
        "2nd",
        "3rd",
        "11th",
        "22nd",
        "113th",
    ]


def test_newcomers_of_a_namespace_with_a_smaller_share_pass_a_job_only_so_often() -> None:
    holds, waits = of("a", "holds", gpus=4, active=True), of("a", "waits", gpus=4, age=50)
    there, passed, rounds = cluster(8, pods=[own_pod(holds, 4, "node-0")]), 0, 0
    while True:
        newcomer = of("b", f"b{rounds}", gpus=4, age=40 - rounds)
        found = judged([holds, waits, newcomer], there, passed_over={waits.uid: passed})
        assert found[waits.uid].admitted is not found[newcomer.uid].admitted
        if found[waits.uid].admitted:
            break
        rounds, passed = rounds + 1, found[waits.uid].passed_over
    assert rounds == MOST_PASSED_OVER


LONGEST = 6
"""Rounds that a gang of the simulation runs at most."""


class Cluster:
    """A stream of gangs of several namespaces on a few nodes; each runs for some rounds."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.sizes = [chance.choice([4, 8]) for _ in range(chance.randint(1, 3))]
        self.running: list[tuple[int, GRPOJobRecord, dict[int, int]]] = []
        self.waiting: dict[str, GRPOJobRecord] = {}
        self.came: dict[str, tuple[int, int]] = {}
        """Round in which a job came, and how many waited before it."""
        self.passed: dict[str, int] = {}
        self.longest = self.number = 0

    def free(self) -> list[int]:
        return [
            size - sum(places.get(at, 0) for _, _, places in self.running)
            for at, size in enumerate(self.sizes)
        ]

    def round(self, now: int) -> None:
        """Some end, some come, and one pass is made."""
        self.running = [one for one in self.running if one[0] > now]
        for _ in range(self.chance.choice([0, 1, 1, 2, 3])):
            self.number += 1
            width = self.chance.choice([1, 1, 1, 2, max(self.sizes)])
            one = of(
                self.chance.choice("aaab"), f"j{self.number:05}", width, age=100_000 - self.number
            )
            self.came[one.uid], self.waiting[one.uid] = (now, len(self.waiting)), one
        pods = [
            own_pod(one, gpus, f"node-{at}")
            for _, one, places in self.running
            for at, gpus in places.items()
        ]
        asked = CycleInput(
            jobs=tuple(self.waiting.values()),
            snapshot=cluster(*self.sizes, pods=pods),
            limits=LIMITS,
            passed_over=self.passed,
            default_image="trainer:1",
        )
        found = schedule(asked, Plans()).verdicts
        self.passed = {uid: verdict.passed_over for uid, verdict in found.items()}
        for uid in [uid for uid, verdict in found.items() if verdict.admitted]:
            self.start(self.waiting.pop(uid), now)

    def start(self, one: GRPOJobRecord, now: int) -> None:
        plan = one.status.plan
        assert plan is not None
        at = next(at for at, free in enumerate(self.free()) if free >= plan.gpus)
        self.running.append((now + self.chance.randint(1, LONGEST), one, {at: plan.gpus}))
        since, before = self.came[one.uid]
        # docs/explanation/faults.md states the bound: of those that wait already, of those that may
        # pass, and of its own GPUs
        bound = LONGEST * (MOST_PASSED_OVER + before + (before + 1) * (max(self.sizes) + 1))
        self.longest = max(self.longest, now - since)
        assert now - since <= bound, f"{one.name} waited for {now - since} rounds"


@pytest.mark.seeded
def test_every_job_that_can_be_planned_starts_within_the_bound(chance: random.Random) -> None:
    for _ in range(cases(4)):
        world = Cluster(random.Random(chance.getrandbits(64)))
        for now in range(60):
            world.round(now)
        # nobody comes any more: all that wait start, whatever they are
        world.chance.choice = lambda given: given[0]  # type: ignore[method-assign,assignment]
        for now in range(60, 60 + LONGEST * (len(world.waiting) + 1)):
            world.round(now)
        assert not world.waiting
