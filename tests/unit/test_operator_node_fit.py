"""Node affinity and resources besides GPUs: which nodes count for a job, and what its pods take of
them."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_api.job import GRPOJobSpec, parse_spec
from grpo_api.pods.platform import PlatformSpec
from grpo_operator.admission.capacity import Capacity
from grpo_operator.admission.inventory import NodeFacts, node_facts
from grpo_operator.admission.node_fit import amount_message, extra_amounts, pod_amounts, unfit
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.operator_world import GPU_PLAN, SPEC, make_job
from tests.unit.queue_world import cluster, gang, gpu_pod
from tests.unit.test_operator_inventory import GFD, node

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
GPUS = {"placement": {"accelerator": "GPU"}}


def spec(**changes: Any) -> GRPOJobSpec:
    return parse_spec({**SPEC, **GPUS, **changes})


def selecting(*terms: dict[str, Any]) -> GRPOJobSpec:
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}
    return spec(podTemplate={"spec": {"affinity": affinity}})


def facts(**labels: str) -> NodeFacts:
    return node_facts(node({**GFD, **labels}))


def on(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        (on("zone", "In", "a", "b"), True),
        (on("zone", "In", "b"), False),
        (on("zone", "NotIn", "b"), True),
        (on("zone", "NotIn", "a"), False),
        (on("rack", "In", "1"), False),
        (on("rack", "NotIn", "1"), True),
        (on("zone", "Exists"), True),
        (on("rack", "Exists"), False),
        (on("rack", "DoesNotExist"), True),
        (on("zone", "DoesNotExist"), False),
        (on("disks", "Gt", "3"), True),
        (on("disks", "Gt", "4"), False),
        (on("disks", "Lt", "5"), True),
        (on("disks", "Lt", "4"), False),
        (on("zone", "Lt", "4"), False),
        (on("rack", "Gt", "4"), False),
    ],
)
def test_each_operator_of_node_affinity(requirement: dict[str, Any], met: bool) -> None:
    why = unfit(facts(zone="a", disks="4"), selecting({"matchExpressions": [requirement]}), {})
    assert why == ("" if met else "no term of podTemplate.spec.affinity.nodeAffinity selects it")


def test_one_term_is_enough_and_all_of_it_is_needed() -> None:
    right, wrong = on("zone", "In", "a"), on("zone", "In", "b")
    both = {"matchExpressions": [right, wrong]}
    assert unfit(facts(zone="a"), selecting(both), {})
    assert unfit(facts(zone="a"), selecting(both, {"matchExpressions": [right]}), {}) == ""
    assert unfit(facts(zone="a"), selecting({}), {}), "an empty term selects no node"
    assert (
        unfit(facts(), selecting({"matchFields": [on("metadata.name", "In", "node-0")]}), {}) == ""
    )
    assert unfit(facts(), selecting({"matchFields": [on("metadata.name", "NotIn", "node-0")]}), {})


def test_nodes_without_the_extra_resource_are_left_out_and_busy_ones_have_nothing_free() -> None:
    snapshot = cluster(8, 8, 8, other_use={"node-1": {"rdma/hca": 1.0}})
    for number in (1, 2):
        snapshot.nodes[number].offers["rdma/hca"] = 1.0
    record = make_job({**GPUS, "resources": {"limits": {"rdma/hca": 1}}})
    seen = Capacity(snapshot, ()).inventory(record)
    assert [(one.name, one.gpus_free, one.gpus_total) for one in seen.nodes] == [
        ("node-1", 0, 8),
        ("node-2", 8, 8),
    ]
    assert seen.warnings == (
        "node node-0: left out, it offers 0 rdma/hca, and a pod requests 1 rdma/hca",
    )


def test_a_node_has_room_for_one_gang_on_its_network() -> None:
    """The scheduler binds no second pod with the same port of the node to it."""
    waiting, beside = make_job(GPUS), make_job(GPUS)
    assert waiting.spec
    assert waiting.typed
    on_host = waiting.spec.on_platform(PlatformSpec(host_network=True))
    waiting = replace(waiting, typed=replace(waiting.typed, spec=on_host))
    pods = [gpu_pod("theirs", 4, "node-0"), gpu_pod("other", 4, "node-1")]
    pods[0]["spec"]["containers"][0]["ports"] = [{"containerPort": 8080, "hostPort": 8080}]
    pods[1]["spec"]["containers"][0]["ports"] = [{"containerPort": 8080}]
    capacity = Capacity(cluster(8, 8, pods=pods), ())

    def free(record: GRPOJobRecord) -> list[int]:
        return [each.gpus_free for each in capacity.inventory(record).nodes]

    assert (free(beside), free(waiting)) == ([4, 4], [0, 4])
    capacity.reserve(waiting, gang(1, 4))
    assert (free(beside), free(waiting)) == ([4, 0], [0, 0])
    capacity = Capacity(cluster(8), ())
    capacity.reserve(waiting, gang(1, 4))
    assert (free(beside), free(waiting)) == ([4], [0])


def test_amounts_in_bytes_have_a_unit_and_others_are_counted() -> None:
    assert amount_message("ephemeral-storage", 4_392_480_000.0) == "4.1 GiB of ephemeral-storage"
    assert amount_message("hugepages-2Mi", 2.0**30) == "1.0 GiB of hugepages-2Mi"
    assert amount_message("rdma/hca", 2.0) == "2 rdma/hca"


ARM = "its CPU is arm64, and the trainer's image is built for amd64"


@pytest.mark.parametrize(
    ("labels", "reported", "built", "image", "why"),
    [
        ({"kubernetes.io/arch": "amd64"}, "amd64", ("amd64",), None, ""),
        ({"kubernetes.io/arch": "arm64"}, "arm64", ("amd64",), None, ARM),
        ({}, "arm64", ("amd64",), None, ARM),
        ({}, "", ("amd64",), None, ""),
        ({"kubernetes.io/arch": "arm64"}, "arm64", ("amd64", "arm64"), None, ""),
        ({"kubernetes.io/arch": "arm64"}, "arm64", ("amd64",), "own:1", ""),
    ],
)
def test_nodes_with_a_cpu_that_the_image_is_not_built_for_are_left_out(
    labels: dict[str, str], reported: str, built: tuple[str, ...], image: str | None, why: str
) -> None:
    item = node(GFD | labels)
    item["status"]["nodeInfo"] = {"architecture": reported} if reported else {}
    found = unfit(node_facts(item, image_architectures=built), spec(image=image), {})
    assert found.startswith(why)
    assert bool(found) is bool(why)


def test_a_job_with_an_image_of_its_own_shares_no_answer_with_one_without() -> None:
    snapshot = cluster(8)
    arm = replace(snapshot.nodes[0], architecture="arm64")
    capacity = Capacity(replace(snapshot, nodes=(arm,)), ())
    usual, own = make_job(GPUS), make_job(GPUS | {"image": "own:1"})
    assert capacity.inventory(usual).nodes == ()
    assert ARM in capacity.inventory(usual).warnings[0]
    assert [each.name for each in capacity.inventory(own).nodes] == ["node-0"]


def test_init_containers_and_sidecars_count_as_the_scheduler_counts_them() -> None:
    containers = [
        {
            "name": "fetch",
            "image": "f",
            "resources": {"limits": {"memory": "4Gi", "ephemeral-storage": "9G"}},
        },
        {
            "name": "beside",
            "image": "b",
            "restartPolicy": "Always",
            "resources": {"requests": {"cpu": 2}},
        },
    ]
    own = spec(
        podTemplate={"spec": {"initContainers": containers}},
        resources={"requests": {"ephemeral-storage": "5G"}},
    )
    assert pod_amounts(own, GPU_PLAN) == {
        "nvidia.com/gpu": 4.0,
        "cpu": 3.0,
        "memory": 4 * 2.0**30,
        "ephemeral-storage": 9e9,
    }
    assert extra_amounts(own) == {"ephemeral-storage": 9e9}
