"""Who may start on which GPUs: reservations, the order of the queue, and what those who wait are told.

The jobs here have a plan from an earlier attempt (kept_plan), so that the queue is tested without the planner's choice;
tests/integration/test_operator_gpus.py has both.
"""

from typing import Any

import pytest

from grpo_api.plan import ExecutionPlan
from grpo_operator.admission.capacity import Capacity, fits
from grpo_operator.admission.inventory import node_facts, pod_facts
from grpo_operator.admission.queue import DEPTH, AdmissionQueue, Pass, judge, kept_plan
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decisions import Action, Decision
from grpo_operator.records import GRPOJobRecord
from tests.unit.operator_world import GPU_PLAN, LIMITS, NOW, active_status, at, condition, make_job, make_seen
from tests.unit.test_operator_inventory import GFD, node, pod

GPUS = {"placement": {"accelerator": "GPU"}}


def gang(nodes: int, per_node: int) -> ExecutionPlan:
    return GPU_PLAN.model_copy(update={"gpus": nodes * per_node, "nodes": nodes, "gpus_per_node": per_node})


def job(name: str, plan: ExecutionPlan, age: float = 100, active: bool = False, **placement: Any) -> GRPOJobRecord:
    """A job that has run before, and runs again (active) or waits."""
    status = active_status(plan=plan, progress={"step": 5, "totalSteps": 9})
    if not active:
        status["conditions"] = [condition("Admitted", "False", "WaitingForGPUs")]
    spec = {"placement": {"accelerator": "GPU", "nodes": None, **placement}}
    record = make_job(spec, status, name=name, uid=f"uid-{name}", creationTimestamp=at(-age))
    assert record.spec is not None
    return record


def cluster(*sizes: int, pods: Any = (), **more: Any) -> Snapshot:
    """Nodes node-0, node-1, … with that many GPUs, and pods on them."""
    nodes = []
    for number, size in enumerate(sizes):
        item = node({**GFD, "nvidia.com/gpu.count": str(size)}, {"nvidia.com/gpu": str(size)})
        item["metadata"] = {**item["metadata"], "name": f"node-{number}"}
        nodes.append(node_facts(item))
    return Snapshot(nodes=tuple(nodes), gpu_pods=tuple(one for one in map(pod_facts, pods) if one), **more)


def gpu_pod(name: str, gpus: int, on: str = "node-0", **labels: str) -> Any:
    return pod(name, {"nvidia.com/gpu": str(gpus)}, node=on, labels=labels)


def own_pod(of: GRPOJobRecord, gpus: int, on: str, attempt: int = 1) -> Any:
    labels = {"grpo.dev/job-name": of.name, "grpo.dev/job-uid": of.uid, "grpo.dev/attempt": str(attempt)}
    return gpu_pod(f"{of.name}-{attempt}-0", gpus, on, **labels)


def passed(jobs: list[GRPOJobRecord], snapshot: Snapshot) -> dict[str, tuple[bool, str]]:
    """Admitted, and the reason, by name of the waiting job."""
    found: Pass = judge(jobs, snapshot, NOW, LIMITS)
    return {one.name: (found[one.uid].admitted, found[one.uid].reason) for one in jobs if one.uid in found}


def test_a_gang_starts_when_all_of_it_fits() -> None:
    waiting = job("a", gang(2, 4))
    assert passed([waiting], cluster(4, 4)) == {"a": (True, "Admitted")}
    assert passed([waiting], cluster(4, 3)) == {"a": (False, "WaitingForGPUs")}


def test_a_waiting_job_is_told_what_it_needs_and_who_has_it() -> None:
    waiting = job("a", gang(2, 4))
    holder = {"grpo.dev/job-name": "run-7", "grpo.dev/job-uid": "other"}
    found = judge([waiting], cluster(4, 4, pods=[gpu_pod("run-7-1-0", 2, **holder)]), NOW, LIMITS)
    message = found["uid-a"].message
    assert message == "needs 8 × NVIDIA-H100-80GB-HBM3 on 2 nodes; 6 free, 2 held by team-a/run-7"


