"""A hang of a gang: the operator waits for what all ranks say, and names the one that the others
waited for."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import EXIT_CODES, Result
from grpo_operator.decide.decisions import Action
from tests.generated import cases
from tests.unit.operator_world import at, judged, make_child, make_pod, running, said, terminated

MINUTES = 1800.0
ENGINE_START = "grpo_trainer/engine_pod/engine_start.py:36 in start_engine"
WAITS = "torch/distributed/distributed_c10d.py:3 in barrier"
IN_REWARD = "user/reward.py:9 in judge"
IN_VLLM = [
    "vllm/v1/worker/gpu/model_runner.py:70 in execute_model",
    "grpo_trainer/generation/colocated.py:205 in _call",
    "grpo_trainer/generation/colocated.py:153 in sample",
]


def hung(silent: float, waiting: bool, **more: Any) -> dict[str, Any]:
    """A container that said that it had no progress, and where it stood."""
    caller = more.pop("caller", "grpo_trainer/training/reference_trainer.py:7 in step")
    frames = more.pop("frames", [WAITS if waiting else IN_REWARD, caller])
    still = {"silentSeconds": silent, "waiting": waiting, "frames": frames}
    return terminated(
        41, said(more.pop("result", "Hang"), standstill=still, message="no step finished", **more)
    )


@pytest.mark.parametrize(
    "result", ["Hang", "Preempted"], ids=["by its watchdog", "by the Job controller"]
)
def test_the_rank_that_all_waited_for_is_named_with_its_frame(result: str) -> None:
    seen = running(
        make_pod(0, state=hung(MINUTES, True, rank=0, step=7)),
        make_pod(1, state=hung(MINUTES - 5, False, rank=1, step=7, result=result)),
        make_child(),
    )
    decision = judged(seen)
    assert (decision.action, decision.reason, decision.counted) == (Action.ADMIT, "Hang", True)
    assert decision.message == (
        "rank 1 has been silent longest, for 1795 s in user/reward.py:9 in judge, called from "
        "grpo_trainer/training/reference_trainer.py:7 in step; no step finished"
    )
    assert decision.ended is not None
    assert decision.ended.rank == 1
    assert decision.ended.standstill is not None


@pytest.mark.parametrize(
    ("waiting", "place", "said_by", "result"),
    [
        ((True, True), ENGINE_START, 2, "EngineFailed"),
        ((True, False), ENGINE_START, 2, "Hang"),
        ((True, True), "grpo_trainer/gang/ranks.py:7 in gather", 2, "Hang"),
        ((True, True), ENGINE_START, 1, "Hang"),
    ],
)
def test_ranks_that_all_wait_in_the_start_of_an_engine_blame_it(
    waiting: tuple[bool, bool], place: str, said_by: int, result: str
) -> None:
    """The next attempt has another engine, where the same one would hang again."""
    pods = [
        make_pod(index, state=hung(MINUTES, waits, rank=index, caller=place))
        for index, waits in enumerate(waiting)
    ]
    decision = judged(running(*pods[:said_by], *map(make_pod, range(said_by, 2)), ago=16))
    assert decision.reason == result
    assert ("vLLM hangs before its first completions" in decision.message) == (
        result == "EngineFailed"
    )
    assert decision.ended is not None
    assert (decision.ended.engine_cause == "NotStarted") == (result == "EngineFailed")


@pytest.mark.parametrize(
    ("waiting", "frames", "step", "last", "result"),
    [
        ((False, True), IN_VLLM, 0, "", "EngineFailed"),
        ((True, True), IN_VLLM, 0, "", "EngineFailed"),
        ((False, True), IN_VLLM, 9, "Hang", "EngineFailed"),
        ((False, True), IN_VLLM, 9, "", "Hang"),
        ((False, True), IN_VLLM, 9, "Error", "Hang"),
        ((False, True), [IN_REWARD, "grpo_trainer/rewards/reward_set.py:9 in f"], 0, "", "Hang"),
        ((True, True), [WAITS, "grpo_trainer/gang/ranks.py:7 in gather"], 0, "Hang", "Hang"),
        ((False, True), ["grpo_trainer/engine_pod/hash_check.py:9 in f", *IN_VLLM], 0, "", "Hang"),
    ],
)
def test_a_gang_that_hangs_in_vllm_after_its_first_completions_blames_the_engine(
    waiting: tuple[bool, bool], frames: list[str], step: int, last: str, result: str
) -> None:
    """At once in the run's first step, later at the second hang in a row."""
    ended = {"attempt": 1, "reason": last, "runningSeconds": 7000, "endTime": at(-30)}
    stands = [frames, [WAITS, "grpo_trainer/gang/ranks.py:7 in any_rank"]]
    pods = [
        make_pod(
            index,
            state=hung(MINUTES - index, waits, rank=index, step=step, frames=stands[index]),
        )
        for index, waits in enumerate(waiting)
    ]
    decision = judged(running(*pods, ago=16, ends=[ended] if last else []))
    assert decision.reason == result
    assert ("vLLM hangs after its first completions" in decision.message) == (
        result == "EngineFailed"
    )


