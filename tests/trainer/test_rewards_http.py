"""The `http` reward against a real service that fails in every way.

A service's bad minutes must cost rewards, not the run, and silence must never be taken for a zero.
"""

import asyncio
import math
import random
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import encode_basic_auth

from grpo_api.spec.rewards import HTTPReward
from grpo_trainer.rewards import http_service
from grpo_trainer.rewards.http_service import HTTPFunction
from grpo_trainer.rewards.reward_base import RewardCounters
from grpo_trainer.rewards.reward_set import FailureLimits, ScoredCompletions
from grpo_trainer.runtime.errors import BadInput, RewardError
from tests.trainer.faulty_service import Body, Service, lengths, serving

pytestmark = pytest.mark.realtime

SECONDS = 10
"""A time that is to run out, and in which every answer comes on a busy machine."""
TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "_FIRST_PAUSE", 0.01)


def http_function(
    service: Service, token: str | None = None, **fields: Any
) -> tuple[HTTPFunction, RewardCounters]:
    counters = RewardCounters()
    spec = HTTPReward.model_validate({"url": service.url, "timeoutSeconds": 600, **fields})
    return HTTPFunction("judge", spec, counters, token), counters


async def score(function: HTTPFunction, texts: list[str] = TEXTS) -> list[float | None]:
    columns = {"answer": [f"answer {text}" for text in texts], "completion_ids": [[1]] * len(texts)}
    state = SimpleNamespace(global_step=4)
    return await function(
        prompts=[f"p {text}" for text in texts],
        completions=list(texts),
        trainer_state=state,
        **columns,
    )


def judge(counters: RewardCounters, share: float, asked: int = len(TEXTS)) -> None:
    """What the end of a run of one generation does with the counters of one process."""
    scored = ScoredCompletions(asked, {"judge": counters.failures + counters.timeouts})
    FailureLimits({"judge": counters}, {"judge": share}).judge(5, scored, is_last=True)


async def test_batches_go_out_with_prompts_and_columns_and_come_back_in_order() -> None:
    with serving(lambda _, body: lengths(body)) as service:
        function, counters = http_function(service, batchSize=2, token="s3cret")
        assert await score(function) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(len(body["completions"]) for body in service.bodies) == [1, 2, 2]
    first = next(body for body in service.bodies if body["completions"] == ["a", "bb"])
    assert first == {
        "prompts": ["p a", "p bb"],
        "completions": ["a", "bb"],
        "columns": {"answer": ["answer a", "answer bb"]},
    }
    assert {headers["Authorization"] for headers in service.headers} == {"Bearer s3cret"}
    assert counters == RewardCounters()


async def test_a_cell_that_is_no_number_is_null() -> None:
    with serving(lambda _, body: lengths(body)) as service:
        function, _ = http_function(service)
        cells = [1.5, math.nan, [-math.inf, {"deep": math.inf}]]
        await function(prompts=["p"] * 3, completions=["a"] * 3, answer=cells)
    assert service.bodies[0]["columns"] == {"answer": [1.5, None, [None, {"deep": None}]]}


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
async def test_a_service_is_reached_through_the_proxy_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda _, body: lengths(body)) as proxy:
        monkeypatch.setenv(variable, proxy.url.replace("://", "://team:s3cret@"))
        function, _ = http_function(replace(proxy, url="http://judge.example.com/score"))
        assert await score(function) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert {headers["Host"] for headers in proxy.headers} == {"judge.example.com"}
    password = encode_basic_auth("team", "s3cret")
    assert {headers["Proxy-Authorization"] for headers in proxy.headers} == {password}


async def test_a_proxy_may_be_named_without_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _, body: lengths(body)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://").rstrip("/"))
        function, _ = http_function(replace(proxy, url="http://judge.example.com/score"))
        assert await score(function, ["a"]) == [1.0]


