"""The `http` reward through outages: what passes costs time and nothing else, what stays costs its
own completions.

Minutes pass on a virtual clock, where the tries are scripted; what goes over the wire is real.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.spec.rewards import HTTPReward
from grpo_api.text.clock import requested_pause
from grpo_trainer.rewards import http_service
from grpo_trainer.rewards.http_service import HTTPFunction
from grpo_trainer.rewards.reward_base import RewardCounters, Scores
from harness.controlplane import free_port
from harness.programs.patience import wait_for_event
from tests.generated import cases
from tests.trainer.faulty_service import Answer, Body, lengths, serving
from tests.virtual_time import virtually

TEXTS = [f"completion {'x' * length}" for length in range(20)]
LENGTHS = [float(len(text)) for text in TEXTS]


def http_function(
    url: str = "http://judge/score", **fields: Any
) -> tuple[HTTPFunction, RewardCounters]:
    """With the defaults, but for the fields named."""
    counters = RewardCounters()
    return HTTPFunction(
        "judge", HTTPReward.model_validate({"url": url, **fields}), counters, None
    ), counters


async def score(function: HTTPFunction, texts: list[str]) -> Scores:
    return await function(prompts=texts, completions=texts)


async def scored_at(function: HTTPFunction) -> tuple[Scores, float]:
    """Scores of TEXTS, and when they were there."""
    return await score(function, TEXTS), asyncio.get_running_loop().time()


@pytest.mark.parametrize("seconds", [3, 20, 240])
def test_a_service_that_is_down_costs_the_time_until_it_is_back(seconds: int) -> None:
    function, counters = http_function(batchSize=2)

    async def post(_: Any, chunk: Body, __: int) -> Scores:
        if asyncio.get_running_loop().time() < seconds:
            raise http_service._Passing("ClientConnectorError: Connection refused")
        return [float(len(text)) for text in chunk["completions"]]

    vars(function)["_post"] = post
    scores, at = virtually(scored_at(function))
    assert scores == LENGTHS
    assert seconds <= at <= seconds + http_service._LONGEST_PAUSE
    assert counters == RewardCounters()


def test_pauses_grow_and_differ() -> None:
    function, _ = http_function()
    for failures in range(100):
        longest = min(http_service._LONGEST_PAUSE, http_service._FIRST_PAUSE * 2**failures)
        pauses = {function._pause(failures) for _ in range(5)}
        assert len(pauses) > 1
        assert all(longest / 2 <= pause <= longest for pause in pauses)


def test_who_waits_for_another_try_holds_up_nobody() -> None:
    function, counters = http_function(batchSize=1, maxConcurrency=1, batchTimeoutSeconds=30)

    async def post(_: Any, chunk: Body, __: int) -> Scores:
        await asyncio.sleep(0.1)
        if chunk["completions"] == TEXTS[:1]:
            raise http_service._Passing("HTTP 500")
        return [float(len(text)) for text in chunk["completions"]]

    vars(function)["_post"] = post
    scores, at = virtually(scored_at(function))
    assert scores == [None, *LENGTHS[1:]]
    assert at == pytest.approx(30)
    assert counters == RewardCounters(timeouts=1)


CHUNKS = st.lists(
    st.tuples(
        st.lists(st.floats(0, 40), max_size=5),  # seconds that each try in vain takes
        st.sampled_from(["scores", "no opinion", "permanent", "for ever", "silent"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=cases(50))
@given(chunks=CHUNKS, concurrency=st.integers(1, 4), seconds=st.sampled_from([1, 60, 3600]))
def test_every_completion_is_scored_or_counted_within_the_time(
    chunks: list[tuple[list[float], str]], concurrency: int, seconds: int
) -> None:
    function, counters = http_function(
        batchSize=1, maxConcurrency=concurrency, batchTimeoutSeconds=seconds
    )
    texts = [str(number) for number in range(len(chunks))]
    left = [list(failures) for failures, _ in chunks]
    ended: dict[int, str] = {}

    async def post(_: Any, chunk: Body, __: int) -> Scores:
        number = int(chunk["completions"][0])
        end = chunks[number][1]
        if left[number] or end == "for ever":
            await asyncio.sleep(left[number].pop() if left[number] else 1.0)
            raise http_service._Passing("HTTP 503: b'later'")
        if end == "silent":
            await asyncio.Event().wait()
        ended[number] = end
        if end == "permanent":
            raise http_service._Permanent("HTTP 401: b'no'")
        return [None if end == "no opinion" else float(number)]

    vars(function)["_post"] = post

    async def run() -> tuple[Scores, float]:
        return await score(function, texts), asyncio.get_running_loop().time()

    scores, at = virtually(run())
    assert at <= seconds + 1e-6
    assert scores == [
        float(number) if ended.get(number) == "scores" else None for number in range(len(chunks))
    ]
    permanent = sum(end == "permanent" for end in ended.values())
    assert counters == RewardCounters(failures=permanent, timeouts=len(chunks) - len(ended))
    assert bool(counters.last_problem) == (counters.failures + counters.timeouts > 0)
    if at < seconds - 1e-6:
        assert len(ended) == len(chunks), "nobody is given up while there is time"


def seconds_asked(retry_after: str, date: str | None = None) -> float:
    headers = {"Retry-After": retry_after} | ({"Date": date} if date else {})
    return requested_pause(headers, http_service._LONGEST_ASKED)


def test_retry_after_is_understood() -> None:
    assert seconds_asked("7") == 7
    assert seconds_asked(" 0 ") == 0
    assert seconds_asked("3600") == http_service._LONGEST_ASKED
    assert seconds_asked(formatdate(1012.0, usegmt=True), formatdate(1000.0, usegmt=True)) == 12
    assert seconds_asked(formatdate(900.0, usegmt=True), formatdate(1000.0, usegmt=True)) == 0
    assert seconds_asked(formatdate(1012.0, usegmt=True)) == 0, (
        "without a Date nobody knows the service's clock"
    )


@settings(max_examples=cases(40))
@given(
    asked=st.text(max_size=40) | st.from_regex(r"[-+]?[0-9]{0,400}", fullmatch=True),
    date=st.none() | st.text(),
)
def test_any_retry_after_is_a_bounded_pause(asked: str, date: str | None) -> None:
    assert 0 <= seconds_asked(asked, date) <= http_service._LONGEST_ASKED


@pytest.fixture
def short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_service, "_FIRST_PAUSE", 0.01)
        patch.setattr(http_service, "_LONGEST_PAUSE", 0.05)
        yield


@pytest.mark.realtime
def test_a_refused_connection_is_tried_until_the_service_is_there(short_pauses: None) -> None:
    """A restart of three seconds, which used to end the attempt."""
    port, done = free_port(), threading.Event()

    def serve_later() -> None:
        time.sleep(3)
        with serving(lambda _, body: lengths(body), port):
            wait_for_event(done, 60)

    service = threading.Thread(target=serve_later)
    service.start()
    try:
        function, counters = http_function(f"http://127.0.0.1:{port}/score")
        assert asyncio.run(score(function, TEXTS)) == LENGTHS
    finally:
        done.set()
        service.join()
    assert counters == RewardCounters()


@pytest.mark.realtime
def test_retry_after_is_waited_for(short_pauses: None) -> None:
    told: list[float] = []

    def script(_: int, body: Body) -> Answer:
        told.append(time.monotonic())
        return (429, b"slow down", {"Retry-After": "1"}) if len(told) == 1 else lengths(body)

    with serving(script) as service:
        function, _ = http_function(service.url)
        assert asyncio.run(score(function, TEXTS)) == LENGTHS
    first, second = told
    assert second - first >= 1


FAULTS = st.one_of(
    st.sampled_from([500, 502, 503, 504, 408, 425, 429, 202, 204, 599]).map(
        lambda status: (status, b"")
    ),
    st.sampled_from(
        [
            b"<html>",
            b"",
            b"[]",
            b"null",
            b'{"rewards": 1}',
            b'{"rewards": []}',
            b'{"rewards": [1e999]}',
            b"[" * 100000,
        ]
    ).map(lambda body: (200, body)),
    st.sampled_from([b'{"rewards": [NaN]}', b'{"rewards": ["1"]}', b'{"rewards": [1, 2]}']).map(
        lambda b: (200, b)
    ),
    st.sampled_from(
        [
            b"",
            b"\x00" * 64,
            b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{",
            b"HTTP/1.1 999999 x\r\n\r\n",
        ]
    ),
    st.sampled_from(
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 503\r\n\r\n"]
    ),
    st.binary(max_size=64),
)


@pytest.mark.realtime
@settings(max_examples=cases(30))
@given(faults=st.lists(FAULTS, min_size=1, max_size=4))
def test_whatever_a_service_answers_passes_once_it_answers_well(faults: list[Answer]) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(
            lambda number, body: faults[number - 1] if number <= len(faults) else lengths(body)
        ) as service,
    ):
        patch.setattr(http_service, "_FIRST_PAUSE", 0.001)
        patch.setattr(http_service, "_LONGEST_PAUSE", 0.001)
        function, counters = http_function(service.url)
        assert asyncio.run(score(function, ["abc"])) == [3.0]
        assert len(service.bodies) == len(faults) + 1
    assert counters == RewardCounters()