@pytest.mark.parametrize(
    ("last", "result"),
    [
        ("EngineWeightsDiffer", "EngineFailed"),
        ("Error", "EngineWeightsDiffer"),
        ("", "EngineWeightsDiffer"),
    ],
)
def test_weights_that_differ_in_two_attempts_in_a_row_are_a_failure_of_the_engine(
    last: str, result: str
) -> None:
    """Another engine takes its place, where the same one differed up to the limit."""
    ended = {"attempt": 1, "reason": last, "runningSeconds": 7000, "endTime": at(-30)}
    code = EXIT_CODES[Result.ENGINE_WEIGHTS_DIFFER]
    pod = make_pod(0, state=terminated(code, said("EngineWeightsDiffer", message="after 2 syncs")))
    decision = judged(running(pod, ago=16, ends=[ended] if last else []))
    assert (decision.action, decision.reason) == (Action.ADMIT, result)
    assert ("in two attempts in a row, after 2 syncs" in decision.message) == (
        result == "EngineFailed"
    )


def test_ranks_that_hang_in_vllm_and_elsewhere_blame_no_engine() -> None:
    pods = [
        make_pod(0, state=hung(MINUTES, waiting=False, rank=0, frames=IN_VLLM)),
        make_pod(1, state=hung(MINUTES - 9, waiting=False, rank=1)),
    ]
    assert judged(running(*pods, ago=16)).reason == "Hang"


def test_a_hang_waits_for_the_other_ranks_words_longer_than_another_end() -> None:
    ended, runs = make_pod(0, state=hung(MINUTES, True)), make_pod(1)
    assert judged(running(ended, runs, ago=5)).requeue_after == pytest.approx(10.0)
    assert judged(running(ended, runs, ago=16)).action is Action.ADMIT
    error = make_pod(0, state=terminated(1, said("Error")))
    assert judged(running(error, runs, ago=5)).action is Action.ADMIT


@settings(max_examples=cases(40))
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=300),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["silentSeconds", "waiting", "frames", "newer"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    )
)
def test_what_a_hang_says_of_where_may_be_anything_and_costs_at_most_itself(still: object) -> None:
    words = json.dumps({"result": "Hang", "message": "no step", "standstill": still})
    decision = judged(running(make_pod(0, state=terminated(41, words)), make_pod(1), ago=16))
    assert (decision.action, decision.reason, decision.counted) == (Action.ADMIT, "Hang", True)
    assert decision.message.endswith("no step")


def test_a_hang_without_a_word_of_where_is_one_still() -> None:
    decision = judged(
        running(
            make_pod(0, state=terminated(41, said("Hang", message="no step"))), make_pod(1), ago=16
        )
    )
    assert (decision.action, decision.message) == (Action.ADMIT, "no step")