def test_only_the_biggest_holders_are_named() -> None:
    pods = [gpu_pod(f"p{number}", 1) for number in range(6)]
    found = judge([job("a", gang(1, 8))], cluster(8, pods=pods), NOW, LIMITS)
    assert found["uid-a"].message.endswith(
        "on 1 node; 2 free, 1 held by team-a/p0, 1 held by team-a/p1, 1 held by team-a/p2, 3 by 3 others"
    )


def test_what_an_admitted_gang_still_lacks_is_reserved() -> None:
    admitted = job("first", gang(2, 4), active=True)
    assert passed([admitted, job("a", gang(1, 4))], cluster(4, 4)) == {"a": (False, "WaitingForGPUs")}
    half_bound = cluster(4, 4, pods=[own_pod(admitted, 4, "node-0")])
    assert passed([admitted, job("a", gang(1, 4))], half_bound) == {"a": (False, "WaitingForGPUs")}
    assert passed([admitted, job("a", gang(1, 4))], cluster(4, 4, 4))["a"] == (True, "Admitted")
    message = judge([admitted, job("a", gang(1, 4))], cluster(4, 4), NOW, LIMITS)["uid-a"].message
    assert message.endswith("on 1 node; 0 free, 8 held by team-a/first")


def test_a_bound_pod_is_not_counted_twice() -> None:
    admitted = job("first", gang(1, 4), active=True)
    snapshot = cluster(8, pods=[own_pod(admitted, 4, "node-0")])
    assert passed([admitted, job("a", gang(1, 4))], snapshot)["a"] == (True, "Admitted")


def test_a_restarting_jobs_own_pods_make_room_for_its_next_attempt() -> None:
    again = job("a", gang(1, 8))
    assert passed([again], cluster(8, pods=[own_pod(again, 8, "node-0")])) == {"a": (True, "Admitted")}


def test_the_oldest_goes_first() -> None:
    young, old = job("young", gang(1, 8), age=10), job("old", gang(1, 8), age=20)
    assert passed([young, old], cluster(8)) == {"old": (True, "Admitted"), "young": (False, "WaitingInQueue")}


def test_the_highest_priority_goes_before_the_oldest() -> None:
    urgent = job("urgent", gang(1, 8), age=10, priorityClassName="high")
    found = passed([job("old", gang(1, 8), age=20), urgent], cluster(8, priorities={"high": 1000, "": 5}))
    assert found == {"urgent": (True, "Admitted"), "old": (False, "WaitingInQueue")}


def test_a_small_job_may_not_take_what_the_head_of_the_line_waits_for() -> None:
    jobs = [job("big", gang(1, 8), age=20), job("small", gang(1, 2), age=10)]
    busy = cluster(8, pods=[gpu_pod("p", 4)])
    assert passed(jobs, busy) == {"big": (False, "WaitingForGPUs"), "small": (False, "WaitingInQueue")}
    found = judge(jobs, busy, NOW, LIMITS)
    assert found["uid-small"].message.endswith("; team-a/big is ahead in the queue")


def test_a_small_job_goes_first_on_gpus_that_nobody_ahead_waits_for() -> None:
    jobs = [job("big", gang(1, 8), age=20), job("small", gang(1, 2), age=10)]
    assert passed(jobs, cluster(8, 4, pods=[gpu_pod("p", 4)])) == {
        "big": (False, "WaitingForGPUs"),
        "small": (True, "Admitted"),
    }


def test_a_job_that_the_planner_stumbles_over_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr("grpo_operator.admission.queue.plan_job", stumble)
    bad = make_job(GPUS, name="bad", uid="uid-bad", creationTimestamp=at(-500))
    found = judge([bad, job("good", gang(1, 8))], cluster(8), NOW, LIMITS)
    assert (found["uid-bad"].reason, found["uid-bad"].admitted) == ("PlannerFailed", False)
    assert "a bug" in found["uid-bad"].message
    assert found["uid-good"].admitted


