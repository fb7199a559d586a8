"""The order of the prompts is TRL's in every pass, whichever passes the process has seen, but for
what is left out."""

from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from grpo_api.report.revisions import Generations
from grpo_trainer.data.order import Cadence, PromptOrder, merge_spans, rewind_sampler

SIZE = 2 * 2 * 3
"""Elements of one generation below: two prompts, each answered twice and trained on three times."""
NUMBERS, EXTRA = st.integers(0, 12), st.integers(0, 3)


def sampler(rows: int, seed: int, shuffle: bool) -> RepeatSampler:
    return RepeatSampler(
        range(rows), mini_repeat_count=2, batch_size=2, repeat_count=3, shuffle=shuffle, seed=seed
    )


@given(
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    passes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
)
def test_any_pass_has_the_order_that_it_has_in_trl(
    rows: int, seed: int, shuffle: bool, passes: list[int]
) -> None:
    bare = sampler(rows, seed, shuffle)
    expected = [list(bare) for _ in range(7)]
    ours = sampler(rows, seed, shuffle)
    for epoch in passes:
        rewind_sampler(ours, epoch)
        assert list(ours) == expected[epoch]


def test_shuffled_passes_differ() -> None:
    bare = sampler(40, 1, shuffle=True)
    assert list(bare) != list(bare)


def generations(rows: int, seed: int, shuffle: bool, passes: int) -> list[tuple[int, ...]]:
    """The generations of so many passes, each as TRL repeats it."""
    bare = sampler(rows, seed, shuffle)
    flat = [index for _ in range(passes) for index in bare]
    return [tuple(flat[start : start + SIZE]) for start in range(0, len(flat), SIZE)]


RANGES = st.lists(
    st.builds(lambda first, more: Generations(first=first, last=first + more), NUMBERS, EXTRA),
    max_size=4,
)


@given(
    rows=st.integers(2, 20),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    skipped=RANGES,
    begun=st.integers(0, 2),
)
def test_what_is_left_out_is_taken_out_of_one_long_order(
    rows: int, seed: int, shuffle: bool, skipped: list[Generations], begun: int
) -> None:
    left_out = {number for one in skipped for number in range(one.first, one.last + 1)}
    per_pass = rows // 2
    everything = generations(rows, seed, shuffle, 4 + len(left_out) // per_pass + 1)
    expected = [one for number, one in enumerate(everything) if number not in left_out]
    ours = PromptOrder(sampler(rows, seed, shuffle), merge_spans(skipped))
    for epoch in range(begun, 4):
        ours.epoch = epoch
        flat = [
            index for one in expected[epoch * per_pass : (epoch + 1) * per_pass] for index in one
        ]
        assert list(ours) == flat
        assert len(ours) == len(flat)


@given(
    cadence=st.builds(Cadence, st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)),
    skipped=RANGES,
    later=RANGES,
    step=st.integers(1, 12),
)
def test_a_checkpoint_is_outdated_once_it_was_trained_on_what_is_left_out(
    cadence: Cadence, skipped: list[Generations], later: list[Generations], step: int
) -> None:
    # every micro-batch of the run, by its generation; each pass ends a step
    order = [
        number
        for number in range(400)
        if not any(one.first <= number <= one.last for one in skipped)
    ]
    steps: list[list[int]] = []
    for begun in range(0, 13 * cadence.per_pass, cadence.per_pass):
        one_pass = [
            number
            for number in order[begun : begun + cadence.per_pass]
            for _ in range(cadence.micro_batches)
        ]
        steps += [
            one_pass[start : start + cadence.accumulation]
            for start in range(0, len(one_pass), cadence.accumulation)
        ]
    found = cadence.generations_of_step(step, skipped)
    assert (found.first, found.last) == (steps[step - 1][0], steps[step - 1][-1])
    trained = {number for one in steps[:step] for number in one}
    now_out = {number for one in (*skipped, *later) for number in range(one.first, one.last + 1)}
    assert cadence.is_outdated(step, skipped, [*skipped, *later]) == bool(trained & now_out)
