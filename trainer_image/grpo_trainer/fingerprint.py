"""A short name for the bytes of a tensor.

Exists so that ranks can compare what they hold by exchanging 16 bytes a tensor, and messages can show it. XXH3-128
(xxhash): as fast as memory, and for weights, which nobody forges, as good as a cryptographic hash; SHA-256 over the
model would cost as much as loading it. Called by proof.py and reference/store.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
import xxhash


def fingerprint(tensor: torch.Tensor) -> str:
    """32 hex digits over the tensor's bytes, whatever its dtype; copies a tensor from a GPU first."""
    data: Any = as_bytes(tensor.detach()).cpu().numpy()
    return xxhash.xxh3_128(data).hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, shape (nbytes,). Comparing these is exact: NaN equals itself, 0.0 is not -0.0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def combined(fingerprints: Iterable[str]) -> str:
    """One fingerprint over many, in order."""
    return xxhash.xxh3_128("\n".join(fingerprints).encode()).hexdigest()
