"""Knows GPU products: the memory, speed and generation of the card that a node's label names, and
its short names in inventories and specs.

A node's labels carry a name and at best the memory in MiB. A plan must know how fast and how
capable a card is. The data is products.yaml.

A generation says whether the trainer's image can compute on a card, and whether that has been
shown. A build of torch has kernels for some compute capabilities. On any other card the first
kernel ends with "no kernel image is available". The image's torch is pinned, so a plan can be
refused before anything is started.

Users write `8xH100`, while a node's label, and so a plan, names one product, such as
`NVIDIA-H100-80GB-HBM3`. So short names are expanded. For a misspelled name the nearest ones are
suggested.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

from grpo_api.text.units import GIB, MIB

from ..tables import read_data

Capability = tuple[int, int]
"""CUDA compute capability: major and minor version."""

IMAGE: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
"""What the image's torch is compiled for; a test holds it to the pinned torch's own list."""

BFLOAT16: Capability = (8, 0)
"""From where on tensor cores multiply bfloat16. Before it all would run in float32, which is
untested."""

OWN_IMAGE = (
    "set spec.placement.gpuProduct to other GPUs, or spec.image to an image of yours "
    "whose torch has them"
)
"""What helps where the image can't compute."""


@lru_cache(maxsize=1024)
def obstacle_message(product: str, resource: str, capability: Capability | None) -> str:
    """Why the image isn't known to compute on a GPU; empty where it is, and where the card's
    capability isn't known."""
    name = product or resource
    if resource.startswith("amd.com/") or product.startswith("AMD"):
        return f"{name} is an AMD GPU, and the trainer's image has torch for CUDA alone"
    if capability is None:
        return ""
    has_capability = f"{name} has compute capability {format_capability(capability)}"
    major, minor = capability
    # Code runs on its own major version from its own minor version on (CUDA programming guide,
    # compute capability).
    if not any(built == major and least <= minor for built, least in IMAGE):
        supported = ", ".join(map(format_capability, IMAGE))
        return f"{has_capability}, and the torch of the trainer's image is built for {supported}"
    if capability < BFLOAT16:
        return (
            f"{has_capability} and so no bfloat16, and the trainer has not been shown to run in "
            "float32 on GPUs"
        )
    return ""


def format_capability(capability: Capability) -> str:
    """`8.6`."""
    major, minor = capability
    return f"{major}.{minor}"


NVLINK_GB_PER_S = 150.0
"""Links between the GPUs of one node that only NVLink reaches."""
CARDS_GB_PER_S = {9: 50.0, 8: 25.0}
"""Network per GPU of machines with NVLink by the GPU's major version, later ones as 9: a 400 or 200
Gbit/s RDMA card for each (assumed)."""
SHARED_GB_PER_S = 1.6
"""Network per GPU of other machines: 100 Gbit/s between eight (assumed)."""
PCIE_GB_PER_S = 22.0
"""Between host and device over PCIe (assumed)."""

MIG_PROFILE = re.compile(r"-MIG-(\d+)g\.(\d+)gb")
"""The profile in the label of a MIG instance, such as `1g.10gb`: compute slices and memory."""
A100_MIB = 40_000
"""Memory of the smallest card with seven compute slices."""
WORKSTATION_BLACKWELL: Capability = (12, 0)
"""Cards of this generation have four compute slices: 1g.24gb of 96 GB."""
MIB_PER_GB = 1024
MIG_SHARE = 0.95
"""An instance's label has 95 % of what its profile says: 9728 MiB of 10 GB, 4864 of 5 GB (GPU
feature discovery)."""

TORCH_SHARE = 0.996
TORCH_RESERVE = round(0.4 * GIB)
"""torch sees 99.6 % of a label's memory less 0.4 GiB; fits the totals in out-of-memory messages of
twelve products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What is known of one kind of GPU."""

    memory_mib: int
    """Memory as the label says."""
    teraflops: float
    """Dense bfloat16 TFLOP/s, float32 where there is no bfloat16."""
    bandwidth: float
    """Device memory in GB/s."""
    link: float
    """To a neighbour in the same node, GB/s per direction."""
    capability: Capability | None
    """CUDA compute capability; None where it is unknown, or there is no CUDA."""
    host_link: float = PCIE_GB_PER_S
    """Between host and device in GB/s per direction."""
    node_network: float = 0.0
    """Network of a whole node as its inventory declares it, GB/s per direction; 0 when
    undeclared."""
    is_known: bool = True
    """False when the numbers are guesses for an unknown product."""

    @property
    def has_bfloat16(self) -> bool:
        """True if matrix products run in bfloat16; taken for granted where the capability isn't
        known."""
        return self.capability is None or self.capability >= BFLOAT16

    @property
    def network(self) -> float:
        """GB/s per GPU and direction between nodes, where no inventory declares it."""
        if self.link < NVLINK_GB_PER_S:
            return SHARED_GB_PER_S
        major = self.capability[0] if self.capability else 9
        return CARDS_GB_PER_S.get(min(major, 9), SHARED_GB_PER_S)


