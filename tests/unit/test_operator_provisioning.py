"""Gangs whose pods are created for an autoscaler to see: their plan, whom they let go first, how
long they wait."""

from typing import Any

from grpo_operator.decide.decisions import Action
from grpo_operator.records.records import GRPOJobRecord
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from tests.unit.operator_world import (
    GPU_PLAN,
    active_status,
    at,
    judged,
    make_child,
    make_job,
    make_pod,
)
from tests.unit.operator_world import make_seen as seen_of
from tests.unit.queue_world import cluster, gang, gpu_pod, job
from tests.unit.queue_world import judged as verdicts

DECLARED = {
    "accelerator": "GPU",
    "provisioning": "CreatePods",
    "gpuProduct": "NVIDIA-H100-80GB-HBM3",
    "gpusPerNode": 4,
    "nodes": 2,
    "nodeSelector": {"pool": "h100"},
}
SPEC = {
    "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"},
    "training": {"promptsPerStep": 8, "numGenerations": 4},
    "placement": DECLARED,
}


def wanting(age: float = 5, **status: Any) -> GRPOJobRecord:
    """A job that has never run and declares its nodes."""
    return make_job(SPEC, status, name="scales", uid="uid-scales", creationTimestamp=at(-age))


def test_the_plan_takes_exactly_the_declared_nodes_whatever_is_there() -> None:
    spec = wanting().spec
    assert spec is not None
    result = plan_job(spec, Inventory())
    assert result.chosen is not None
    plan = result.chosen
    assert (plan.nodes, plan.gpus_per_node, plan.gpu_product) == (2, 4, "NVIDIA-H100-80GB-HBM3")
    # the label of a product is there only once the node is up
    assert plan.node_selector == {}


def test_its_pods_are_created_although_no_node_is_there() -> None:
    one = wanting()
    assert verdicts([one], cluster())[one.uid].admitted
    assert verdicts([one], cluster(4, pods=[gpu_pod("p", 4)]))[one.uid].admitted


def test_it_does_not_take_what_somebody_ahead_waits_for() -> None:
    one = make_job({**SPEC, "placement": {**DECLARED,
    "nodeSelector": {"nvidia.com/gpu.present": "true"}}}, {},
                   name="scales", uid="uid-scales", creationTimestamp=at(-5))  # fmt: skip
    ahead = job("ahead", gang(1, 4), age=50)
    nodes = cluster(4, pods=[gpu_pod("p", 4)])
    suitable = verdicts([one], nodes)[one.uid]
    assert suitable.admitted
    labelled = cluster(4, pods=[gpu_pod("p", 4)])
    labelled.nodes[0].labels["nvidia.com/gpu.present"] = "true"  # type: ignore[index]
    found = verdicts([ahead, one], labelled)
    assert (found["uid-ahead"].admitted, found[one.uid].admitted) == (False, False)
    assert "behind team-a/ahead" in found[one.uid].message


def test_pods_that_wait_for_their_nodes_take_what_gets_free_there() -> None:
    active = active_status(
        plan=GPU_PLAN.model_copy(update={"nodes": 1, "gpus": 4, "node_selector": {}})
    )
    placement = {**DECLARED, "nodes": 1, "nodeSelector": {"pool": "h100"}}
    scaling = make_job({**SPEC, "placement": placement}, active, name="scales", uid="uid-scales")
    other = job("other", gang(1, 4))
    nodes = cluster(4)
    assert verdicts([scaling, other], nodes)["uid-other"].admitted
    nodes.nodes[0].labels["pool"] = "h100"  # type: ignore[index]
    assert not verdicts([scaling, other], nodes)["uid-other"].admitted


def test_it_waits_as_long_as_it_says_and_is_released_whole() -> None:
    status = active_status(running=False, plan=GPU_PLAN, attemptStartTime=at(-899))
    placement = {**DECLARED, "provisioningTimeoutSeconds": 900}
    pending = (
        make_pod(0, state={}, phase="Pending", node=""),
        make_pod(1, state={}, phase="Pending", node=""),
    )

    def decided(now: float) -> Any:
        status["attemptStartTime"] = at(-now)
        spec = {**SPEC, "placement": placement}
        return judged(seen_of(make_job(spec, status), make_child(), *pending))

    assert decided(899).requeue_after == 1.0
    assert (decided(901).action, decided(901).reason) == (Action.RELEASE, "SchedulingTimeout")
    assert "within 900 s" in decided(901).message