@pytest.mark.parametrize("without", ["127.0.0.1", "*"])
async def test_a_service_of_no_proxy_is_reached_directly(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", without)
    with serving(lambda _, body: lengths(body)) as service:
        function, _ = http_function(service)
        assert await score(function, ["a"]) == [1.0]


async def test_no_more_requests_at_once_than_declared() -> None:
    both = threading.Barrier(2)

    def script(_: int, body: Body) -> tuple[int, bytes]:
        both.wait(60)
        return lengths(body)

    with serving(script) as service:
        function, _ = http_function(service, batchSize=1, maxConcurrency=2)
        await score(function, ["a", "bb", "ccc", "dddd"])
    assert service.most_at_once == 2


@pytest.mark.parametrize(
    "fault",
    [
        (500, b"oops"),
        (503, b""),
        (429, b"slow down"),
        (200, b"<html>"),
        (200, b"[1, 2]"),
        (200, b'{"rewards": [1.0]}'),
        (200, b'{"rewards": ["1", "2"]}'),
        (200, b'{"rewards": [NaN, 2]}'),
        (200, b'{"rewards": 3}'),
    ],
)
async def test_a_fault_that_passes_costs_another_try_and_nothing_else(
    fault: tuple[int, bytes],
) -> None:
    with serving(lambda number, body: fault if number == 1 else lengths(body)) as service:
        function, counters = http_function(service)
        assert await score(function, ["a", "bb"]) == [1.0, 2.0]
    assert len(service.bodies) == 2
    assert counters == RewardCounters()


async def test_a_service_may_have_no_reward_for_a_completion() -> None:
    with serving(lambda *_: (200, b'{"rewards": [1, null]}')) as service:
        function, counters = http_function(service)
        assert await score(function, ["a", "bb"]) == [1.0, None]
    assert counters == RewardCounters()


async def test_a_lasting_fault_costs_only_its_own_completions_within_the_share() -> None:
    def script(_: int, body: Body) -> tuple[int, bytes]:
        return (500, b"oops") if "ccc" in body["completions"] else lengths(body)

    with serving(script) as service:
        function, counters = http_function(
            service, batchSize=2, maxConcurrency=1, batchTimeoutSeconds=SECONDS
        )
        assert await score(function) == [1.0, 2.0, None, None, 5.0]
        assert sum("ccc" in body["completions"] for body in service.bodies) > 3
        assert counters == RewardCounters(timeouts=2, failures=0)
    judge(counters, 0.4)
    with pytest.raises(
        RewardError,
        match=r"'judge', step 5: 2 of the 5 completions .*got no reward: 40.0%, more than its "
        r"maxFailureShare, 39.0%.*"
        rf"no answer within batchTimeoutSeconds = {SECONDS}; the last try: HTTP 500: oops",
    ):
        judge(counters, 0.39)


@pytest.mark.slow
async def test_silence_ends_with_the_request_s_time() -> None:
    with serving(lambda number, body: None if number == 1 else lengths(body)) as service:
        function, counters = http_function(service, timeoutSeconds=SECONDS)
        assert await score(function) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(service.bodies) == 2
    assert counters == RewardCounters()


@pytest.mark.slow
async def test_all_tries_together_end_with_the_batch_s_time() -> None:
    with serving(lambda _, body: None if "a" in body["completions"] else lengths(body)) as service:
        function, counters = http_function(service, batchSize=1, batchTimeoutSeconds=SECONDS)
        assert await score(function) == [None, 2.0, 3.0, 4.0, 5.0]
    assert counters == RewardCounters(timeouts=1, failures=0)
    assert counters.last_problem.endswith(
        f"/score: no answer within batchTimeoutSeconds = {SECONDS}"
    )
    assert function.longest_seconds == SECONDS


async def test_a_request_and_its_batch_may_have_the_same_time() -> None:
    with serving(lambda *_: None) as service:
        function, counters = http_function(service, timeoutSeconds=1, batchTimeoutSeconds=1)
        assert await asyncio.wait_for(score(function), 60) == [None] * 5
    assert counters == RewardCounters(timeouts=5)


@pytest.mark.parametrize("status", [302, 400, 401, 404])
async def test_what_will_not_change_is_not_tried_again(status: int) -> None:
    with serving(lambda *_: (status, b"no")) as service:
        function, counters = http_function(service)
        assert await score(function) == [None] * 5
    with pytest.raises(RewardError, match=rf"HTTP {status}: no"):
        judge(counters, 0.1)
    assert len(service.bodies) == 1


@pytest.mark.slow
async def test_a_service_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        absent = Service(
            url=f"http://user:secret@127.0.0.1:{closed.getsockname()[1]}/score?key=secret"
        )
        function, counters = http_function(absent, batchTimeoutSeconds=SECONDS)
        assert await score(function) == [None] * 5
    assert counters == RewardCounters(timeouts=5)
    judge(counters, 1)
    with pytest.raises(
        RewardError, match=r"5 of the 5 completions.*ClientConnectorError"
    ) as caught:
        judge(counters, 0.99)
    told = caplog.text
    assert (
        told.count(
            f"reward 'judge' tries again until batchTimeoutSeconds = {SECONDS} are over: "
            "http://127.0.0.1"
        )
        == 1
    )
    assert "secret" not in str(caught.value) + told


@pytest.mark.parametrize(
    "url",
    ["http://:80/", "http://judge:99999/", "http://[::1/", "http://a..b/", f"http://{'a' * 64}.b/"],
)
def test_a_url_that_leads_nowhere_is_bad_input(url: str) -> None:
    with pytest.raises(
        BadInput, match=r"reward 'judge': http\.url is not the address of a service"
    ):
        http_function(Service(url=url))


async def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "_LONGEST_ANSWER", 1 << 10)
    with serving(lambda *_: (200, b'{"rewards": [' + b"1," * 4096)) as service:
        function, counters = http_function(service)
        assert await score(function) == [None] * 5
    assert "an answer of more than" in counters.last_problem


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"bad completion: SECRET"),
        (200, b"SECRET"),
        (200, b'{"rewards": "SECRET"}'),
        (200, b'{"rewards": ["SECRET", 2, 3, 4, 5]}'),
    ],
)
async def test_everybody_may_read_why_a_service_is_waited_for_and_not_what_it_answers(
    answer: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []
    with serving(lambda number, body: lengths(body) if number > 1 else answer) as service:
        function, _ = http_function(service)
        vars(function)["_on_wait"] = reasons.append
        assert await score(function) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert any(reasons)
    assert "SECRET" not in str(reasons)
    assert "SECRET" in caplog.text


async def test_the_training_s_random_numbers_are_left_alone() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    with serving(lambda number, body: (500, b"") if number < 3 else lengths(body)) as service:
        function, _ = http_function(service)
        await score(function)
    assert random.random() == expected
