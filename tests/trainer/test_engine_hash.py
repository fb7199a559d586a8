"""The hash of live weights: its definition in plain integers, what it can't miss, and the kernel
that GPUs run.

The kernel runs in Triton's interpreter and is compiled to machine code for three generations of
GPUs; none has run it.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.engine_pod.hash_check import BLOCK, coefficients, mix_bits, tensor_hash
from tests.generated import cases

MODULUS = 1 << 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.integers(0, 70) | st.sampled_from(
    [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7]
)


def coefficient_pair(stream: int, place: int) -> tuple[int, int]:
    """The definition, in Python's integers."""
    number = ((place + 1) * 0x9E3779B97F4A7C15 + mix_bits(stream)) % MODULUS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
    first = (number ^ (number >> 31)) | 1
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % MODULUS
    return first, (number ^ (number >> 31)) | 1


def mixed(value: int, first: int) -> int:
    """An element times its first coefficient, the high half brought down to the low one."""
    product = value * first % MODULUS
    return product ^ (product >> 32)


def defined(tensor: torch.Tensor, seed: int) -> int:
    """The sum over all elements, mixed, each with the coefficients of its place and its block."""
    values = tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()]).tolist()
    places = [coefficient_pair(seed << 1, place) for place in range(min(len(values), BLOCK))]
    blocks = [
        coefficient_pair((seed << 1) + 1, block)[1] for block in range(len(values) // BLOCK + 1)
    ]
    total = 0
    for at, value in enumerate(values):
        first, second = places[at % BLOCK]
        total += mixed(value, first) * second * blocks[at // BLOCK]
    return total % MODULUS


def bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Elements of any bits, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    width = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (size * width,), dtype=torch.uint8, generator=generator).view(
        dtype
    )


@settings(
    max_examples=cases(100, gate=12)
)  # the definition takes a tenth of a second for two blocks
@given(size=SIZES, dtype=st.sampled_from(DTYPES), seed=SEEDS)
def test_the_hash_is_the_sum_of_mixed_elements_times_odd_coefficients(
    size: int, dtype: torch.dtype, seed: int
) -> None:
    tensor = bits(size, dtype, seed)
    assert tensor_hash(tensor, seed) == defined(tensor, seed)


@given(size=st.integers(1, 3 * BLOCK), dtype=st.sampled_from(DTYPES), seed=SEEDS, data=st.data())
def test_no_flipped_bit_is_missed(
    size: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = bits(size, dtype, seed)
    before = tensor_hash(tensor, seed)
    raw = tensor.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_hash(tensor, seed) != before


@given(seed=SEEDS, first=st.integers(0, BLOCK), second=st.integers(0, 3 * BLOCK - 1))
def test_elements_that_change_places_are_seen(seed: int, first: int, second: int) -> None:
    tensor = bits(3 * BLOCK, torch.bfloat16, 7)
    integers = tensor.view(torch.int16)
    if integers[first] == integers[second]:
        return
    before = tensor_hash(tensor, seed)
    integers[[first, second]] = integers[[second, first]]
    assert tensor_hash(tensor, seed) != before


def flip_signs(tensor: torch.Tensor, places: list[int]) -> torch.Tensor:
    """A copy with these signs flipped."""
    flipped = tensor.clone()
    flipped[places] = -flipped[places]
    return flipped


@settings(max_examples=cases(100, gate=12))
@given(seed=SEEDS, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_two_flipped_signs_are_seen_where_their_coefficients_cancel(
    seed: int, dtype: torch.dtype
) -> None:
    """A sum of elements times odd numbers, without mixing, misses them: the two changes are the
    same power of two, 2**31 or more, and all that is left is the low half of the coefficients'
    sum."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    tensor = torch.randn(BLOCK, generator=generator).to(dtype)
    second = coefficients(BLOCK, seed << 1, torch.device("cpu"))[1]
    for low_bits in (second & (2**33 - 1), -second & (2**33 - 1)):
        order = low_bits.argsort()
        nearest = int(low_bits[order].diff().argmin())
        places = order[nearest : nearest + 2].tolist()
        assert tensor_hash(flip_signs(tensor, places), seed) != tensor_hash(tensor, seed)


@given(seed=SEEDS, dtype=st.sampled_from(DTYPES), size=st.integers(1, 3 * BLOCK))
def test_a_negated_tensor_is_seen(seed: int, dtype: torch.dtype, size: int) -> None:
    tensor = bits(size, dtype, seed)
    width = tensor.element_size()
    negated = tensor.clone()
    negated.view(torch.uint8)[width - 1 :: width] ^= 0x80  # the sign's byte, little-endian
    assert tensor_hash(negated, seed) != tensor_hash(tensor, seed)


def test_pairs_of_changes_pass_as_seldom_as_the_width_of_the_sum_says() -> None:
    """Of the sum's lowest 16 bits each is 0 for half of all pairs, whatever bit is flipped: a sum
    without mixing leaves as many of them 0 as lie below the flipped bit."""
    tensor = torch.zeros(4096, dtype=torch.int32)
    pairs = 300
    for bit in (0, 7, 23, 31):
        zeros = torch.zeros(16)
        for seed in range(pairs):
            changed = tensor.clone()
            changed[[seed, 4095 - seed]] = 1 << bit if bit < 31 else -(1 << 31)
            found = tensor_hash(changed, seed)
            zeros += torch.tensor([not found >> at & 1 for at in range(16)])
        shares = zeros / pairs
        # The sum of two odd numbers is even: at most the lowest bit tells nothing.
        assert float(shares[1:].max()) < 0.65, (bit, shares)


@given(seed=SEEDS)
def test_an_answer_to_one_seed_is_none_to_another(seed: int) -> None:
    tensor = bits(100, torch.bfloat16, 3)
    assert tensor_hash(tensor, seed) != tensor_hash(tensor, (seed + 1) % 2**63)


def test_a_view_hashes_as_its_elements_in_their_order() -> None:
    tensor = bits(64 * 33, torch.float32, 1).view(64, 33)
    for view in (tensor.t(), tensor[3:9], tensor[:, 5:7], tensor[::2]):
        assert tensor_hash(view, 5) == tensor_hash(view.clone(), 5) == defined(view.contiguous(), 5)
    assert tensor_hash(torch.zeros(9), 5) == tensor_hash(torch.empty(0), 5) == 0


def test_all_coefficients_are_odd_and_none_comes_twice() -> None:
    first, second = coefficients(1 << 16, 12, torch.device("cpu"))
    for drawn in (first, second):
        assert bool((drawn & 1).all())
    assert len({*first.tolist(), *second.tolist()}) == 2 * first.numel()


KERNEL = """
import torch
from grpo_trainer.engine_pod.hash_check import BLOCK, _block_sums, mix_bits
from grpo_trainer.engine_pod.hash_kernel import block_sums
for dtype in (torch.int8, torch.int16, torch.int32):
    for size in (1, 4095, 4097, BLOCK, 2 * BLOCK + 5):
        for seed in (0, 1, 2**63 - 1, 6148914691236517205):
            lowest = torch.iinfo(dtype).min
            values = torch.randint(lowest, -lowest - 1, (size,), dtype=dtype)
            assert torch.equal(block_sums(values, mix_bits(seed << 1), BLOCK), _block_sums(values, seed)), (dtype, size)
print("equal")
"""  # noqa: E501


@pytest.mark.realtime
@pytest.mark.slow
def test_the_kernel_computes_the_same_sums() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "equal\n", done.stderr[-3000:]
