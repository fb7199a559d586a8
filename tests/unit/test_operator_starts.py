"""What an attempt lacks is created, and what follows where the API server denies it or another has
its name."""

from typing import Any

import pytest

from grpo_kube.objects.errors import AlreadyExists, Denied, NotFound
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.observation import Observation, observe
from grpo_operator.kueue.pod_sets import Contradiction
from grpo_operator.loop.attempt_starter import AttemptStarter
from grpo_operator.loop.caches import Caches
from grpo_operator.records.names import ENGINE_SERVICE
from grpo_operator.records.reasons import Reason
from tests.unit.kueue_world import admitted, make_queued, make_workload
from tests.unit.operator_world import (
    NOW,
    PODS,
    SERVED_GPU_PLAN,
    active_status,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
)

GPU_JOB = {"placement": {"accelerator": "GPU", "nodes": 2}}
GANG = (make_child(), make_pod(0), make_pod(1))


class World:
    """An API server that creates, denies, or has the name already; and the Services that are asked
    for."""

    def __init__(
        self,
        *,
        denies: bool = False,
        open_to_all: bool = False,
        there: dict[str, Any] | None = None,
        goes: bool = False,
        unbindable: tuple[Reason, str] | None = None,
    ) -> None:
        """`open_to_all`: no NetworkPolicy may be made. `there`: the Job exists, with these
        differences of its metadata from what is wanted. `goes`: it is deleted before anybody reads
        it. `unbindable`: why a claim never gets a volume."""
        self.denies = denies
        self.open_to_all = open_to_all
        self.there = there
        self.goes = goes
        self.unbindable = unbindable
        self.created: list[dict[str, Any]] = []
        self.services: list[str] = []

    async def create(self, _: Any, __: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.denies:
            raise Denied("exceeded quota: gpus", 403)
        metadata = {**body["metadata"], "uid": "new", "resourceVersion": "20", **(self.there or {})}
        self.created.append(body | {"metadata": metadata, "status": {}})
        if self.there is not None:
            raise AlreadyExists("it is there", 409)
        return self.created[-1]

    async def get(self, *_: Any) -> dict[str, Any]:
        if self.goes:
            raise NotFound("jobs run-1 not found", 404)
        return self.created[-1]

    async def place_job(self, _: Any, body: dict[str, Any]) -> dict[str, Any]:
        if not self.denies:
            raise Contradiction("nodeSelector and ResourceFlavor a disagree on zone")
        return body

    async def ensure_service(self, _: str, name: str = "grpo-rendezvous") -> None:
        self.services.append(name)

    async def ensure_policy(self, _: str) -> None:
        if self.open_to_all:
            raise Denied("networkpolicies is forbidden", 403)

    async def create_claim(self, _: Any) -> None:
        """The job has none."""

    async def unbound_claims(self, *_: Any) -> tuple[set[str], tuple[Reason, str] | None]:
        return set(), self.unbindable

    @property
    def starts(self) -> AttemptStarter:
        return self.noting(FirstSeenTracker())

    def noting(self, first_seen_tracker: FirstSeenTracker) -> AttemptStarter:
        """What starts attempts, and notes the Jobs that it made."""
        found: Any = self
        return AttemptStarter(
            found, Caches(), found, found, first_seen_tracker=first_seen_tracker, pods=PODS
        )

    async def start(self, seen: Observation) -> Decision | None:
        return await self.starts.start(seen)


def seen_of(*things: Any, ran: bool = False) -> Observation:
    return make_seen(make_job(GPU_JOB, active_status(plan=SERVED_GPU_PLAN, running=ran)), *things)


async def test_the_gang_is_created_first_and_its_engines_then() -> None:
    world = World()
    assert await world.start(seen_of()) is None
    assert await world.start(seen_of(*GANG)) is None
    assert [job["metadata"]["name"] for job in world.created] == ["run-1", "run-1-engine"]
    assert ENGINE_SERVICE in world.services


async def test_a_job_that_is_deleted_before_its_event_came_counts_as_deleted() -> None:
    first_seen_tracker, job = (
        FirstSeenTracker(),
        make_job(GPU_JOB, active_status(plan=SERVED_GPU_PLAN, jobUid=None)),
    )
    seen = observe(job, (), (), now=NOW, at=Observed(NOW), first_seen_tracker=first_seen_tracker)
    assert judged(seen).action is Action.START
    assert await World().noting(first_seen_tracker).start(seen) is None
    seen = observe(
        job, (), (), now=NOW + 1, at=Observed(NOW + 1), first_seen_tracker=first_seen_tracker
    )
    assert (judged(seen).action, judged(seen).reason) == (Action.ADMIT, "Preempted")


@pytest.mark.parametrize(("ran", "action"), [(False, Action.RELEASE), (True, Action.WAIT)])
async def test_engines_that_are_denied_end_no_gang_that_trains(ran: bool, action: Action) -> None:
    answer = await World(denies=True).start(seen_of(*GANG, ran=ran))
    assert answer
    assert answer.action is action
    assert "exceeded quota" in answer.message


@pytest.mark.parametrize(
    ("metadata", "ours"),
    [
        ({}, True),
        ({"ownerReferences": []}, False),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, False),
    ],
)
async def test_a_job_of_the_engines_name_is_taken_only_if_it_is_this_attempts(
    metadata: dict[str, Any], ours: bool
) -> None:
    answer = await World(there=metadata).start(seen_of(*GANG))
    if ours:
        assert answer is None
    else:
        assert answer
        assert (answer.action, answer.reason) == (Action.WAIT, "NameTaken")


async def test_a_name_that_becomes_free_meanwhile_is_tried_again() -> None:
    answer = await World(there={}, goes=True).start(seen_of())
    assert answer
    assert (answer.action, answer.reason) == (Action.WAIT, "NameTaken")


async def test_pods_that_no_policy_may_protect_are_not_made_and_those_that_run_go_on() -> None:
    world = World(open_to_all=True)
    answer = await world.start(seen_of())
    assert answer
    assert (answer.action, world.created) == (Action.RELEASE, [])
    assert "networkpolicies is forbidden" in answer.message
    assert await world.starts.repair_shared_objects(seen_of(*GANG, ran=True)) is None
    assert ENGINE_SERVICE in world.services


@pytest.mark.parametrize("attempt", [1, 2])
async def test_a_claim_that_never_gets_a_volume_holds_no_gpus(attempt: int) -> None:
    message = "PersistentVolumeClaim data is ReadWriteMany"
    world = World(unbindable=(Reason.STORAGE_NOT_SHARED, message))
    status = active_status(plan=SERVED_GPU_PLAN, running=False, attempt=attempt)
    answer = await world.start(make_seen(make_job(GPU_JOB, status)))
    assert answer
    assert (answer.action, answer.reason) == (Action.RELEASE, "PodsNotCreated")
    assert answer.message == message
    assert world.created == []


@pytest.mark.parametrize("denies", [True, False])
async def test_an_attempt_that_is_denied_or_has_no_place_holds_no_quota(denies: bool) -> None:
    workload = make_workload(admitted())
    seen = make_queued(workload, status=active_status(running=False, jobUid=None))
    answer = await World(denies=denies).start(seen)
    assert answer
    assert (answer.action, answer.reason) == (Action.RELEASE, "PodsNotCreated")
    assert ("exceeded quota" if denies else "disagree on zone") in answer.message
