"""Admission of gangs with two roles: both start or none does, each on the nodes that have its
GPUs."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.admission.capacity import Capacity, Claim, gpu_roles
from grpo_operator.admission.inventory import node_facts
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.quota_gate import needs
from grpo_operator.admission.scheduler import CycleInput, schedule
from grpo_operator.admission.snapshot import QuotaFacts, Snapshot
from grpo_operator.records.records import GRPOJobRecord
from grpo_planner.result.result import PlanReason, PlanResult
from tests.generated import cases
from tests.unit.operator_world import (
    GPU_PLAN,
    LIMITS,
    SERVED_GPU_PLAN,
    active_status,
    condition,
    make_job,
)
from tests.unit.queue_world import cluster, gang, gpu_pod, job, judged, own_pod, packs, passed
from tests.unit.test_operator_inventory import GFD, node

H100, L4 = GPU_PLAN.gpu_product, "NVIDIA-L4"


def of(*sizes: tuple[str, int], pods: Any = ()) -> Snapshot:
    """Nodes node-0, node-1, … of that product and so many GPUs."""
    nodes = []
    for number, (product, size) in enumerate(sizes):
        labels = {**GFD, "nvidia.com/gpu.count": str(size), "nvidia.com/gpu.product": product}
        item = node(labels, {"nvidia.com/gpu": str(size)})
        item["metadata"] = {**item["metadata"], "name": f"node-{number}"}
        nodes.append(node_facts(item))
    return Snapshot(nodes=tuple(nodes), gpu_pods=cluster(pods=pods).gpu_pods)


@pytest.mark.parametrize(
    ("sizes", "plan", "starts"),
    [
        ([8], gang(1, 4, 4, 1), True),
        ([8], gang(1, 4, 5, 1), False),
        ([8, 8], gang(2, 4, 2, 4), True),
        ([8, 8], gang(2, 8, 1, 1), False),
        ([4, 2], gang(1, 4, 2, 1), True),
        ([4, 1, 1], gang(1, 4, 1, 2), False),
        ([8], gang(2, 4, 1, 1), False),
    ],
)
def test_a_gang_starts_when_both_roles_fit_beside_each_other(
    sizes: list[int], plan: ExecutionPlan, starts: bool
) -> None:
    found = passed([job("a", plan)], cluster(*sizes))
    assert found["a"] == ((True, "Admitted") if starts else (False, "WaitingForGPUs"))


def test_engines_go_to_the_nodes_of_their_own_product() -> None:
    plan = gang(1, 8, 2, 1, L4)
    assert passed([job("a", plan)], of((H100, 8), (L4, 2)))["a"][0]
    assert not passed([job("a", plan)], of((H100, 16), (L4, 1)))["a"][0]


def test_what_is_short_is_told_of_both_roles() -> None:
    waiting = job("a", gang(1, 8, 2, 2, L4))
    found = judged([waiting], of((H100, 8), (L4, 4), pods=[gpu_pod("x", 1, "node-1")]))
    assert found[waiting.uid].message == (
        f"needs 8 × {H100} on 1 node; 8 free, and needs 4 × {L4} for 2 engines; 3 free, 1 held by "
        "team-a/x; "
        "1st of 1 in the queue"
    )


def test_a_gang_that_lacks_more_than_gpus_says_what_a_pod_needs() -> None:
    """With as many GPUs free as it needs, their number alone would say that it fits."""
    resources = {"requests": {"cpu": "900"}}
    status = active_status(plan=gang(1, 8, 2, 2, L4), progress={"step": 5, "totalSteps": 9})
    status["conditions"] = [condition("Admitted", "False", "WaitingForGPUs")]
    placement = {"accelerator": "GPU", "nodes": None}
    waiting = make_job({"placement": placement, "resources": resources}, status)
    message = judged([waiting], of((H100, 8), (L4, 4)))[waiting.uid].message
    assert "8 free, but too few nodes have 8 GPUs, 900 cores and" in message
    assert "4 free;" in message, "the engines would fit"


def test_an_engine_needs_none_of_what_only_training_requests() -> None:
    """RDMA cards of the ranks: the nodes of engines have none."""
    rdma = {"requests": {"rdma/hca": "1"}, "limits": {"rdma/hca": "1"}}
    plan = gang(1, 8, 2, 2, L4)
    status = active_status(plan=plan, progress={"step": 5, "totalSteps": 9})
    status["conditions"] = [condition("Admitted", "False", "WaitingForGPUs")]
    one = make_job({"placement": {"accelerator": "GPU", "nodes": None}, "resources": rdma}, status)
    ranks = node({**GFD, "nvidia.com/gpu.count": "8"}, {"nvidia.com/gpu": "8", "rdma/hca": "1"})
    there = Snapshot(nodes=(node_facts(ranks), *of((H100, 8), (L4, 4)).nodes[1:]))
    assert judged([one], there)[one.uid].admitted
    without = Snapshot(nodes=of((H100, 8), (L4, 4)).nodes)
    assert not judged([one], without)[one.uid].admitted


def test_an_engine_keeps_nothing_on_its_nodes_disk() -> None:
    roomy = node({**GFD, "nvidia.com/gpu.count": "8"}, {"nvidia.com/gpu": "8"})
    roomy["status"]["allocatable"]["ephemeral-storage"] = "4Ti"
    small = node(
        {**GFD, "nvidia.com/gpu.count": "4", "nvidia.com/gpu.product": L4}, {"nvidia.com/gpu": "4"}
    )
    small["metadata"] = {**small["metadata"], "name": "small"}
    small["status"]["allocatable"]["ephemeral-storage"] = "1Gi"
    there = Snapshot(nodes=(node_facts(roomy), node_facts(small)))
    assert passed([job("a", gang(1, 8, 2, 2, L4))], there)["a"][0]
    assert not passed([job("a", gang(1, 4, 0, 0))], Snapshot(nodes=there.nodes[1:]))["a"][0]


def test_a_new_plan_is_admitted_only_where_its_engines_fit_too() -> None:
    """Whatever the planner, which looks for one role at a time, says of the nodes that are free."""
    found = PlanResult(
        feasible=True,
        fits_now=True,
        reason=PlanReason.PLANNED,
        message="",
        chosen=gang(1, 8, 2, 2, L4),
    )
    plans = Plans()
    plans.plan = lambda *_: found  # type: ignore[method-assign]
    one = make_job({"placement": {"accelerator": "GPU", "nodes": None}})
    for free, starts in ((4, True), (3, False)):
        asked = CycleInput(
            jobs=(one,),
            snapshot=of((H100, 8), (L4, free)),
            limits=LIMITS,
            default_image="t:1",
        )
        assert schedule(asked, plans).verdicts[one.uid].admitted is starts


def test_engines_that_a_running_gang_lacks_are_nobody_elses() -> None:
    runs, waits = job("a", gang(1, 4, 2, 2), active=True), job("b", gang(1, 2))
    mine = [own_pod(runs, 4, "node-0"), own_pod(runs, 2, "node-0", engine=True)]
    assert not passed([runs, waits], cluster(8, pods=mine))["b"][0], (
        "the second engine is made again"
    )
    mine.append(own_pod(runs, 2, "node-0", engine=True))
    assert not passed([runs, waits], cluster(8, pods=mine))["b"][0]
    assert passed([runs, waits], cluster(10, pods=mine))["b"][0]


def test_a_pod_of_one_role_stands_for_none_of_the_other() -> None:
    runs, waits = job("a", gang(1, 4, 1, 2), active=True), job("b", gang(1, 4))
    mine = [own_pod(runs, 2, "node-0", engine=True)]
    assert not passed([runs, waits], cluster(8, pods=mine))["b"][0], "the gang's own 4 are promised"


def test_a_status_whose_pods_have_no_gpus_holds_nobody_up() -> None:
    """Anybody may have written it."""
    odd = gang(1, 4, 2, 2).model_copy(update={"gpus_per_node": 0})
    runs, waits = job("a", odd, active=True), job("b", gang(1, 4))
    assert passed([runs, waits], cluster(8))["b"][0]
    assert not passed([runs, waits], cluster(7))["b"][0], "its engines are counted all the same"


def test_a_quota_counts_the_pods_jobs_and_requests_of_both_roles() -> None:
    one = job("a", SERVED_GPU_PLAN)
    assert one.spec
    wanted = {
        "pods": 4.0,
        "count/jobs.batch": 2.0,
        "requests.nvidia.com/gpu": 12.0,
        "requests.memory": 4 * 2.0**30,
    }
    assert {name: needs(one.spec, SERVED_GPU_PLAN, name) for name in wanted} == wanted
    tight = QuotaFacts(namespace="team-a", name="q", hard={"pods": 3.0}, used={})
    there = Snapshot(nodes=of((H100, 8), (H100, 8), (L4, 8)).nodes, quotas={"team-a": (tight,)})
    assert judged([one], there)[one.uid].reason == "WaitingForQuota"


def test_a_namespace_holds_the_gpus_of_its_engines_too() -> None:
    """So that the one with fewest comes next."""
    runs = [
        _in("team-a", job("a", gang(1, 2, 4, 1), active=True)),
        _in("team-b", job("b", gang(1, 4), active=True)),
    ]
    waiting = [
        _in("team-a", job("c", gang(1, 2), age=50)),
        _in("team-b", job("d", gang(1, 2), age=10)),
    ]
    found = passed([*runs, *waiting], cluster(6 + 4 + 2))
    assert (found["d"][0], found["c"][0]) == (True, False)


def _in(namespace: str, one: GRPOJobRecord) -> GRPOJobRecord:
    return replace(one, key=ObjectKey(namespace, one.name))


SIZES = st.lists(st.tuples(st.sampled_from([H100, L4]), st.integers(1, 8)), min_size=1, max_size=4)
PLANS = st.builds(gang, st.integers(1, 3), st.integers(1, 8), st.integers(0, 4), st.integers(1, 4),
                  st.sampled_from([H100, L4]))  # fmt: skip


@settings(max_examples=cases(200), deadline=None)
@given(SIZES, st.lists(PLANS, min_size=1, max_size=3))
def test_never_half_a_gang_and_never_more_than_there_is(
    sizes: list[tuple[str, int]], plans: list[ExecutionPlan]
) -> None:
    """Whoever is admitted can be bound whole beside all who were, by brute force."""
    jobs = [job(f"j{number}", plan, age=100 - number) for number, plan in enumerate(plans)]
    there = of(*sizes)
    found = judged(jobs, there)
    admitted = [one for one in jobs if found[one.uid].admitted]
    for product in (H100, L4):
        room = {f"node-{i}": size for i, (own, size) in enumerate(sizes) if own == product}
        wanted = [pod for one in admitted for pod in _pods(one, product)]
        assert packs(sorted(wanted, key=lambda pod: -pod[1]), room, {})


def _pods(one: GRPOJobRecord, product: str) -> list[tuple[str, int]]:
    """Gang and GPUs of each of its pods that needs this product; engines need not keep apart."""
    plan = one.status.plan
    assert plan
    own = [role for role in gpu_roles(one, plan) if role.plan.gpu_product == product]
    return [
        ("" if r.is_engines else one.uid, r.plan.gpus_per_node)
        for r in own
        for _ in range(r.plan.nodes)
    ]


@settings(max_examples=cases(200), deadline=None)
@given(SIZES, PLANS)
def test_what_a_claim_reserves_is_what_its_gang_needs(
    sizes: list[tuple[str, int]], plan: ExecutionPlan
) -> None:
    """A gang that fits and was admitted leaves as much as it does not need, and is no obstacle to
    itself."""
    one, there = job("a", plan, active=True), of(*sizes)
    if not Capacity(there, ()).has_room_now(one, plan):
        return
    claimed = Capacity(there, [Claim(job=one, plan=plan, attempt=1)])
    other = job("b", gang(1, 1))
    left = sum(seen.gpus_free for seen in claimed.inventory(other).nodes)
    assert left == sum(size for _, size in sizes) - plan.all_gpus