def test_two_gangs_never_get_half_each() -> None:
    jobs = [job("a", gang(1, 3), age=20), job("b", gang(1, 3), age=10)]
    assert passed(jobs, cluster(4)) == {"a": (True, "Admitted"), "b": (False, "WaitingInQueue")}


def test_a_long_line_is_looked_at_to_a_depth() -> None:
    jobs = [job(f"j{number:03}", gang(1, 1), age=1000 - number) for number in range(DEPTH + 5)]
    assert len(passed(jobs, cluster(8))) == DEPTH


def test_who_is_not_in_the_line() -> None:
    end = {"attempt": 1, "reason": "SchedulingTimeout", "endTime": at(-5)}
    conditions = [condition("Admitted", "False", "SchedulingTimeout", since=-5)]
    released = make_job(GPUS, {"attempt": 1, "conditions": conditions, "ends": [end]})
    suspended = make_job({**GPUS, "suspend": True})
    queued = make_job({"placement": {"accelerator": "GPU", "queueName": "team"}})
    deleted = make_job(GPUS, deletionTimestamp=at(0))
    refused = make_job(
        GPUS, {"conditions": [{**condition("Admitted", "False", "NotSupported"), "observedGeneration": 1}]}
    )
    for one in (released, suspended, queued, deleted, refused, make_job()):
        assert judge([one], cluster(8), NOW, LIMITS) == {}


def test_where_foreign_pods_can_not_be_seen_the_fit_is_the_schedulers() -> None:
    snapshot = cluster(4, visible=False)
    assert passed([job("a", gang(2, 4))], snapshot) == {"a": (True, "Admitted")}
    inventory = Capacity(snapshot, ()).inventory(job("a", gang(1, 4)))
    assert not inventory.visible
    assert "left to the scheduler" in inventory.warnings[-1]


def test_nodes_that_the_job_can_not_use_are_left_out_with_a_reason() -> None:
    capacity = Capacity(cluster(8, problem="nodes can't be listed: 403"), ())
    inventory = capacity.inventory(job("a", gang(1, 4), nodeSelector={"zone": "b"}))
    assert inventory.nodes == ()
    assert inventory.warnings[0] == "node node-0: left out, label zone is not b"
    assert inventory.warnings[1] == "nodes can't be listed: 403"


def test_memory_and_cpu_of_others_are_taken_off() -> None:
    snapshot = cluster(8, other_use={"node-0": {"memory": 2.0**30, "cpu": 2.0}, "gone": {"cpu": 1.0}})
    (found,) = Capacity(snapshot, ()).inventory(job("a", gang(1, 4))).nodes
    assert (found.host_memory_total - found.host_memory_free, found.cpu_total - found.cpu_free) == (2**30, 2.0)


def test_a_plan_is_kept_once_a_step_was_done() -> None:
    assert kept_plan(job("a", gang(1, 4))) == gang(1, 4)
    fresh = make_job(GPUS, active_status(plan=gang(1, 4)))
    assert kept_plan(fresh) is None


def test_fits_counts_whole_nodes() -> None:
    inventory = Capacity(cluster(8, 8), ()).inventory(job("a", gang(1, 4)))
    assert fits(inventory, gang(2, 8))
    assert not fits(inventory, gang(3, 4))
    assert not fits(inventory, gang(1, 4).model_copy(update={"gpu_product": "NVIDIA-A10"}))


