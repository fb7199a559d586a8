"""The trainer's side of a proof: what the engine's hashes must be, and which of them aren't."""

from collections.abc import Mapping, Sequence

import torch

from .layout import Strided, part
from .multilinear import multilinear_hash


def expected_prints(tensor: torch.Tensor, sources: Sequence[Strided | None], seed: int) -> list[int]:
    """Hashes of the parts of a sent tensor that the engine writes somewhere; zeros, which it writes itself, hash to 0.

    Args:
        tensor: as it was sent, contiguous.
        sources: its parts by `weights_learn`.
        seed: the one that the engine is asked with.
    """
    return [0 if source is None else multilinear_hash(part(tensor, source), seed) for source in sources]


def differing(wanted: Mapping[str, list[int]], found: Mapping[str, list[int]]) -> list[str]:
    """Names whose hashes are not the wanted ones, or are missing, or that nobody sent."""
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