UNKNOWN = Product(
    memory_mib=0, teraflops=100, bandwidth=600, link=25, capability=None, is_known=False
)
"""A modest data-centre card, for labels that the table doesn't have."""

CPU_LABEL = "CPU"
"""In the place of a product's label in measured runs on CPUs."""
CPU = Product(memory_mib=0, teraflops=0.1, bandwidth=20, link=1, capability=(0, 0), is_known=False)
"""One process on CPUs, for times in comparison with a measured run (assumed)."""


@cache
def table() -> dict[str, Product]:
    """All products by the beginning of their label."""
    rows = read_data(__package__, "products.yaml")
    return {name: _product(row) for name, row in rows.items()}


def _product(row: Sequence[Any]) -> Product:
    """One row of the table; YAML reads `8.6` as a number."""
    memory_mib, teraflops, bandwidth, link, capability, *host_link = row
    major, _, minor = str(capability or "").partition(".")
    version = (int(major), int(minor)) if major else None
    return Product(
        memory_mib=memory_mib,
        teraflops=teraflops,
        bandwidth=bandwidth,
        link=link,
        capability=version,
        host_link=host_link[0] if host_link else PCIE_GB_PER_S,
    )


@cache
def lookup_product(label: str) -> Product:
    """The product whose name is the longest that the label begins with; UNKNOWN without one.

    The match ends at a word: `NVIDIA-A10` does not begin `NVIDIA-A100-SXM4-40GB`. AMD's labeller
    writes `_` for spaces: `AMD_Instinct_MI300X_OAM`. A MIG instance has its slices of the card.
    """
    name = label.replace("_", "-")
    products = [product for product in table() if f"{name}-".startswith(f"{product}-")]
    if not products:
        return UNKNOWN
    longest = max(products, key=len)
    card = table()[longest]
    mig = MIG_PROFILE.search(name)
    if mig is None:
        return card
    return _slice(card, slices=int(mig[1]), gigabytes=int(mig[2]))


def _slice(card: Product, slices: int, gigabytes: int) -> Product:
    """One MIG instance: its own of 7 compute slices (4 of an A30 or RTX PRO 6000) and 8 of memory;
    it has no link but the host's."""
    has_four = card.memory_mib < A100_MIB or card.capability == WORKSTATION_BLACKWELL
    all_slices = 4 if has_four else 7
    profile_mib = gigabytes * MIB_PER_GB
    share = min(1.0, profile_mib / card.memory_mib)
    memory_slices = max(1, round(8 * share))
    return replace(
        card,
        memory_mib=round(profile_mib * MIG_SHARE),
        teraflops=card.teraflops * slices / all_slices,
        bandwidth=card.bandwidth * memory_slices / 8,
        link=min(card.link, SHARED_GB_PER_S),
    )


def is_slice(label: str) -> bool:
    """True if a label names MIG instances: NCCL can't join two of one node, so a pod takes one."""
    return MIG_PROFILE.search(label) is not None


def resource_of(label: str) -> str:
    """The extended resource that a pod requests for one GPU of a product."""
    return "amd.com/gpu" if label.startswith("AMD") else "nvidia.com/gpu"


def usable_bytes(memory_mib: int) -> int:
    """Bytes that torch sees on a GPU whose label says `memory_mib`."""
    visible = round(memory_mib * MIB * TORCH_SHARE)
    return max(0, visible - TORCH_RESERVE)


USUAL = {
    "T4": "Tesla-T4",
    "P100": "Tesla-P100",
    "V100": "Tesla-V100-SXM2-16GB",
    "V100-32GB": "Tesla-V100-SXM2-32GB",
    "A100": "NVIDIA-A100-SXM4-80GB",
    "A100-40GB": "NVIDIA-A100-SXM4-40GB",
    "A100-80GB": "NVIDIA-A100-SXM4-80GB",
    "A100-PCIe": "NVIDIA-A100-80GB-PCIe",
    "A800": "NVIDIA-A800-SXM4-80GB",
    "A800-80GB": "NVIDIA-A800-SXM4-80GB",
    "A800-PCIe": "NVIDIA-A800-80GB-PCIe",
    "H100": "NVIDIA-H100-80GB-HBM3",
    "H100-80GB": "NVIDIA-H100-80GB-HBM3",
    "H100-SXM": "NVIDIA-H100-80GB-HBM3",
    "H200-SXM": "NVIDIA-H200",
    "GH200": "NVIDIA-GH200-480GB",
    "A6000": "NVIDIA-RTX-A6000",
    "A5000": "NVIDIA-RTX-A5000",
    "RTX-6000": "NVIDIA-RTX-6000-Ada-Generation",
    "RTX-6000-Ada": "NVIDIA-RTX-6000-Ada-Generation",
    "RTX-PRO-6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "RTX3090": "NVIDIA-GeForce-RTX-3090",
    "RTX4090": "NVIDIA-GeForce-RTX-4090",
    "RTX5090": "NVIDIA-GeForce-RTX-5090",
}
"""What a name without form or memory means: the one that is rented most, the larger where both
are."""

