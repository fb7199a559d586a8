"""Who may start on which GPUs: reservations, the order of the queue, and what those who wait are
told.

tests/integration/test_operator_gpus.py has the planner's choice as well.
"""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_operator.admission.capacity import Capacity, gpu_roles, rooms
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.resume_plan import kept_plan
from tests.generated import cases
from tests.unit.operator_world import active_status, at, condition, make_job
from tests.unit.queue_world import GPUS, cluster, gang, gpu_pod, job, judged, own_pod, passed


def test_a_gang_starts_when_all_of_it_fits() -> None:
    waiting = job("a", gang(2, 4))
    assert passed([waiting], cluster(4, 4)) == {"a": (True, "Admitted")}
    assert passed([waiting], cluster(4, 3)) == {"a": (False, "WaitingForGPUs")}


def test_a_waiting_job_is_told_what_it_needs_and_who_has_it() -> None:
    waiting = job("a", gang(2, 4))
    holder = {"grpo.dev/job-name": "run-7", "grpo.dev/job-uid": "other"}
    found = judged([waiting], cluster(4, 4, pods=[gpu_pod("run-7-1-0", 2, **holder)]))
    message = found["uid-a"].message
    assert message == (
        "needs 8 × NVIDIA-H100-80GB-HBM3 on 2 nodes; 6 free, 2 held by team-a/run-7; 1st of 1 "
        "in the queue"
    )


def test_only_the_biggest_holders_are_named() -> None:
    pods = [gpu_pod(f"p{number}", 1) for number in range(6)]
    found = judged([job("a", gang(1, 8))], cluster(8, pods=pods))
    said, _, _ = found["uid-a"].message.rpartition(";")
    assert said.endswith(
        "on 1 node; 2 free, 1 held by team-a/p0, 1 held by team-a/p1, 1 held by team-a/p2, 3 by 3 "
        "others"
    )


def test_what_an_admitted_gang_still_lacks_is_reserved() -> None:
    admitted = job("first", gang(2, 4), active=True)
    assert passed([admitted, job("a", gang(1, 4))], cluster(4, 4)) == {
        "a": (False, "WaitingForGPUs")
    }
    half_bound = cluster(4, 4, pods=[own_pod(admitted, 4, "node-0")])
    assert passed([admitted, job("a", gang(1, 4))], half_bound) == {"a": (False, "WaitingForGPUs")}
    assert passed([admitted, job("a", gang(1, 4))], cluster(4, 4, 4))["a"] == (True, "Admitted")
    message = judged([admitted, job("a", gang(1, 4))], cluster(4, 4))["uid-a"].message
    assert message.endswith("on 1 node; 0 free, 8 held by team-a/first; 1st of 1 in the queue")


def test_a_bound_pod_is_not_counted_twice() -> None:
    admitted = job("first", gang(1, 4), active=True)
    snapshot = cluster(8, pods=[own_pod(admitted, 4, "node-0")])
    assert passed([admitted, job("a", gang(1, 4))], snapshot)["a"] == (True, "Admitted")


def test_a_restarting_jobs_own_pods_make_room_for_its_next_attempt() -> None:
    again = job("a", gang(1, 8))
    assert passed([again], cluster(8, pods=[own_pod(again, 8, "node-0")])) == {
        "a": (True, "Admitted")
    }


def test_the_oldest_goes_first() -> None:
    young, old = job("young", gang(1, 8), age=10), job("old", gang(1, 8), age=20)
    assert passed([young, old], cluster(8)) == {
        "old": (True, "Admitted"),
        "young": (False, "WaitingForGPUs"),
    }


def test_who_is_admitted_has_left_the_queue_and_holds_its_gpus() -> None:
    found = judged([job("b", gang(1, 8), age=10), job("a", gang(1, 8), age=20)], cluster(8))
    assert found["uid-b"].message.endswith("; 0 free, 8 held by team-a/a; 1st of 1 in the queue")


