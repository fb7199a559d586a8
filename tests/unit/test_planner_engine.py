"""Engines in the planner's memory and time: every formula against numbers worked out by hand, and
what must hold of any model."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_planner.hardware.products import lookup_product
from grpo_planner.memory import engine as terms
from grpo_planner.memory.host import host_bytes
from grpo_planner.memory.phases import predict
from grpo_planner.memory.setup import Engine, Setup
from grpo_planner.model.catalogue import lookup_shape as model
from grpo_planner.model.shapes import Shape
from grpo_planner.time import step_time as enginetime
from grpo_planner.time.constants import FITTED
from grpo_planner.time.sampling import EngineToken
from grpo_planner.time.step_time import step_time
from tests.generated import cases
from tests.unit.planning import H100

SMALL = Shape(hidden=512, layers=4, heads=8, kv_heads=2, head_dim=64, intermediate=2048, vocab=1000)
"""Matrices of a layer: 512 * (2 * 512 + 2 * 128) + 3 * 512 * 2048 = 3,801,088; norms 2 * 512."""
MATRICES, NORMS = 4 * 3_801_088, 4 * 1024 + 512
MIB = 2**20


def setup(engine: Engine | None = None, **changes: Any) -> Setup:
    """Eight processes that generate four completions each."""
    own = engine or Engine(kind="Colocated", length=256)
    values = {
        "precision": "bfloat16",
        "prompt": 128,
        "completion": 128,
        "micro_batch": 2,
        "generation_batch": 4,
    }
    return Setup(**values | {"world": 8, "zero": 2, "engine": own} | changes)  # type: ignore[arg-type]


def split(gpus: int, **changes: Any) -> Setup:
    """The same over so many GPUs."""
    return setup(Engine(kind="Colocated", length=256, tensor_parallel=gpus), **changes)


def test_the_vocabulary_is_padded_and_matrices_are_split_but_norms_are_not() -> None:
    ends = 2 * 1024 * 512
    assert terms.weights(SMALL, setup()) == 2 * (MATRICES + ends + NORMS)
    assert terms.weights(SMALL, split(2)) == 2 * ((MATRICES + ends) / 2 + NORMS)
    assert terms.weights(replace(SMALL, tied=True), setup()) == 2 * (MATRICES + 1024 * 512 + NORMS)
    assert terms.weights(SMALL, setup(precision="float32")) == 2 * terms.weights(SMALL, setup())
    assert terms.weights(SMALL, setup(precision="mixed")) == terms.weights(SMALL, setup()), (
        "as it computes"
    )


def test_key_heads_are_repeated_where_there_are_fewer_than_gpus() -> None:
    repeated = 2 * 4 * 512 * 64 * (4 - 2)
    assert terms.weights(SMALL, split(4)) == 2 * (
        (MATRICES + 2 * 1024 * 512 + repeated) / 4 + NORMS
    )
    assert [terms.token_bytes(SMALL, split(gpus)) for gpus in (1, 2, 4)] == [
        2 * 4 * heads * 64 * 2 for heads in (2, 1, 1)
    ]


def test_the_cache_holds_whole_blocks_of_every_completion_and_one_more() -> None:
    a_token = 2 * 4 * 2 * 64 * 2
    assert terms.cache(SMALL, setup()) == (4 * 256 + 16) * a_token
    odd = Engine(kind="Colocated", length=250, block=64)
    assert terms.cache(SMALL, setup(odd)) == (4 * 256 + 64) * a_token
    assert terms.cache(
        SMALL, setup(Engine(kind="Colocated", length=256, cache_bytes=1))
    ) * 2 == terms.cache(SMALL, setup())
    assert terms.cache(SMALL, split(2)) == (8 * 256 + 16) * a_token // 2, (
        "neighbours sample together"
    )


def test_graphs_and_work_space() -> None:
    assert terms.graphs(SMALL, setup()) == 4 * 24 * MIB
    assert terms.graphs(SMALL, setup(Engine(kind="Colocated", length=256, graphs=False))) == 0
    assert terms.graphs(SMALL, split(2)) == (4 * 24 + 400) * MIB
    assert terms.work(SMALL, setup()) == 4096 * (4 * 2048 + 2 * 512) * 2
    assert terms.work(replace(SMALL, vocab=10**7), setup()) == 4 * 10**7 * 12, (
        "the scores of four completions"
    )


def test_what_fits_into_a_share_fits() -> None:
    share = (
        terms.awake_bytes(SMALL, setup(generation_batch=64)) + 64 * SMALL.vocab * terms.SCORE_BYTES
    )
    assert terms.cached_completions(SMALL, setup(generation_batch=1), share) == 64
    assert terms.cached_completions(SMALL, setup(generation_batch=1), 1) == 0


def test_a_sync_sends_one_tensor_at_a_time() -> None:
    widest = SMALL.largest_module
    assert widest == 512 * 2048
    assert terms.sync_bytes(SMALL, setup()) == 0, "the policy's own tensors"
    assert terms.sync_bytes(SMALL, setup(zero=3)) == 2 * widest
    assert terms.sync_bytes(SMALL, setup(precision="mixed", zero=0)) == 2 * widest
    assert terms.sync_bytes(SMALL, setup(zero=0, lora_rank=8)) == 14 * widest
    assert terms.sync_bytes(SMALL, setup(zero=3, lora_rank=8)) == 16 * widest


def test_an_awake_engine_is_there_in_every_phase_and_one_that_sleeps_in_two() -> None:
    awake, asleep = setup(), setup(Engine(kind="Colocated", length=256, sleeps=True))
    plain = predict(SMALL, replace(awake, engine=None))
    needed, kept = terms.awake_bytes(SMALL, awake), terms.graphs(SMALL, asleep)
    found, sleeping = predict(SMALL, awake), predict(SMALL, asleep)
    for phase in ("load", "reference", "forward", "backward", "step"):
        assert found.phases[phase] == pytest.approx(plain.phases[phase] + needed, abs=2)
        assert sleeping.phases[phase] == pytest.approx(plain.phases[phase] + kept, abs=2)
    assert (
        found.phases["sync"] == found.phases["generate"] == found.static == sleeping.phases["sync"]
    )
    assert sleeping.static == pytest.approx(plain.static + kept, abs=2)


def test_an_offloaded_base_is_gone_while_the_engine_is_awake_and_costs_two_ways_of_the_link() -> (
    None
):
    stays = setup(Engine(kind="Colocated", length=256, sleeps=True), zero=0, lora_rank=8)
    assert stays.engine is not None
    leaves = replace(stays, engine=replace(stays.engine, offloads_base=True))
    base = 2 * SMALL.parameters
    before, after = predict(SMALL, stays), predict(SMALL, leaves)
    copied_tensor = 2 * SMALL.largest_module
    saved = {name: before.phases[name] - after.phases[name] for name in before.phases}
    assert saved.pop("sync") == pytest.approx(base - copied_tensor, abs=2)
    assert saved.pop("generate") == base
    # Rewards are scored once the base is back.
    scoring = 4 * base
    assert predict(SMALL, leaves, scoring=scoring).phases["generate"] == before.static + scoring
    assert set(saved.values()) == {0}
    assert after.static == before.static - base, "what comes and goes can fragment"
    loading = {predict(SMALL, one).phases["load"] for one in (stays, leaves)}
    assert len(loading) == 1
    # The copy is made when the weights are loaded, of which a process has as much.
    assert host_bytes(SMALL, leaves, 1) == host_bytes(SMALL, stays, 1)
    hardware = lookup_product(H100)
    seconds = [enginetime.sync_seconds(SMALL, one, hardware, 1e11) for one in (stays, leaves)]
    assert seconds[1] - seconds[0] == pytest.approx(2 * base / 22e9)


def test_servers_take_nothing_of_the_trainers_gpus_but_for_the_sync() -> None:
    own = setup(Engine(kind="Servers", length=256, replicas=2), zero=3)
    plain, found = predict(SMALL, replace(own, engine=None)), predict(SMALL, own)
    assert found.static == plain.static
    assert found.phases["generate"] == found.static
    assert found.phases["sync"] == pytest.approx(found.static + 2 * SMALL.largest_module, abs=2)
    assert terms.sequences(own) == 16, "eight processes' four, over two"


def token_seconds(shape: Shape, of: Setup, sequences: int) -> float:
    """A token of so many sequences at half of their completions."""
    token = EngineToken(shape, of, lookup_product(H100), FITTED)
    return token.seconds(sequences, of.completion / 2)


def test_a_token_takes_the_longer_of_reading_and_computing() -> None:
    read = terms.weights(SMALL, setup()) + 4 * 192 * terms.token_bytes(SMALL, setup())
    apart = FITTED.token_seconds + 4 * FITTED.sampling_seconds * SMALL.vocab / 1e5
    expected = read / (3350e9 * FITTED.read_share) + apart
    assert token_seconds(SMALL, setup(), 4) == pytest.approx(expected)
    computed = 2 * SMALL.parameters * 2048 / (989e12 * FITTED.utilisation)
    small_cache = replace(SMALL, kv_heads=1, head_dim=1)
    assert token_seconds(small_cache, setup(), 2048) >= computed / 2
    eager = setup(Engine(kind="Colocated", length=256, graphs=False))
    assert token_seconds(SMALL, eager, 4) == pytest.approx(4 * 0.25e-3 + apart)
    assert token_seconds(SMALL, split(2), 4) > 2 * 4 * 20e-6 + apart


def test_a_sync_takes_a_time_per_tensor_and_its_bytes() -> None:
    hardware = lookup_product(H100)
    tensors = 4 * (7 + 2) + 1 + 2
    assert enginetime.tensors(SMALL) == tensors
    whole, memory = 2 * SMALL.parameters, 3350e9
    sent = whole / (FITTED.sync_gb_per_s * 1e9)
    own = tensors * 0.6e-3 + sent + 2 * whole / (memory * 0.5)
    assert enginetime.sync_seconds(SMALL, setup(), hardware, 1e11) == pytest.approx(own)
    gathered = 2 * SMALL.parameters * 7 / 8 / 1e11
    assert enginetime.sync_seconds(SMALL, setup(zero=3), hardware, 1e11) == pytest.approx(
        own + gathered
    )
    asleep = setup(Engine(kind="Colocated", length=256, sleeps=True))
    assert enginetime.sync_seconds(SMALL, asleep, hardware, 1e11) == pytest.approx(own + 0.5)
    many = setup(Engine(kind="Servers", length=256, replicas=20))
    over_network = own - sent + 20 * whole / (50e9 * 0.7)
    assert enginetime.sync_seconds(SMALL, many, hardware, 1e11) == pytest.approx(over_network)


def test_a_generation_that_feeds_two_steps_is_synced_for_half_of_each() -> None:
    hardware, half = lookup_product(H100), Engine(kind="Colocated", length=256, syncs=0.5)
    whole = step_time(SMALL, setup(), hardware, 1, 1.0).sync
    assert step_time(SMALL, setup(half), hardware, 1, 0.5).sync == pytest.approx(whole / 2)


def test_an_engine_needs_no_gathering_to_generate_and_waits_for_no_launches() -> None:
    hardware, shape = lookup_product(H100), model("Qwen/Qwen2.5-7B")
    assert shape is not None
    engine, plain = setup(zero=3), replace(setup(zero=3), engine=None)
    fast, slow = (step_time(shape, one, hardware, 1, 1.0) for one in (engine, plain))
    assert (fast.gathering, slow.sync) == (0, 0)
    assert slow.generation > 2 * fast.generation
    assert fast.compute == slow.compute
    assert sum(fast) == fast.total


SHAPES = st.builds(
    Shape, hidden=st.sampled_from([256, 1024, 4096]), layers=st.integers(1, 80), heads=st.just(32),
    kv_heads=st.sampled_from([1, 2, 4, 8, 16, 32]), head_dim=st.sampled_from([32, 64, 128]),
    intermediate=st.sampled_from([512, 4096, 14336]), vocab=st.integers(100, 200_000),
    tied=st.booleans(),
)  # fmt: skip


@settings(max_examples=cases(200))
@given(SHAPES, st.integers(1, 64), st.sampled_from(["bfloat16", "mixed", "float32"]))
def test_more_gpus_never_take_more_of_each(shape: Shape, share: int, precision: Any) -> None:
    """At the same number of completions: what one process samples falls as its engine has more
    GPUs."""
    one, two, four = (
        setup(Engine(kind="Colocated", length=512, tensor_parallel=gpus),
        generation_batch=4 * share // gpus or 1,
              precision=precision)
        for gpus in (1, 2, 4)
    )  # fmt: skip
    for term in (terms.weights, terms.token_bytes):
        assert term(shape, one) >= term(shape, two) >= term(shape, four)
    assert terms.weights(shape, four) >= terms.weights(shape, one) / 4


@settings(max_examples=cases(200))
@given(SHAPES, st.integers(1, 256), st.integers(16, 4096))
def test_an_engine_grows_with_its_completions_and_room_is_what_fits(
    shape: Shape, count: int, length: int
) -> None:
    engine = Engine(kind="Colocated", length=length)
    small, large = (setup(engine, generation_batch=number) for number in (count, count + 1))
    assert terms.awake_bytes(shape, small) <= terms.awake_bytes(shape, large)
    expected = [setup(engine, generation_batch=count, expected=mean) for mean in (1, 64, 128)]
    caches = [terms.cache(shape, one) for one in expected]
    assert caches == sorted(caches), "a longer mean needs no less"
    longest = ceil(length / engine.block) * terms.block_bytes(shape, small)
    assert longest <= caches[0], "one of the greatest length fits"
    room = terms.cached_completions(
        shape, setup(engine, generation_batch=1), terms.awake_bytes(shape, small)
    )
    assert room <= count
    if room:
        assert terms.awake_bytes(shape, setup(engine, generation_batch=room)) <= terms.awake_bytes(
            shape, small
        )
