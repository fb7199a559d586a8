"""GPU nodes as clouds label them: which product each is taken for, and what is planned there."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_operator.admission.capacity import Capacity, has_gpus_for
from grpo_operator.admission.inventory import cards, node_facts, planner_node
from grpo_operator.admission.snapshot import Snapshot
from grpo_planner.hardware.cloud_labels import ROWS
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.hardware.products import lookup_product
from grpo_planner.plan import plan_job
from tests.generated import cases
from tests.unit.operator_world import GPU_PLAN, make_job
from tests.unit.planning import LLAMA_1B, spec
from tests.unit.queue_world import GPUS
from tests.unit.test_operator_inventory import GFD, node

GKE, KARPENTER = "cloud.google.com/gke", "karpenter.k8s.aws/instance-gpu"
TYPE = "node.kubernetes.io/instance-type"


def gke(accelerator: str, count: int, **more: str) -> tuple[dict[str, str], int]:
    labels = {f"{GKE}-accelerator": accelerator, f"{GKE}-accelerator-count": str(count)}
    return labels | {
        f"{GKE}-{name.replace('_', '-')}": value for name, value in more.items()
    }, count


def karpenter(name: str, memory: int, count: int) -> tuple[dict[str, str], int]:
    labels = {"name": name, "memory": str(memory), "count": str(count), "manufacturer": "nvidia"}
    return {f"{KARPENTER}-{key}": value for key, value in labels.items()}, count


def machine(kind: str, count: int, **more: str) -> tuple[dict[str, str], int]:
    return {
        TYPE: kind,
        **{f"kubernetes.azure.com/{key}": value for key, value in more.items()},
    }, count


def arm(group: tuple[dict[str, str], int]) -> tuple[dict[str, str], int]:
    return group[0] | {"kubernetes.io/arch": "arm64"}, group[1]


Group = tuple[dict[str, str], int]
"""Labels of a node, and how many GPUs it offers."""

CLUSTERS: dict[str, tuple[list[Group], str, dict[str, str], list[str]]] = {
    "GKE with H100, and L4 that are shared": (
        [
            gke("nvidia-h100-mega-80gb", 8),
            (gke("nvidia-l4", 1, gpu_sharing_strategy="time-sharing")[0], 4),
        ],
        "NVIDIA-H100-80GB-HBM3",
        {f"{GKE}-accelerator": "nvidia-h100-mega-80gb"},
        ["NVIDIA-L4 are shared"],
    ),
    "GKE with MIG": (
        [(gke("nvidia-a100-80gb", 1, gpu_partition_size="2g.20gb")[0], 3)],
        "NVIDIA-A100-SXM4-80GB-MIG-2g.20gb",
        {f"{GKE}-accelerator": "nvidia-a100-80gb", f"{GKE}-gpu-partition-size": "2g.20gb"},
        [],
    ),
    "EKS with Karpenter": (
        [karpenter("a100", 81920, 8), karpenter("t4", 16384, 1)],
        "NVIDIA-A100-SXM4-80GB",
        {f"{KARPENTER}-name": "a100", f"{KARPENTER}-memory": "81920"},
        ["bfloat16"],
    ),
    "EKS with managed nodes": (
        [machine("g6e.12xlarge", 4), machine("m7i.large", 0)],
        "NVIDIA-L40S",
        {TYPE: "g6e.12xlarge"},
        [],
    ),
    "EKS with managed nodes of RTX PRO 6000, and GB200 whose CPUs are of ARM": (
        [machine("g7e.12xlarge", 2), arm(machine("p6e-gb200.36xlarge", 4))],
        "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        {TYPE: "g7e.12xlarge"},
        ["arm64"],
    ),
    "AKS": (
        [machine("Standard_ND96isr_H200_v5", 8, accelerator="nvidia")],
        "NVIDIA-H200",
        {TYPE: "Standard_ND96isr_H200_v5"},
        [],
    ),
    "bare nodes with NVIDIA's labels, which go first": (
        [(GFD | gke("nvidia-l4", 8)[0] | machine("g5.48xlarge", 8)[0], 8)],
        "NVIDIA-H100-80GB-HBM3",
        {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        [],
    ),
}  # fmt: skip


def snapshot(*groups: Group) -> Snapshot:
    items = []
    for number, (labels, gpus) in enumerate(groups):
        item = node(labels, {"nvidia.com/gpu": str(gpus)} if gpus else {})
        items.append(item | {"metadata": {**item["metadata"], "name": f"node-{number}"}})
    return Snapshot(nodes=tuple(map(node_facts, items)))


def seen(*groups: Group) -> Inventory:
    return Capacity(snapshot(*groups), ()).inventory(make_job(GPUS))


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cloud_is_planned_by_its_own_labels(name: str) -> None:
    groups, product, selector, remarks = CLUSTERS[name]
    result = plan_job(spec(LLAMA_1B), seen(*groups))
    chosen = result.chosen
    assert chosen is not None, result.message
    assert (chosen.gpu_product, chosen.node_selector) == (product, selector)
    assert chosen.gpu_resource == "nvidia.com/gpu"
    for remark in remarks:
        assert any(remark in warning for warning in chosen.warnings), chosen.warnings


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.label}={row.value}")
def test_every_row_names_a_product_whose_memory_is_known(row: Any) -> None:
    product = lookup_product(row.product)
    assert product.is_known
    assert product.memory_mib


@pytest.mark.parametrize(
    ("labels", "offered"),
    [
        (karpenter("l4", 2861, 0)[0], 1),
        (machine("g6f.xlarge", 1)[0], 1),
        (machine("Standard_NV6ads_A10_v5", 1)[0], 1),
        (machine("Standard_NC36ds_xl_RTXPRO6000BSE_v6", 1)[0], 1),
        (gke("nvidia-tesla-k80", 1)[0], 1),
        (machine("xp5.48xlarge", 8)[0], 8),
        ({"kubernetes.azure.com/accelerator": "nvidia"}, 1),
    ],
)
def test_parts_of_gpus_and_unknown_ones_stay_unknown(labels: dict[str, str], offered: int) -> None:
    (kind,), (warning,) = cards(node_facts(node(labels, {"nvidia.com/gpu": str(offered)})))
    assert (kind.product, kind.memory_mib, kind.selector) == ("", 0, ())
    assert "set placement.gpuMemory" in warning


@pytest.mark.parametrize(
    ("labels", "offered"),
    [
        (gke("nvidia-l4", 1)[0], 4),
        (gke("nvidia-l4", 1, gpu_sharing_strategy="mps")[0], 1),
        (gke("nvidia-a100-80gb", 1, gpu_partition_size="some")[0], 7),
        (karpenter("a100", 40960, 8)[0], 56),
        (machine("p4d.24xlarge", 8)[0], 56),
    ],
)
def test_a_node_that_offers_more_than_its_gpus_is_left_out(
    labels: dict[str, str], offered: int
) -> None:
    found, (warning,) = cards(node_facts(node(labels, {"nvidia.com/gpu": str(offered)})))
    assert found == []
    assert "so their memory can't be counted on" in warning


def test_a_pod_that_selects_one_machine_has_no_room_on_another_with_the_same_gpu() -> None:
    small, large = seen(machine("g5.12xlarge", 4), machine("g5.48xlarge", 8)).nodes
    plan = GPU_PLAN.model_copy(
        update={"gpu_product": "NVIDIA-A10G", "node_selector": {TYPE: "g5.48xlarge"}}
    )
    assert has_gpus_for(large, plan)
    assert not has_gpus_for(small, plan)
    labelled_since = replace(large, node_selector=(("nvidia.com/gpu.product", "NVIDIA-A10G"),))
    assert has_gpus_for(labelled_since, plan)


KEYS = [
    f"{GKE}-accelerator", f"{GKE}-accelerator-count", f"{GKE}-gpu-partition-size",
    f"{GKE}-gpu-sharing-strategy", f"{GKE}-max-shared-clients-per-gpu",
    f"{KARPENTER}-name", f"{KARPENTER}-memory",
    f"{KARPENTER}-count", TYPE, "nvidia.com/gpu.product", "nvidia.com/gpu.memory",
    "nvidia.com/gpu.count", "nvidia.com/gpu.replicas", "nvidia.com/gpu.compute.major",
    "nvidia.com/gpu.compute.minor", "kubernetes.io/arch", "grpo.dev/node-gbps",
]  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=70),
    st.sampled_from(
        ["", "0", "9" * 5000, "-1", "１２", "²", "1e400", "NaN", "1g.5gb", "nvidia-l4"]
    ),
    st.sampled_from(["a100", "40960", "p5.48xlarge", "NVIDIA-H100-80GB-HBM3", "81559", "8", "9"]),
)


@given(labels=st.dictionaries(st.sampled_from(KEYS), VALUES), gpus=st.integers(0, 20))
def test_dirty_labels_break_nothing_and_promise_nothing(labels: dict[str, str], gpus: int) -> None:
    facts = node_facts(node(labels, {"nvidia.com/gpu": str(gpus)}))
    found, _ = cards(facts)
    for kind in found:
        assert 0 < kind.count <= 20
        assert 0 <= kind.memory_mib < 10**7
        assert all(labels[key] == value for key, value in kind.selector)
        planner_node(facts, kind, {})


@settings(max_examples=cases(100, gate=10))
@given(labels=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1), gpus=st.integers(1, 9))
def test_dirty_labels_are_planned_or_refused_with_words(labels: dict[str, str], gpus: int) -> None:
    result = plan_job(spec(LLAMA_1B), seen((labels, gpus)))
    assert result.chosen or result.message
