"""A 64-bit hash of a tensor's bits where they lie, and the comparison of the trainer's hashes with
an engine's.

On the GPU the hash takes one pass, without a copy to the host. Trainer and engine each hash what
they have, and compare eight bytes a tensor. The hash is a sum in the ring of 64-bit integers, as
multilinear hashes are. Sources: Halevi and Krawczyk, "MMH", 1997; Lemire and Kaser, "Strongly
universal string hashing is fast", 2014. Here the elements are mixed first:

    hash = sum over elements i of  second[i] * mixed(first[i] * x[i])        (modulo 2**64)
    mixed(v) = v ^ (v >> 32)

`x[i]` are the element's bits as a signed integer of at most 32 bits. `first` and `second` are odd
and drawn from the seed and the element's place. Every step is a bijection, so one changed element
always changes the sum. Several changed elements pass with a probability of about 2**-63. The sum of
second[i] * d[i] over differences d[i] vanishes with a probability of 2**-(63 - k), where 2**k
divides all of them. Without the mixing k is the place of the lowest changed bit: two flipped signs
of float32 passed with 2**-32. With it the low bits of d[i] depend on all bits of the element and on
the seed.

The seed is random and new at every sync: no earlier answer passes for a later one.

The second coefficients are products of two, one for the place in a block and one for the block. So
on CPUs the coefficients of places are made once per seed.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from .weight_layout import Strided, source_part

BLOCK = 1 << 16
"""Elements that share a block's coefficient."""
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Signed integers by the size of an element in bytes. Eight bytes count as two elements: the mixing
brings all bits of a product to its low half only where the element has at most 32."""
SEEDS = 1 << 63
"""Seeds are below it."""
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
"""Constants of splitmix64 (Steele, Lea and Flood, 2014), which draws the coefficients."""


_SETTLED = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of a config.json that change nothing, or that the plan decides."""
_BESIDE = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files that make a tokenizer, prompts and the ends of completions."""


def config_fingerprint(folder: Path) -> str:
    """32 hex digits over what no weight says of a model: epsilons, scales and rotary bases, in its
    config.json, and its tokenizer and the tokens that end a completion."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    read = {key: value for key, value in config.items() if key not in _SETTLED}
    contents = {
        name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes())
        for name in _BESIDE
        if (folder / name).exists()
    }
    return xxhash.xxh3_128_hexdigest(json.dumps([read, contents], sort_keys=True).encode())


def new_seed() -> int:
    """A random seed of the operating system's: the generators that training draws from stay as they
    are, and it can't be predicted."""
    return secrets.randbelow(SEEDS)


def tensor_hash(tensor: torch.Tensor, seed: int) -> int:
    """The hash of a tensor's elements in row-major order, whatever its strides; 0 for zeros and for
    no element.

    Args:
        tensor: of any shape, of a type of 1, 2, 4 or 8 bytes, on any device.
        seed: 0 to 2**63 - 1.
    """
    values = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    if values.is_cuda:
        from .hash_kernel import block_sums

        sums = block_sums(values, mix_bits(seed << 1), BLOCK)
    else:
        sums = _block_sums(values, seed)
    blocks = coefficients(sums.numel(), (seed << 1) + 1, sums.device)[1]
    return int((sums * blocks).sum()) & _MASK


def coefficients(
    count: int, stream: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` pairs of odd numbers of a stream, each of shape (count,), int64."""
    places = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    mixed = places * _as_int64(_STEP) + _as_int64(mix_bits(stream))
    mixed = (mixed ^ _shift_right(mixed, 30)) * _as_int64(_FIRST)
    # Taken half-way: a second stream would cost the GPU as much again.
    first = mixed ^ _shift_right(mixed, 31)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _as_int64(_SECOND)
    second = mixed ^ _shift_right(mixed, 31)
    # Odd: an odd number times 2**k is never 0 modulo 2**64, so no single flipped bit goes unseen.
    return first | 1, second | 1


def mix_bits(number: int) -> int:
    """splitmix64's finalizer: an unsigned 64-bit number in which every bit depends on all of
    `number`."""
    number = (number + _STEP) & _MASK
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def _block_sums(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Per block the sum of its mixed elements times the coefficients of their places, shape
    (blocks,), int64."""
    first, second = _places(seed)
    # Written in place: new memory for each product took longer than all of the arithmetic.
    products = torch.empty(min(BLOCK, values.numel()), dtype=torch.int64)
    sums = []
    # The last block is never full, so that a tensor of n elements has n // BLOCK + 1 of them.
    for begin in range(0, values.numel() + 1, BLOCK):
        block = values[begin : begin + BLOCK]
        size = block.numel()
        # int64 wraps at overflow, so these are products and sums modulo 2**64.
        product = products[:size].copy_(block).mul_(first[:size])
        # Little-endian, as every machine with a GPU is: the low half comes first. A shift, which
        # carries the sign along, and a mask would take two passes more.
        halves = product.view(torch.int32).view(size, 2)
        halves[:, 0].bitwise_xor_(halves[:, 1])
        sums.append(torch.dot(product, second[:size]))
    return torch.stack(sums)


@lru_cache(maxsize=2)
def _places(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return coefficients(BLOCK, seed << 1, torch.device("cpu"))


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's carries the sign along."""
    shifted: Any = (values >> bits) & ((1 << (64 - bits)) - 1)
    assert isinstance(shifted, torch.Tensor)
    return shifted


def _as_int64(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return number - (1 << 64) if number >> 63 else number


def expected_prints(
    tensor: torch.Tensor, sources: Sequence[Strided | None], seed: int
) -> list[int]:
    """Hashes of the parts of a sent tensor (contiguous, of any shape, in the engine's dtype) that
    the engine writes somewhere; zeros, which it writes itself, hash to 0."""
    return [
        0 if source is None else tensor_hash(source_part(tensor, source), seed)
        for source in sources
    ]


def differing_names(
    expected: Mapping[str, list[int]], engine_hashes: Mapping[str, list[int]]
) -> list[str]:
    """Names whose hashes are not the wanted ones, or are missing, or that were never sent."""
    return sorted(
        name
        for name in expected.keys() | engine_hashes.keys()
        if expected.get(name) != engine_hashes.get(name)
    )
