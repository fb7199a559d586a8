"""GPUs as their labels name them: AMD's, MIG instances, and what an inventory declares of links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.text.units import GIB, MIB
from grpo_planner.hardware.inventory import Inventory, Node, allocatable_memory, declared_inventory
from grpo_planner.hardware.inventory_file import InventoryInvalid, parse_inventory
from grpo_planner.hardware.pools import build_pools
from grpo_planner.hardware.products import UNKNOWN, lookup_product, table
from grpo_planner.plan import plan_job
from tests.unit.planning import H100, LLAMA_1B, nodes, plan, spec

MIG = "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"
GROUP = {"gpuProduct": H100, "gpusPerNode": 8, "hostMemoryGiB": 512, "cpu": 128}


def group(**changes: object) -> Node:
    """The one node of an inventory file."""
    (node,) = parse_inventory({"nodes": [GROUP | changes]}).nodes
    return node


@pytest.mark.parametrize(
    ("built_in", "reserved_mib"),
    [
        # Examples of GKE's own page and calculator: 4 GiB, 8 GiB and 150 GiB.
        (4, 1024 + 100),
        (8, 1024 + 819.2 + 100),
        (150, 9.86 * 1024 + 100 - 102.4),
        (0, 0),
    ],
)
def test_a_file_s_node_has_what_a_kubelet_leaves_to_pods(
    built_in: float, reserved_mib: float
) -> None:
    node = group(hostMemoryGiB=built_in)
    reserved = built_in * GIB - node.host_memory_total
    assert reserved == pytest.approx(reserved_mib * MIB, abs=4 * MIB)
    assert node.host_memory_free == node.host_memory_total


@given(st.integers(0, 2**45), st.integers(0, 2**40))
def test_a_node_with_more_memory_leaves_more_to_pods(built_in: int, more: int) -> None:
    assert 0 <= allocatable_memory(built_in) <= allocatable_memory(built_in + more)
    assert allocatable_memory(built_in) <= built_in


@pytest.mark.parametrize(
    ("label", "known"),
    [
        ("AMD_Instinct_MI300X_OAM", "AMD-Instinct-MI300X"),
        ("AMD_Instinct_MI325X_OAM", "AMD-Instinct-MI325X"),
        ("AMD_Instinct_MI210", "AMD-Instinct-MI210"),
        ("AMD-Instinct-MI300X", "AMD-Instinct-MI300X"),
    ],
)
def test_amd_gpus_are_known_by_the_labels_that_its_labeller_writes(label: str, known: str) -> None:
    assert lookup_product(label) == table()[known]
    assert lookup_product("AMD_Instinct_MI300") == UNKNOWN, "the match ends at a word"


@pytest.mark.parametrize("label", ["AMD_Instinct_MI300X_OAM", "AMD-Instinct-MI300X"])
def test_a_files_amd_gpus_are_amd_resources(label: str) -> None:
    node = group(gpuProduct=label)
    assert node.gpu_resource == "amd.com/gpu"
    assert node.node_selector == (("amd.com/gpu.product-name", label),)
    chosen = plan_job(spec(LLAMA_1B, image="trainer:1"), Inventory((node,))).chosen
    assert chosen is not None
    assert chosen.gpu_resource == "amd.com/gpu"
    there = declared_inventory(
        spec(
            LLAMA_1B,
            placement__provisioning="CreatePods",
            placement__gpuProduct=label,
            placement__gpusPerNode=8,
            placement__nodes=1,
            placement__nodeSelector={"pool": "amd"},
        ).placement
    )
    assert there.nodes[0].gpu_resource == "amd.com/gpu"


def test_a_pod_takes_one_mig_instance_at_its_own_speed() -> None:
    node = group(gpuProduct=MIG, gpusPerNode=4)
    assert (node.gpus_free, node.gpus_total) == (1, 1)
    chosen = plan(spec(LLAMA_1B), node)
    assert chosen.gpus_per_node == 1
    assert any("a pod takes one MIG instance of its node" in text for text in chosen.warnings)
    created = spec(
        LLAMA_1B,
        placement__provisioning="CreatePods",
        placement__gpuProduct=MIG,
        placement__gpusPerNode=4,
        placement__nodes=2,
        placement__nodeSelector={"pool": "mig"},
    )
    (there,) = declared_inventory(created.placement).nodes
    assert (there.gpus_free, there.gpus_total, there.count) == (1, 1, 2)
    whole, instance = lookup_product("NVIDIA-A100-SXM4-80GB"), lookup_product(MIG)
    assert instance.teraflops == pytest.approx(whole.teraflops / 7)
    assert instance.bandwidth == pytest.approx(whole.bandwidth / 8)
    assert (instance.memory_mib, instance.capability) == (9728, whole.capability)
    half = lookup_product("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb")
    assert half.teraflops == pytest.approx(whole.teraflops * 3 / 7)
    assert half.bandwidth == pytest.approx(whole.bandwidth / 2)
    pro = "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"
    for card, profile in (("NVIDIA-A30", "1g.6gb"), (pro, "1g.24gb")):
        quarter = lookup_product(f"{card}-MIG-{profile}")
        assert quarter.teraflops == pytest.approx(lookup_product(card).teraflops / 4)
    slow, fast = (
        plan(spec(LLAMA_1B), node),
        plan(spec(LLAMA_1B), group(gpuProduct="NVIDIA-A100-SXM4-80GB")),
    )
    assert (slow.estimated_step_seconds or 0) > 4 * (fast.estimated_step_seconds or 0)


def test_a_file_declares_links_and_the_slowest_of_a_pool_counts() -> None:
    file = {
        "nodes": [
            GROUP | {"interconnect": {"nodeGBps": 25}},
            GROUP | {"interconnect": {"nodeGBps": 12.5, "gpuGBps": 200}},
            GROUP,
        ]
    }
    (pool,), _ = build_pools(parse_inventory(file), spec(LLAMA_1B))
    assert (pool.hardware.node_network, pool.hardware.link) == (12.5, 200)
    (plain,), _ = build_pools(parse_inventory({"nodes": [GROUP]}), spec(LLAMA_1B))
    assert (plain.hardware.node_network, plain.hardware.link) == (0, table()[H100].link)
    with pytest.raises(
        InventoryInvalid,
        match=r"nodes\.0\.interconnect\.nodeGbps|nodes\[0\]\.interconnect\.nodeGbps",
    ):
        parse_inventory({"nodes": [GROUP | {"interconnect": {"nodeGbps": 25}}]})


def test_the_network_between_nodes_is_that_of_machines_with_such_gpus() -> None:
    assert lookup_product(H100).network == 50
    assert lookup_product("NVIDIA-A100-SXM4-80GB").network == 25
    assert lookup_product("NVIDIA-B200").network == 50
    for label in ("NVIDIA-L4", "Tesla-T4", "NVIDIA-H100-PCIe", "NVIDIA-Future"):
        assert lookup_product(label).network < 2, label


def test_links_are_no_reason_to_keep_equal_nodes_apart() -> None:
    merged = Inventory(
        (nodes(1, 8, H100, node_gbps=25.0), nodes(2, 8, H100), nodes(3, 8, H100))
    ).with_merged_nodes
    assert sorted(node.count for node in merged.nodes) == [1, 5]