def test_the_highest_priority_goes_before_the_oldest() -> None:
    urgent = job("urgent", gang(1, 8), age=10, priorityClassName="high")
    found = passed(
        [job("old", gang(1, 8), age=20), urgent], cluster(8, priorities={"high": 1000, "": 5})
    )
    assert found == {"urgent": (True, "Admitted"), "old": (False, "WaitingForGPUs")}


def test_a_small_job_may_not_take_what_the_head_of_the_line_waits_for() -> None:
    jobs = [job("big", gang(1, 8), age=20), job("small", gang(1, 2), age=10)]
    busy = cluster(8, pods=[gpu_pod("p", 4)])
    assert passed(jobs, busy) == {
        "big": (False, "WaitingForGPUs"),
        "small": (False, "WaitingInQueue"),
    }
    found = judged(jobs, busy)
    assert found["uid-small"].message.endswith("; 2nd of 2 in the queue, behind team-a/big")


def test_a_small_job_goes_first_on_gpus_that_nobody_ahead_waits_for() -> None:
    jobs = [job("big", gang(1, 8), age=20), job("small", gang(1, 2), age=10)]
    assert passed(jobs, cluster(8, 4, pods=[gpu_pod("p", 4)])) == {
        "big": (False, "WaitingForGPUs"),
        "small": (True, "Admitted"),
    }


def test_a_job_that_the_planner_stumbles_over_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stumble(*_: object) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(Plans, "plan", stumble)
    bad = make_job(GPUS, name="bad", uid="uid-bad", creationTimestamp=at(-500))
    found = judged([bad, job("good", gang(1, 8))], cluster(8))
    assert (found["uid-bad"].reason, found["uid-bad"].admitted) == ("PlannerFailed", False)
    assert "a bug" in found["uid-bad"].message
    assert found["uid-good"].admitted


def test_two_gangs_never_get_half_each() -> None:
    jobs = [job("a", gang(1, 3), age=20), job("b", gang(1, 3), age=10)]
    assert passed(jobs, cluster(4)) == {"a": (True, "Admitted"), "b": (False, "WaitingForGPUs")}


def test_who_is_not_in_the_line() -> None:
    end = {"attempt": 1, "reason": "SchedulingTimeout", "endTime": at(-5)}
    conditions = [condition("Admitted", "False", "SchedulingTimeout", since=-5)]
    released = make_job(GPUS, {"attempt": 1, "conditions": conditions, "ends": [end]})
    suspended = make_job({**GPUS, "suspend": True})
    queued = make_job({"placement": {"accelerator": "GPU", "queueName": "team"}})
    deleted = make_job(GPUS, deletionTimestamp=at(0))
    for one in (released, suspended, queued, deleted, make_job()):
        assert judged([one], cluster(8)) == {}


