"""GPU products: memory, speed and generation of the card that a label names.

A node's labels carry a name and at best MiB, while a plan must know how fast and how capable a card is. The data is
products.yaml.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from grpo_api.quantity import GIB, MIB

from .generations import Capability

BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability from which tensor cores multiply bfloat16."""

NETWORK_GB_PER_S = 50.0
"""Bandwidth between nodes per GPU and direction, of a 400 Gbit/s network card; an assumption."""

TORCH_SHARE, TORCH_RESERVE = 0.996, round(0.4 * GIB)
"""torch sees 99.6 % of a label's memory less 0.4 GiB; fits the totals in out-of-memory messages of twelve products."""


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
    known: bool = True
    """False when the numbers are guesses for an unknown product."""

    @property
    def bfloat16(self) -> bool:
        """Whether matrix products run in bfloat16; taken for granted where the capability isn't known."""
        return self.capability is None or self.capability >= BFLOAT16_CAPABILITY


UNKNOWN = Product(memory_mib=0, teraflops=100, bandwidth=600, link=25, capability=None, known=False)
"""A modest data-centre card, for labels that the table doesn't have."""


@cache
def table() -> dict[str, Product]:
    """All products by the beginning of their label."""
    rows = yaml.safe_load(files(__package__).joinpath("products.yaml").read_text(encoding="utf-8"))
    return {name: _product(*row) for name, row in rows.items()}


def _product(memory_mib: int, teraflops: float, bandwidth: float, link: float, capability: float | None) -> Product:
    """One row of the table; YAML reads `8.6` as a number."""
    major, _, minor = str(capability or "").partition(".")
    return Product(
        memory_mib=memory_mib, teraflops=teraflops, bandwidth=bandwidth, link=link,
        capability=(int(major), int(minor)) if major else None,
    )  # fmt: skip


@cache
def lookup(label: str) -> Product:
    """The product whose name is the longest that the label begins with; UNKNOWN without one.

    The match ends at a word: `NVIDIA-A10` does not begin `NVIDIA-A100-SXM4-40GB`.
    """
    found = [name for name in table() if label == name or label.startswith(f"{name}-")]
    return table()[max(found, key=len)] if found else UNKNOWN


def usable_bytes(memory_mib: int) -> int:
    """Bytes that torch sees on a GPU whose label says `memory_mib`."""
    return max(0, round(memory_mib * MIB * TORCH_SHARE) - TORCH_RESERVE)
