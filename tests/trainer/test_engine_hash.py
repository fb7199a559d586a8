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

from grpo_trainer.engine_pod.hash_check import BLOCK, coefficients, mix_bits, multilinear_hash
from tests.generated import cases

MODULUS = 1 << 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.integers(0, 70) | st.sampled_from(
    [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7]
)


def coefficient(stream: int, place: int) -> int:
    """The definition, in Python's integers."""
    number = ((place + 1) * 0x9E3779B97F4A7C15 + mix_bits(stream)) % MODULUS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % MODULUS
    return (number ^ (number >> 31)) | 1


def defined(tensor: torch.Tensor, seed: int) -> int:
    """The sum over all elements, each with its two coefficients."""
    values = tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()]).tolist()
    within = [coefficient(seed << 1, place) for place in range(min(len(values), BLOCK))]
    blocks = [coefficient((seed << 1) + 1, block) for block in range(len(values) // BLOCK + 1)]
    total: int = sum(
        value * within[at % BLOCK] * blocks[at // BLOCK] for at, value in enumerate(values)
    )
    return total % MODULUS


def bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Elements of any bits, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    width = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (size * width,), dtype=torch.uint8, generator=generator).view(
        dtype
    )


@settings(
    max_examples=cases(100, gate=25)
)  # the definition takes a tenth of a second for two blocks
@given(size=SIZES, dtype=st.sampled_from(DTYPES), seed=SEEDS)
def test_the_hash_is_the_sum_of_elements_times_odd_coefficients(
    size: int, dtype: torch.dtype, seed: int
) -> None:
    tensor = bits(size, dtype, seed)
    assert multilinear_hash(tensor, seed) == defined(tensor, seed)


@given(size=st.integers(1, 3 * BLOCK), dtype=st.sampled_from(DTYPES), seed=SEEDS, data=st.data())
def test_no_flipped_bit_is_missed(
    size: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = bits(size, dtype, seed)
    before = multilinear_hash(tensor, seed)
    raw = tensor.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert multilinear_hash(tensor, seed) != before


@given(seed=SEEDS, first=st.integers(0, BLOCK), second=st.integers(0, 3 * BLOCK - 1))
def test_elements_that_change_places_are_seen(seed: int, first: int, second: int) -> None:
    tensor = bits(3 * BLOCK, torch.bfloat16, 7)
    integers = tensor.view(torch.int16)
    if integers[first] == integers[second]:
        return
    before = multilinear_hash(tensor, seed)
    integers[[first, second]] = integers[[second, first]]
    assert multilinear_hash(tensor, seed) != before


@given(seed=SEEDS)
def test_an_answer_to_one_seed_is_none_to_another(seed: int) -> None:
    tensor = bits(100, torch.bfloat16, 3)
    assert multilinear_hash(tensor, seed) != multilinear_hash(tensor, (seed + 1) % 2**63)


def test_a_view_hashes_as_its_elements_in_their_order() -> None:
    tensor = bits(64 * 33, torch.float32, 1).view(64, 33)
    for view in (tensor.t(), tensor[3:9], tensor[:, 5:7], tensor[::2]):
        assert (
            multilinear_hash(view, 5)
            == multilinear_hash(view.clone(), 5)
            == defined(view.contiguous(), 5)
        )
    assert multilinear_hash(torch.zeros(9), 5) == multilinear_hash(torch.empty(0), 5) == 0


def test_all_coefficients_are_odd_and_none_comes_twice() -> None:
    drawn = coefficients(1 << 16, 12, torch.device("cpu"))
    assert bool((drawn & 1).all())
    assert len(set(drawn.tolist())) == drawn.numel()


KERNEL = """
import torch
from grpo_trainer.engine_pod.hash_check import BLOCK, _block_sums, mix_bits
from grpo_trainer.engine_pod.hash_kernel import block_sums
for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
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
