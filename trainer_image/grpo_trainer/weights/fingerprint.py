"""A short name for the bytes of a tensor.

Ranks compare what they hold by exchanging 16 bytes a tensor, and messages can show it. XXH3-128 (xxhash): as fast as
memory, and for weights, which nobody forges, as good as a cryptographic hash; SHA-256 over the model would cost as much
as loading it.
"""

from collections.abc import Iterable
from typing import Any

import torch
import xxhash

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the size of an element in bytes."""


def fingerprint(tensor: torch.Tensor) -> str:
    """32 hex digits over the tensor's bytes, whatever its dtype; copies a tensor from a GPU first."""
    data: Any = as_bytes(tensor.detach()).cpu().numpy()
    return xxhash.xxh3_128(data).hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, shape (nbytes,)."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and number of elements are the same bits: NaN equals itself, 0.0 is not -0.0.

    Compared as the widest integers that their layout allows, which is six times as fast as byte by byte.
    """
    first = first.detach().contiguous().view(-1)
    second = second.detach().contiguous().view(-1)
    # A view as int64 needs whole integers, from an offset in the storage that is a multiple of their size.
    offsets = [tensor.storage_offset() * tensor.itemsize for tensor in (first, second)]
    whole = all(size % 8 == 0 for size in (first.nbytes, second.nbytes, *offsets))
    integers = torch.int64 if whole else _INTEGERS[first.itemsize]
    return torch.equal(first.view(integers), second.view(integers))


def combined(fingerprints: Iterable[str]) -> str:
    """One fingerprint of many, in order."""
    return xxhash.xxh3_128("\n".join(fingerprints).encode()).hexdigest()