class Still:
    """Gives one snapshot for ever and counts how often it was asked."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.asked = snapshot, 0

    async def take(self) -> Snapshot:
        self.asked += 1
        return self.snapshot

    def expire(self) -> None:
        """It stays as it is."""


def queue(jobs: list[GRPOJobRecord], snapshot: Snapshot, image: str = "trainer:1") -> AdmissionQueue:
    return AdmissionQueue(lambda: jobs, Still(snapshot), limits=LIMITS, default_image=image, clock=lambda: NOW)


ASKED = Decision(Action.ADMIT, "OutOfMemory", "CUDA out of memory", counted=True)


async def test_the_answer_keeps_the_end_that_it_follows() -> None:
    one = job("a", gang(1, 4))
    answer = await queue([one], cluster(8)).answer(make_seen(one), ASKED)
    assert (answer.action, answer.plan, answer.counted) == (Action.COMMIT, gang(1, 4), True)
    waiting = await queue([one], cluster(2)).answer(make_seen(one), ASKED)
    assert (waiting.action, waiting.reason, waiting.counted) == (Action.QUEUE, "WaitingForGPUs", True)
    assert waiting.look_again == 5.0


async def test_a_restart_takes_its_own_place_again_ahead_of_the_line() -> None:
    mine, older = job("mine", gang(1, 8), age=10, active=True), job("older", gang(1, 8), age=20)
    busy = cluster(8, pods=[own_pod(mine, 8, "node-0")])
    answer = await queue([older, mine], busy).answer(make_seen(mine), ASKED)
    assert (answer.action, answer.plan) == (Action.COMMIT, gang(1, 8))
    assert (await queue([older, mine], busy).answer(make_seen(older), ASKED)).action is Action.QUEUE


async def test_a_restart_whose_node_is_lost_waits_like_all_others() -> None:
    mine = job("mine", gang(2, 4), active=True)
    answer = await queue([mine], cluster(4)).answer(make_seen(mine), ASKED)
    assert (answer.action, answer.reason, answer.ended) == (Action.QUEUE, "WaitingForGPUs", None)
    assert answer.message == "needs 8 × NVIDIA-H100-80GB-HBM3 on 2 nodes; 4 free"


async def test_a_job_behind_the_lines_depth_is_told_so() -> None:
    jobs = [job(f"j{number:03}", gang(1, 1), age=1000 - number) for number in range(DEPTH + 1)]
    answer = await queue(jobs, cluster(8)).answer(make_seen(jobs[-1]), ASKED)
    assert (answer.action, answer.reason) == (Action.QUEUE, "WaitingInQueue")
    assert answer.message == f"{DEPTH} jobs are ahead in the queue"


async def test_a_job_without_any_image_is_refused() -> None:
    one = make_job()
    answer = await queue([one], cluster(8), image="").answer(make_seen(one), ASKED)
    assert (answer.action, answer.reason) == (Action.REJECT, "NoImage")
    assert answer.message.startswith("spec.image: unset")


async def test_a_cpu_job_needs_no_inventory() -> None:
    one = make_job()
    asked = queue([one], cluster())
    answer = await asked.answer(make_seen(one), Decision(Action.ADMIT))
    assert answer.action is Action.COMMIT
    assert answer.plan is not None
    assert answer.plan.nodes == 2
    assert not one.competes


async def test_a_spec_too_big_for_an_annotation_is_refused() -> None:
    rewards = [{"format": {"pattern": "é" * 4000}} for _ in range(32)]
    one = make_job({"rewards": rewards})
    answer = await queue([one], cluster()).answer(make_seen(one), Decision(Action.ADMIT))
    assert (answer.action, answer.reason) == (Action.REJECT, "NotSupported")
    assert "the pods' annotations hold 204800" in answer.message


async def test_kueue_jobs_are_planned_on_the_whole_cluster() -> None:
    full = cluster(8, pods=[gpu_pod("p", 8)])
    spec = {"placement": {"accelerator": "GPU", "nodes": None, "queueName": "team", "gpus": {"min": 1, "max": 8}}}
    one = make_job({**spec, "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"}})
    answer = await queue([one], full).answer(make_seen(one), Decision(Action.ADMIT))
    assert answer.action is Action.COMMIT
    assert answer.plan is not None
    assert answer.plan.gpus >= 1
