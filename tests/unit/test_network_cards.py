"""Which extended resources are taken as network cards: their names are a cluster's choice."""

import pytest

from grpo_api.pods.containers import ResourceRequirements

CARDS = (
    "rdma/hca", "rdma/hca_shared_devices_a", "nvidia.com/hostdev", "nvidia.com/mlnxnics",
    "nvidia.com/rdma_shared_device_a", "vpc.amazonaws.com/efa", "openshift.io/sriov_nic",
    "networking.gke.io.networks/rdma-0", "mellanox.com/cx6_rdma", "intel.com/ib_sriov",
)  # fmt: skip
OTHERS = (
    "example.com/default", "example.com/fpga", "smarter-devices/fuse", "hugepages-2Mi", "cpu",
    "example.com/library", "squat.ai/tun", "example.com/calibration", "nvidia.com/panic",
)  # fmt: skip


@pytest.mark.parametrize("name", CARDS + OTHERS)
def test_a_resource_is_a_network_card_by_the_words_of_its_name(name: str) -> None:
    resources = ResourceRequirements.model_validate(
        {"requests": {name: "1"}, "limits": {name: "1"}}
    )
    assert resources.network_cards == ([name] if name in CARDS else [])