_MIG = re.compile(
    r"(?:nvidia\.com/)?(?P<card>.*?)-?(?:mig-)?(?P<profile>\d+g\.\d+gb)", re.IGNORECASE
)
"""A MIG instance by its profile, with or without its card: `1g.10gb`, `A100-1g.5gb`."""
_MIG_CARDS = {
    profile: label
    for label, profiles in {
        "NVIDIA-A30": ("1g.6gb", "2g.12gb", "4g.24gb"),
        "NVIDIA-A100-SXM4-40GB": ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
        "NVIDIA-H100-80GB-HBM3": ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
        "NVIDIA-H200": ("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    }.items()
    for profile in profiles
}
"""The card that a profile without one means (NVIDIA MIG user guide); A100s with 80 GB have the same
profiles as H100s."""

_MAKERS = re.compile("^(NVIDIA-|AMD-|Tesla-|GeForce-|Instinct-)+", re.IGNORECASE)
_LIKENESS = 0.5
_COUNTED = re.compile(r"(.+)[x:](\d+)")
"""How other tools count GPUs: `H100:8`."""


@cache
def short_names() -> dict[str, str]:
    """Labels by their short name: every label without its maker, and the usual names."""
    without_maker = {_MAKERS.sub("", label): label for label in table()}
    return without_maker | USUAL


def label_of(name: str) -> str | None:
    """The label that a name means: itself where a known product begins it; None where no product is
    called so.

    Capitals, and whether its words are parted by hyphens, underscores or spaces, make no difference
    to a short name.
    """
    if lookup_product(name).is_known:
        return name
    instance = _MIG.fullmatch(name)
    if instance is None:
        return _by_key().get(_key(name))
    card = _mig_card(instance["card"], instance["profile"].lower())
    return f"{card}-MIG-{instance['profile'].lower()}" if card else None


def _mig_card(name: str, profile: str) -> str | None:
    """The label of the card that a MIG instance is of; by its profile where no card is named."""
    usual = _MIG_CARDS.get(profile)
    if not name:
        return usual
    label = _by_key().get(_key(name))
    is_smaller_a100 = _key(name) == "A100" and usual == USUAL["A100-40GB"]
    return usual if is_smaller_a100 else label


@cache
def is_of_product(label: str, wanted: str) -> bool:
    """True if a spec that asks for a product takes GPUs with this label.

    The label begins with what is asked for, or is what a short name means. A short name without
    form or memory means all of them: `H100` takes `NVIDIA-H100-PCIe`, too. A product's whole name
    takes no other product: `NVIDIA-L4` is no `NVIDIA-L40S`.
    """
    if label.startswith(wanted) and wanted not in table():
        return True
    card, short = _key(label), _key(wanted)
    usual = _key(label_of(wanted) or wanted)
    return f"{card}-".startswith((f"{short}-", f"{usual}-"))


def unknown_product(name: str) -> str:
    """The sentence on a name that no product has, with those that are like it."""
    counted = _COUNTED.fullmatch(name)
    if counted and label_of(counted[1]):
        return f"the number of GPUs comes first: write {counted[2]}x{counted[1]}"
    names_by_key = {_key(short_name): short_name for short_name in short_names()}
    close_keys = get_close_matches(_key(name), names_by_key, n=3, cutoff=_LIKENESS)
    suggestion = ""
    if close_keys:
        similar = " or ".join(names_by_key[key] for key in close_keys)
        suggestion = f"did you mean {similar}? "
    return (
        f"{name} is no GPU product that the planner knows; {suggestion}`grpo gpus` lists them, and "
        "an inventory file can say gpuMemoryMiB of others"
    )


@cache
def _by_key() -> dict[str, str]:
    return {_key(short): label for short, label in short_names().items()}


def _key(name: str) -> str:
    hyphenated = re.sub("[-_ ]+", "-", name.strip())
    without_maker = _MAKERS.sub("", hyphenated).upper()
    # Some write `80G` for 80GB.
    return re.sub(r"(?<=\d)G$", "GB", without_maker)
