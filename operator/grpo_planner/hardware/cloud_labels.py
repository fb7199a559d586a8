"""Knows GPU products by the labels that clouds and autoscalers put on nodes.

NVIDIA's GPU feature discovery names the product itself, and goes first. A managed cluster often
does not run it. Its nodes have the cloud's label, though, or at least the type of their machine.
Each row of ROWS gives such a value the product of products.yaml that it means.

A row is about a whole GPU. Machines with a part of one (g6f, Standard_NV6ads_A10_v5, the smaller
ones of RTXPRO6000BSE_v6) are in no row, so their GPUs stay unknown.

Sources: the instance types page of Karpenter (karpenter-provider-aws, website/…/instance-types.md),
and the accelerator types of GKE's page "About GPUs". Those of Azure are in the pages of its sizes
NC, ND and NV. No cluster of these clouds was at hand.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

GKE_ACCELERATOR = "cloud.google.com/gke-accelerator"
GKE_COUNT = "cloud.google.com/gke-accelerator-count"
GKE_SHARING = "cloud.google.com/gke-gpu-sharing-strategy"
"""There where several pods share a GPU: time-sharing or mps."""
GKE_MAX_CLIENTS = "cloud.google.com/gke-max-shared-clients-per-gpu"
"""How many pods share a GPU at most, and so how often the node offers each of its GPUs."""
GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"
"""There on nodes with MIG: the profile, such as 1g.5gb."""
KARPENTER_NAME = "karpenter.k8s.aws/instance-gpu-name"
KARPENTER_MEMORY = "karpenter.k8s.aws/instance-gpu-memory"
"""MiB of one GPU as AWS counts them. It distinguishes GPUs of one name; what torch can use follows
from the product."""
KARPENTER_COUNT = "karpenter.k8s.aws/instance-gpu-count"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_COUNTS = {GKE_ACCELERATOR: GKE_COUNT, KARPENTER_NAME: KARPENTER_COUNT}
"""The label that counts the GPUs, by the one that names them."""
_PROFILE = r"[1-9]g\.[1-9][0-9]{0,2}gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A value of a label, and the product that it means."""

    label: str
    value: str
    """A regular expression for the whole value."""
    product: str
    gpus: int = 0
    """GPUs of such a node; 0 where another label counts them."""
    memory: str = ""
    """A regular expression for KARPENTER_MEMORY; empty where the name says enough."""

    def selector(self, labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """The labels by which a node is of this row; none if it isn't."""
        patterns = {self.label: self.value}
        if self.memory:
            patterns[KARPENTER_MEMORY] = self.memory
        for label, pattern in patterns.items():
            if not re.fullmatch(pattern, labels.get(label, "")):
                return ()
        return tuple((label, labels[label]) for label in sorted(patterns))


def _gke(value: str, product: str) -> Row:
    return Row(label=GKE_ACCELERATOR, value=value, product=product)


def _karpenter(name: str, memory: str, product: str) -> Row:
    return Row(label=KARPENTER_NAME, value=name, memory=memory, product=product)


def _machine(value: str, gpus: int, product: str) -> Row:
    return Row(label=INSTANCE_TYPE, value=value, gpus=gpus, product=product)


ROWS = (
    _gke("nvidia-tesla-t4", "Tesla-T4"),
    _gke("nvidia-tesla-p100", "Tesla-P100"),
    _gke("nvidia-tesla-v100", "Tesla-V100-SXM2-16GB"),
    _gke("nvidia-l4", "NVIDIA-L4"),
    _gke("nvidia-tesla-a100", "NVIDIA-A100-SXM4-40GB"),
    _gke("nvidia-a100-80gb", "NVIDIA-A100-SXM4-80GB"),
    _gke("nvidia-h100(-mega)?-80gb", "NVIDIA-H100-80GB-HBM3"),
    _gke("nvidia-h200-141gb", "NVIDIA-H200"),
    _gke("nvidia-b200", "NVIDIA-B200"),
    _gke("nvidia-gb200", "NVIDIA-GB200"),
    _gke("nvidia-gb300", "NVIDIA-GB300"),
    _gke("nvidia-rtx-pro-6000", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    _karpenter("t4", "16384", "Tesla-T4"),
    _karpenter("v100", "16384", "Tesla-V100-SXM2-16GB"),
    _karpenter("v100", "32768", "Tesla-V100-SXM2-32GB"),
    _karpenter("a10g", "22888|24576", "NVIDIA-A10G"),
    _karpenter("l4", "22888|24576", "NVIDIA-L4"),
    _karpenter("l40s", "45776|49152", "NVIDIA-L40S"),
    _karpenter("a100", "40960", "NVIDIA-A100-SXM4-40GB"),
    _karpenter("a100", "81920", "NVIDIA-A100-SXM4-80GB"),
    _karpenter("h100", "81920", "NVIDIA-H100-80GB-HBM3"),
    _karpenter("h200", "144384", "NVIDIA-H200"),
    _karpenter("b200", "183359", "NVIDIA-B200"),
    _karpenter("b300", "275040", "NVIDIA-B300"),
    _karpenter("rtx-pro-server-6000", "98304", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    _machine(r"g4dn\.(2|4|8|16)?xlarge", 1, "Tesla-T4"),
    _machine(r"g4dn\.12xlarge", 4, "Tesla-T4"),
    _machine(r"g4dn\.metal", 8, "Tesla-T4"),
    _machine(r"g5\.(2|4|8|16)?xlarge", 1, "NVIDIA-A10G"),
    _machine(r"g5\.(12|24)xlarge", 4, "NVIDIA-A10G"),
    _machine(r"g5\.48xlarge", 8, "NVIDIA-A10G"),
    _machine(r"g6\.(2|4|8|16)?xlarge|gr6\.[48]xlarge", 1, "NVIDIA-L4"),
    _machine(r"g6\.(12|24)xlarge", 4, "NVIDIA-L4"),
    _machine(r"g6\.48xlarge", 8, "NVIDIA-L4"),
    _machine(r"g6e\.(2|4|8|16)?xlarge", 1, "NVIDIA-L40S"),
    _machine(r"g6e\.(12|24)xlarge", 4, "NVIDIA-L40S"),
    _machine(r"g6e\.48xlarge", 8, "NVIDIA-L40S"),
    _machine(r"g7e\.[248]xlarge", 1, "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    _machine(r"g7e\.12xlarge", 2, "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    _machine(r"g7e\.24xlarge", 4, "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    _machine(r"g7e\.48xlarge", 8, "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    _machine(r"p3dn\.24xlarge", 8, "Tesla-V100-SXM2-32GB"),
    _machine(r"p4d\.24xlarge", 8, "NVIDIA-A100-SXM4-40GB"),
    _machine(r"p4de\.24xlarge", 8, "NVIDIA-A100-SXM4-80GB"),
    _machine(r"p5\.4xlarge", 1, "NVIDIA-H100-80GB-HBM3"),
    _machine(r"p5\.48xlarge", 8, "NVIDIA-H100-80GB-HBM3"),
    _machine(r"p5en?\.48xlarge", 8, "NVIDIA-H200"),
    _machine(r"p6-b200\.48xlarge", 8, "NVIDIA-B200"),
    _machine(r"p6-b300\.48xlarge", 8, "NVIDIA-B300"),
    _machine(r"p6e-gb200\.36xlarge", 4, "NVIDIA-GB200"),
    _machine("Standard_NC(4|8|16)as_T4_v3", 1, "Tesla-T4"),
    _machine("Standard_NC64as_T4_v3", 4, "Tesla-T4"),
    _machine("Standard_NV36adm?s_A10_v5", 1, "NVIDIA-A10"),
    _machine("Standard_NV72ads_A10_v5", 2, "NVIDIA-A10"),
    _machine("Standard_NC24ads_A100_v4", 1, "NVIDIA-A100-80GB-PCIe"),
    _machine("Standard_NC48ads_A100_v4", 2, "NVIDIA-A100-80GB-PCIe"),
    _machine("Standard_NC96ads_A100_v4", 4, "NVIDIA-A100-80GB-PCIe"),
    _machine("Standard_ND96asr_v4", 8, "NVIDIA-A100-SXM4-40GB"),
    _machine("Standard_ND96amsr_A100_v4", 8, "NVIDIA-A100-SXM4-80GB"),
    _machine("Standard_NC40ads_H100_v5", 1, "NVIDIA-H100-NVL"),
    _machine("Standard_NC80adis_H100_v5", 2, "NVIDIA-H100-NVL"),
    _machine("Standard_ND96isrf?_H100_v5", 8, "NVIDIA-H100-80GB-HBM3"),
    _machine("Standard_ND96isrf?_H200_v5", 8, "NVIDIA-H200"),
    _machine("Standard_ND128isr_NDR_GB200_v6", 4, "NVIDIA-GB200"),
    _machine("Standard_ND128isr_GB300_v6", 4, "NVIDIA-GB300"),
)
"""The first row that a node is of counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudGPUs:
    """What a node's labels say of its GPUs, where NVIDIA's own are missing."""

    product: str
    """As NVIDIA's label would name it."""
    selector: tuple[tuple[str, str], ...]
    """Labels that tie a pod to nodes with this GPU, sorted."""
    count: int
    """GPUs of the node, or 0 where no label counts them."""
    is_shared: bool = False
    """True if pods get parts of GPUs that no product is named after."""


def cloud_gpus(labels: Mapping[str, str]) -> CloudGPUs | None:
    """What a node's labels say of its GPUs; None where they name no product of a row."""
    for row in ROWS:
        if selector := row.selector(labels):
            return _gpus_of_row(row, selector, labels)
    return None


def _gpus_of_row(
    row: Row, selector: tuple[tuple[str, str], ...], labels: Mapping[str, str]
) -> CloudGPUs:
    product, count = row.product, row.gpus or small_number(labels.get(_COUNTS[row.label], ""))
    profile = labels.get(GKE_PARTITION, "")
    if re.fullmatch(_PROFILE, profile):
        # A GPU has several instances, so that the number of GPUs says nothing of theirs.
        product, count = f"{product}-MIG-{profile}", 0
        selector = tuple(sorted((*selector, (GKE_PARTITION, profile))))
    is_shared = bool(profile) and product == row.product
    return CloudGPUs(product=product, selector=selector, count=count, is_shared=is_shared)


def small_number(text: str) -> int:
    """The number that a label writes; 0 for anything else, and for one that no node can have."""
    return int(text) if re.fullmatch("[0-9]{1,7}", text) else 0