@pytest.mark.parametrize("reason", ["InvalidSpec", "NoImage", "NotSupported"])
def test_who_was_refused_by_an_operator_before_is_judged_again(reason: str) -> None:
    status = {"conditions": [{**condition("Admitted", "False", reason), "observedGeneration": 1}]}
    model = {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"}
    one = make_job(
        {"model": model, "placement": {"accelerator": "GPU", "nodes": 1}}, status, name="a"
    )
    assert passed([one], cluster(8)) == {"a": (True, "Admitted")}


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
    snapshot = cluster(
        8, other_use={"node-0": {"memory": 2.0**30, "cpu": 2.0}, "gone": {"cpu": 1.0}}
    )
    (found,) = Capacity(snapshot, ()).inventory(job("a", gang(1, 4))).nodes
    assert (found.host_memory_total - found.host_memory_free, found.cpu_total - found.cpu_free) == (
        2**30,
        2.0,
    )


@given(
    others=st.lists(st.integers(1, 3000), max_size=8),
    pods=st.integers(1, 8),
    millicores=st.integers(1, 8000),
)
@example(others=[10] * 7, pods=1, millicores=63_930)
@example(others=[55_000], pods=5, millicores=1800)
def test_as_many_pods_fit_as_a_node_has_millicores_for(
    others: list[int], pods: int, millicores: int
) -> None:
    use = [gpu_pod(f"p{number}", 0) for number in range(len(others))]
    for pod, requested in zip(use, others, strict=True):
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": f"{requested}m"}
        pod["metadata"]["labels"] = {"grpo.dev/job-uid": "other"}
    capacity = Capacity(cluster(8, pods=use), ())
    (node,) = capacity.inventory(job("a", gang(1, 1))).nodes
    role = gpu_roles(job("a", gang(1, 1)), gang(1, 1))[0]
    millicores_free = 64_000 - sum(others)
    assert node.cpu_free == millicores_free / 1000
    found = min(pods, rooms(node, role, {"cpu": millicores / 1000}))
    assert found == min(pods, millicores_free // millicores)
    assert rooms(node, role, {"cpu": 1e-9}) == 8


def test_a_plan_is_kept_once_a_step_was_done() -> None:
    assert kept_plan(job("a", gang(1, 4))) == gang(1, 4)
    fresh = make_job(GPUS, active_status(plan=gang(1, 4)))
    assert kept_plan(fresh) is None


def test_fits_counts_whole_nodes() -> None:
    capacity, one = Capacity(cluster(8, 8), ()), job("a", gang(1, 4))
    assert capacity.has_room_now(one, gang(2, 8))
    assert not capacity.has_room_now(one, gang(3, 4))
    assert not capacity.has_room_now(
        one, gang(1, 4).model_copy(update={"gpu_product": "NVIDIA-A10"})
    )
    assert not capacity.has_room_now(
        one, gang(1, 4).model_copy(update={"host_memory_bytes": 2**41})
    )


def test_a_strangers_pod_with_a_gangs_labels_takes_nothing_of_its_place() -> None:
    """A gang whose pods have ended, and which starts again in a moment, lacks them all."""
    admitted, waits = job("a", gang(1, 4), active=True), job("b", gang(1, 4), age=50)
    stranger = own_pod(admitted, 0, "node-1")
    del stranger["metadata"]["ownerReferences"]
    assert passed([admitted, waits], cluster(4, 0, pods=[stranger])) == {
        "b": (False, "WaitingForGPUs")
    }


def test_a_strangers_pod_with_a_jobs_labels_makes_no_room_for_it() -> None:
    waiting = job("a", gang(1, 4))
    labels = {"grpo.dev/job-name": "a", "grpo.dev/job-uid": waiting.uid, "grpo.dev/attempt": "1"}
    assert passed([waiting], cluster(4, pods=[own_pod(waiting, 4, "node-0")])) == {
        "a": (True, "Admitted")
    }
    stranger = gpu_pod("stranger", 4, **labels)
    assert passed([waiting], cluster(4, pods=[stranger])) == {"a": (False, "WaitingForGPUs")}


GANGS = {"wide": gang(3, 2), "pair": gang(2, 2), "one": gang(1, 1), "other": gang(1, 1)}


@settings(max_examples=cases(200))
@given(st.randoms(use_true_random=False))
def test_however_the_scheduler_packs_gangs_their_gpus_are_promised_once(
    chance: random.Random,
) -> None:
    active = {name: job(name, plan, active=True) for name, plan in GANGS.items()}
    free, pods = dict.fromkeys(("node-0", "node-1", "node-2"), 4), []
    coming = [(name, index) for name, plan in GANGS.items() for index in range(plan.nodes)]
    chance.shuffle(coming)
    on: dict[str, set[str]] = {name: set() for name in GANGS}
    for name, index in coming[: chance.randint(0, len(coming))]:
        size = GANGS[name].gpus_per_node
        if room := [node for node in free if free[node] >= size and node not in on[name]]:
            node = chance.choice(room)
            on[name].add(node)
            free[node] -= size
            pods.append(own_pod(active[name], size, node))
            pods[-1]["metadata"]["name"] += f"-{index}"
    # twelve GPUs, all of them promised
    found = judged([*active.values(), job("late", gang(1, 1))], cluster(4, 4, 4, pods=pods))
    assert not found["uid-late"].admitted
