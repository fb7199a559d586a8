"""Whatever state a leader finds a GRPOJob and its Workload in, both come to a rest, and pods have
quota as long as they live."""

import asyncio
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kube.objects.errors import ClusterError, Unavailable
from grpo_kube.objects.resources import Resource
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.kueue.workload_steps import gate_by_workload
from tests.generated import cases
from tests.integration import kueue_writes
from tests.unit import leader_world, test_operator_kueue_writes
from tests.unit.kueue_world import ASSIGNED, QUEUED, admitted, evicted, make_item
from tests.unit.kueue_world import workload_condition as said
from tests.unit.operator_world import PLAN, PODS, active_status
from tests.unit.test_operator_leader_states import PHASES

Item = dict[str, Any]
PAUSED = {**make_item()["metadata"]["annotations"], "grpo.dev/paused": "true"}
WORKLOADS: dict[str, Item] = {
    "pending": make_item(),
    "reserved": make_item({"admission": ASSIGNED, "conditions": [said("QuotaReserved")]}),
    "admitted": make_item(admitted()),
    "preempted": make_item(evicted()),
    "deactivated": make_item(evicted("Deactivated"), spec={"active": False}),
    "paused": make_item(spec={"active": False}, annotations=PAUSED),
    "finished": make_item(admitted(said("Finished"))),
    "other counts": make_item(admitted(), plan=PLAN.model_copy(update={"nodes": 1})),
}
CHANGES: dict[str, Item] = {
    "suspended": {"suspend": True},
    "resumed": {"suspend": False},
    "unreadable": {"training": {"beta": "much"}},
    "other queue": {"placement": {**QUEUED["placement"], "queueName": "other"}},
}


class Server(test_operator_kueue_writes.World):
    """An API server that may lose the answer to a write."""

    made = loses = 0

    async def create(self, resource: Resource, namespace: str, body: Item) -> Item:
        item = await super().create(resource, namespace, deepcopy(body))
        self.made += 1
        item["metadata"] |= {"uid": f"made-{self.made}", "generation": 1}
        return self.answer(item)

    async def patch(self, *request: Any) -> Item:
        return self.answer(await super().patch(*request))

    def answer(self, item: Item) -> Item:
        self.loses -= 1
        if self.loses == 0:
            raise Unavailable("the answer is lost")
        return item


class World(leader_world.World):
    """A GRPOJob's world with Kueue's manager in it."""

    server: Server
    state: "State"
    rounds = 0

    def look(self) -> Observation:
        return self.server.workloads.look(super().look())

    def admit(self, seen: Observation, decision: Decision) -> Decision:
        return gate_by_workload(seen, replace(decision, action=Action.COMMIT, plan=PLAN), PODS)

    def reconcile(self) -> Decision:
        before, held = repr(self.server.objects), self.holds()
        decision = super().reconcile()
        with suppress(ClusterError):
            asyncio.run(self.server.workloads.step(self.look(), decision))
        assert self.holds() or not (held and self.live()), "quota goes back under live pods"
        self.manage()
        if repr(self.server.objects) != before:
            self.still = -1
        return decision

    def manage(self) -> None:
        """The manager's next write, what a user does meanwhile, and the watch."""
        self.rounds += 1
        if self.rounds == 3:
            self.spec |= CHANGES.get(self.state.change, {})
            if self.state.change == "deleted":
                self.server.objects.clear()
        cache, objects = self.server.caches.workloads, self.server.objects
        for path, stored in objects.items():
            item = deepcopy(stored)
            write = kueue_writes.what_follows(item) or self.reserve
            if not kueue_writes.is_true(item, "Finished"):
                write(item)
            if item != stored:
                item["metadata"]["resourceVersion"] += "0"
            objects[path] = item
            cache.put(item)
        for record in list(cache):
            if record.uid not in [item["metadata"]["uid"] for item in objects.values()]:
                cache.discard(record.key, record.uid)

    def reserve(self, item: Item) -> None:
        if self.state.has_quota and kueue_writes.waits(item):
            kueue_writes.reserve(item, "all", "default")

    def holds(self) -> bool:
        return any(
            "admission" in item.get("status", {}) and not kueue_writes.is_true(item, "Finished")
            for item in self.server.objects.values()
        )

    def live(self) -> bool:
        return any(pod.state == "live" and pod.made for pod in self.pods)


class State(NamedTuple):
    """What a new leader finds, and what changes later."""

    phase: str
    job: str
    pods: str
    workload: str
    change: str
    has_quota: bool
    loses: int

    def world(self) -> World:
        status = active_status(2, jobUid="job-2", conditions=PHASES[self.phase])
        world = World({**QUEUED, "suspend": self.phase == "suspended"}, {}, status, PLAN, None)
        world.put_job(self.job, "job-2")
        world.put_pod(self.pods, 0, "job-2")
        world.put_pod(self.pods, 1, "job-2")
        found = WORKLOADS.get(self.workload)
        world.server = Server(*[deepcopy(found)] if found else [])
        world.server.loses, world.state = self.loses, self
        return world


DOMAIN: tuple[tuple[Any, ...], ...] = (
    tuple(PHASES), ("none", "ours", "Failed"), ("none", "live", "bad", "orphan", "deleting"),
    ("none", *WORKLOADS), ("", "deleted", *CHANGES), (True, True, False), (0, 1, 2),
)  # fmt: skip


@settings(max_examples=cases(300))
@given(st.builds(State, *map(st.sampled_from, DOMAIN)))
def test_any_state_comes_to_a_rest_where_quota_is_held_by_who_runs_and_by_nobody_else(
    state: State,
) -> None:
    world = state.world()
    world.rest(60)
    job = world.look().job
    assert world.holds() == (world.live() or job.is_active)
    # What somebody else has deactivated is theirs to activate.
    is_free = state.has_quota and state.workload != "deactivated"
    if job.spec and is_free and not job.is_suspended:
        assert job.is_active or job.is_finished, "it could run"
