"""One generation over engines that are lost in any way: all completions come, and each is the one
of its seed.

The engines' answers are made by fakes; test_engine_servers.py has real ones.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_trainer.engine_pod.messages import (
    MAX_BODY,
    Completion,
    EngineState,
    Generate,
    GeneratedCompletions,
)
from grpo_trainer.generation.dispatch import (
    MOST_FLEETS,
    CompletionDispatch,
    CompletionRequest,
    prompts_per_engine,
    split_requests,
)
from grpo_trainer.generation.engine_client import (
    EngineFailed,
    EngineUnreachable,
    RequestRejected,
    WeightsLost,
)
from grpo_trainer.generation.fleet import Engine, EngineView, poll_engine
from grpo_trainer.generation.remote_engines import EnginesMain
from grpo_trainer.runtime.errors import EngineLost, TrainingError
from tests.virtual_time import virtually

VERSION = 7
LONGEST = 2.2250738585072014e-308
"""Of all numbers one with the most digits."""


@given(
    st.lists(st.tuples(st.sampled_from([[1], [2], [3]]), st.integers(0, 9)), min_size=1),
    st.integers(1, 4),
)
def test_pieces_hold_all_that_is_wanted_in_its_order(
    wanted: list[tuple[list[int], int]], most: int
) -> None:
    pieces = split_requests(wanted, most)
    assert [(piece.prompt, seed) for piece in pieces for seed in piece.seeds] == wanted
    assert max(len(piece.seeds) for piece in pieces) <= most


@given(completions=st.integers(1, 512), tokens=st.sampled_from([1, 1024, 32768, 131072, 1048576]))
@example(completions=128, tokens=32768)
def test_no_engine_is_asked_for_more_than_one_answer_holds(completions: int, tokens: int) -> None:
    main: Any = EnginesMain.__new__(EnginesMain)
    main._fleet, main._limit = SimpleNamespace(engines=[]), 60.0
    main._setup = SimpleNamespace(engine=SimpleNamespace(max_sequences=256))
    main.begin_generation([([1], seed) for seed in range(completions)], {"max_tokens": tokens})
    pieces: list[CompletionRequest] = main._completing._pieces
    none, nine = (
        len(Completion(tokens=[2**31 - 1] * count, logprobs=[-LONGEST] * count).model_dump_json())
        for count in (0, 9)
    )
    largest = none + tokens * (nine - none) / 9
    assert max(len(piece.seeds) for piece in pieces) * largest < MAX_BODY
    assert [seed for piece in pieces for seed in piece.seeds] == list(range(completions))


def test_an_engine_holds_prompts_that_fill_it_twice() -> None:
    assert (prompts_per_engine(64, 8), prompts_per_engine(65, 8), prompts_per_engine(4, 8)) == (
        16,
        18,
        2,
    )


def sampled(prompt: list[int], seed: int) -> Completion:
    """What any engine samples: it follows from the prompt and the seed alone."""
    return Completion(tokens=[*prompt, seed % 97], logprobs=[-1.0] * (len(prompt) + 1))


class FakeClient:
    """An engine that fails at some requests, in the way that is said."""

    def __init__(self, failures: dict[int, EngineFailed]) -> None:
        self.failures = failures
        self.asked = 0

    async def generate(self, request: Generate) -> GeneratedCompletions:
        """Answers a second later."""
        self.asked += 1
        failure = self.failures.get(self.asked)
        await asyncio.sleep(1.0)
        if failure is not None:
            raise failure
        completions = [sampled(request.prompt, seed) for seed in request.seeds]
        return GeneratedCompletions(
            version=request.version, incarnation=request.incarnation, completions=completions
        )


async def sound(_: Engine) -> None:
    """Every engine still has what it was proven to have."""


def engine(index: int, failures: dict[int, EngineFailed]) -> Engine:
    """One that was proven to have the weights."""
    client: Any = FakeClient(failures)
    made = Engine(EngineView(index, f"host-{index}"), client)
    made.view.record_answer(f"process-{index}")
    made.view.record_proof(VERSION)
    return made


FAILURES = st.dictionaries(
    st.integers(1, 6),
    st.sampled_from([EngineUnreachable("gone"), WeightsLost("stale")]),
    max_size=2,
)
PIECES = [CompletionRequest([number], [10 * number, 10 * number + 1]) for number in range(9)]


@given(st.lists(FAILURES, min_size=1, max_size=3))
def test_completions_are_the_same_whichever_engines_are_lost(
    failures: list[dict[int, EngineFailed]],
) -> None:
    engines = [engine(index, one) for index, one in enumerate(failures)]
    completing = CompletionDispatch(engines, sound, PIECES, {}, max_sequences=4, stall_seconds=60.0)
    version = VERSION
    while not virtually(completing.sample_remaining(version)):
        assert not any(one.view.is_serving(version) for one in engines)
        version += 1  # the same weights, brought again
        for one in engines:
            one.view.record_answer(f"process-{one.view.index}")
            one.view.record_proof(version)
    wanted = [sampled(piece.prompt, seed) for piece in PIECES for seed in piece.seeds]
    assert [sample.tokens for sample in completing.samples] == [one.tokens for one in wanted]
    assert {sample.version for sample in completing.samples} == {version}
    assert sum(one.view.losses for one in engines) <= sum(len(one) for one in failures)


@pytest.mark.parametrize(
    "failure", [EngineUnreachable("gone"), EngineFailed("answered /generate with 500: poison")]
)
def test_a_prompt_that_no_engine_survives_ends_the_generation(failure: EngineFailed) -> None:
    engines = [engine(index, dict.fromkeys(range(1, 99), failure)) for index in range(2)]
    completing = CompletionDispatch(engines, sound, PIECES, {}, max_sequences=4, stall_seconds=60.0)
    for version in range(VERSION + 1, VERSION + MOST_FLEETS):
        assert not virtually(completing.sample_remaining(version - 1))
        for one in engines:
            one.view.record_answer(f"process-{one.view.index}")
            one.view.record_proof(version)
    with pytest.raises(EngineLost, match=f"all engines {MOST_FLEETS} times.*{failure}"):
        virtually(completing.sample_remaining(version))


def completed_although(failure: EngineFailed) -> list[Engine]:
    """Two engines that have sampled all, the first of which then failed so when it was to be proven
    again."""
    engines = [engine(0, {}), engine(1, {})]

    async def prove(one: Engine) -> None:
        if one.view.index == 0:
            raise failure

    completing = CompletionDispatch(engines, prove, PIECES, {}, max_sequences=4, stall_seconds=60.0)
    assert virtually(completing.sample_remaining(VERSION))
    return engines


def test_what_an_engine_sampled_that_has_other_weights_since_is_sampled_elsewhere() -> None:
    engines = completed_although(EngineFailed("has other weights than it was sent: k_proj"))
    asked: Any = engines[1].client
    assert asked.asked == len(PIECES), "whatever engine 0 had answered is asked of engine 1"
    assert not engines[0].view.is_serving(VERSION)
    assert (
        engines[0].view.last_message
        == "has other weights than it was sent: k_proj, after it has sampled"
    )


def test_a_generation_whose_engines_are_lost_one_by_one_is_of_one_version() -> None:
    engines = [
        engine(index, dict.fromkeys(range(6, 10), EngineUnreachable("gone"))) for index in range(2)
    ]

    async def prove(one: Engine) -> None:
        if one.view.index == 1 and one.view.is_serving(VERSION):
            raise EngineUnreachable("gone")

    completing = CompletionDispatch(engines, prove, PIECES, {}, max_sequences=4, stall_seconds=60.0)
    assert not virtually(completing.sample_remaining(VERSION))
    for one in engines:
        one.client = FakeClient({})  # type: ignore[assignment]
        one.view.record_answer("another process")
        one.view.record_proof(VERSION + 1)
    assert virtually(completing.sample_remaining(VERSION + 1))
    assert {sample.version for sample in completing.samples} == {VERSION + 1}


def test_an_engine_that_is_gone_before_it_is_proven_again_has_failed_no_proof() -> None:
    view = completed_although(EngineUnreachable("can't be reached for /prove"))[0].view
    assert (view.is_usable, view.strikes, view.losses) == (False, 0, 1)


def test_both_engines_get_prompts_and_their_rates_are_told() -> None:
    engines = [engine(0, {}), engine(1, {})]
    completing = CompletionDispatch(engines, sound, PIECES, {}, max_sequences=2, stall_seconds=60.0)
    assert virtually(completing.sample_remaining(VERSION))
    rates = completing.metrics()
    assert set(rates) == {"engine_tokens_per_second/0", "engine_tokens_per_second/1"}
    assert sum(rates.values()) == pytest.approx(12.0), (
        "36 tokens, of which 4 pieces of 4 come in a second"
    )


def test_a_prompt_that_no_engine_takes_ends_the_run() -> None:
    engines = [engine(0, {1: RequestRejected("does not take it: too long")}), engine(1, {})]
    with pytest.raises(TrainingError, match="engine 0 at host-0 does not take it: too long"):
        virtually(
            CompletionDispatch(
                engines, sound, PIECES, {}, max_sequences=2, stall_seconds=60.0
            ).sample_remaining(VERSION)
        )


def test_an_engine_that_samples_no_token_is_given_up_and_its_prompts_go_elsewhere() -> None:
    class Stuck(FakeClient):
        async def generate(self, _: Generate) -> GeneratedCompletions:
            await asyncio.Event().wait()
            raise AssertionError

    stuck, good = engine(0, {}), engine(1, {})
    stuck.client = Stuck({})  # type: ignore[assignment]
    completing = CompletionDispatch(
        [stuck, good], sound, PIECES, {}, max_sequences=2, stall_seconds=60.0
    )
    assert virtually(completing.sample_remaining(VERSION))
    assert stuck.view.is_condemned
    assert "sampled no token" in stuck.view.last_message


class Looked:
    """A client whose state is what the test says."""

    def __init__(self, *answers: EngineState | EngineFailed) -> None:
        self.answers = list(answers)
        self.ended: list[tuple[str, str]] = []

    async def state(self) -> EngineState:
        answer = self.answers.pop(0)
        if isinstance(answer, EngineFailed):
            raise answer
        return answer

    async def end(self, reason: str, incarnation: str) -> None:
        self.ended.append((reason, incarnation))


def looked(
    *answers: EngineState | EngineFailed, version: int | None = VERSION
) -> tuple[Engine, Looked]:
    """An engine after it has been looked at as often as there are answers."""
    client: Any = Looked(*answers)
    made = Engine(EngineView(0, "host"), client)
    made.view.record_answer("a")
    if version is not None:
        made.view.record_proof(version)
    for _ in range(len(answers)):
        virtually(poll_engine(made))
    return made, client


def test_what_a_look_shows() -> None:
    as_proven = EngineState(incarnation="a", phase="Serving", version=VERSION)
    assert looked(as_proven)[0].view.is_serving(VERSION)
    assert not looked(EngineState(incarnation="b", phase="Waiting"))[0].view.is_serving(VERSION)
    older = EngineState(incarnation="a", phase="Serving", version=VERSION - 1)
    assert "proven to have" in looked(older)[0].view.last_message
    late = EngineUnreachable("late", is_timeout=True)
    assert looked(late, late, as_proven, late)[0].view.is_serving(VERSION)
    assert not looked(late, late, late)[0].view.is_usable
    assert not looked(EngineUnreachable("refused"))[0].view.is_usable
    assert not looked(EngineFailed("belongs to another attempt"))[0].view.is_usable


def test_an_engine_that_was_given_up_is_told_to_end() -> None:
    made, client = looked(version=None)
    made.view.give_up("has other weights")
    client.answers.append(EngineState(incarnation="a", phase="Waiting"))
    virtually(poll_engine(made))
    assert client.ended == [("has other weights", "a")]


def test_of_two_processes_at_one_address_the_one_that_was_replaced_has_to_end() -> None:
    answers = [EngineState(incarnation=process, phase="Waiting") for process in "abaab"]
    made, client = looked(*answers)
    assert [process for _, process in client.ended] == ["a", "a"]
    assert "has two processes" in client.ended[0][0]
    assert (made.view.incarnation, made.view.is_usable, made.view.losses) == ("b", True, 1)
