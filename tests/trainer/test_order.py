"""The order of the prompts is TRL's in every pass, whichever passes the process has seen."""

from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from grpo_trainer.data.order import rewind


def sampler(rows: int, seed: int, shuffle: bool) -> RepeatSampler:
    return RepeatSampler(range(rows), mini_repeat_count=2, batch_size=2, repeat_count=3, shuffle=shuffle, seed=seed)


@given(
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    passes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
)
def test_any_pass_has_the_order_that_it_has_in_trl(rows: int, seed: int, shuffle: bool, passes: list[int]) -> None:
    bare = sampler(rows, seed, shuffle)
    expected = [list(bare) for _ in range(7)]
    ours = sampler(rows, seed, shuffle)
    for epoch in passes:
        rewind(ours, epoch)
        assert list(ours) == expected[epoch]


def test_shuffled_passes_differ() -> None:
    bare = sampler(40, 1, shuffle=True)
    assert list(bare) != list(bare)
