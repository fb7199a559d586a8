"""Spans on their way to a collector that is well, slow, strict, choosy or away; read by
OpenTelemetry's own schema."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration

from grpo_api.report import traces
from grpo_kube import transport
from grpo_kube.objects.errors import ConfigurationError
from grpo_kube.pacing import Backoff
from grpo_operator import __main__ as main
from grpo_operator.process import span_exporter as module
from grpo_operator.process.settings import Settings, Tracing
from grpo_operator.process.span_exporter import BACKLOG, BATCH, SpanExporter
from grpo_operator.tracing.spans import MAX_TEXT, Span, Trace, export_request
from harness.controlplane import free_port
from tests.generated import cases
from tests.otlp_receiver import Receiver, parsed
from tests.unit.operator_world import NOW, make_job
from tests.unit.test_kube_client import serving

pytestmark = pytest.mark.realtime

TRACE = Trace.of_attempt(make_job(), 2, "1.2")


def span(number: int = 0, trace: Trace = TRACE) -> Span:
    attributes = {traces.STEP_NUMBER.key: number}
    return trace.span(traces.STEP, NOW, NOW + number, number=number, attributes=attributes)


@asynccontextmanager
async def sending(url: str, **headers: str) -> AsyncIterator[tuple[SpanExporter, Counter[str]]]:
    """An exporter that runs, and what it counts."""
    counts: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        exporter = SpanExporter(session, url, headers, lambda result, n: counts.update({result: n}))
        running = asyncio.create_task(exporter.run())
        try:
            yield exporter, counts
        finally:
            running.cancel()
            await asyncio.wait([running])
            await exporter.flush()


@pytest.fixture(autouse=True)
def _no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER", 0.0)


async def until(probe: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not probe():  # noqa: ASYNC110  what is counted sets no event
            await asyncio.sleep(0.005)


async def test_all_spans_arrive_in_order_in_batches_with_the_headers_that_were_asked_for() -> None:
    receiver, many = Receiver(), 3 * BATCH + 5
    async with (
        serving(receiver.handle) as url,
        sending(f"{url}/", authorization="Bearer x") as (exporter, counts),
    ):
        for number in range(many):
            exporter.put(span(number))
        await until(lambda: counts["sent"] == many)
    assert [one.attributes["grpo.step"] for one in receiver.spans] == list(range(many))
    assert len(receiver.requests) == 4
    assert {one["authorization"] for one in receiver.requests} == {"Bearer x"}
    assert counts == {"sent": many, "refused": 0}


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_what_can_not_be_taken_now_is_sent_again_after_a_pause(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The collector asks for no pause, which must not make it be asked without end.
    pauses = list[Backoff]()

    async def wait(backoff: Backoff) -> None:
        pauses.append(backoff)

    monkeypatch.setattr(Backoff, "wait", wait)
    answers = [web.Response(status=status, headers={"Retry-After": "0"}) for _ in range(3)]
    receiver = Receiver(lambda: answers.pop() if answers else web.json_response({}))
    async with serving(receiver.handle) as url, sending(url) as (exporter, counts):
        exporter.put(span())
        await until(lambda: counts["sent"] == 1)
    assert (len(receiver.requests), len(receiver.spans)) == (4, 1)
    assert len(pauses) == 3


@pytest.mark.parametrize("status", [302, 400, 401, 404, 413, 500])
async def test_what_is_refused_for_good_is_counted_and_does_not_hold_up_the_rest(
    status: int,
) -> None:
    answers = [
        web.Response(status=status, headers={"Location": "http://169.254.169.254/"}, text="no" * 99)
    ]
    receiver = Receiver(lambda: answers.pop() if answers else web.json_response({}))
    async with serving(receiver.handle) as url, sending(url) as (exporter, counts):
        exporter.put(span(1))
        await until(lambda: counts["refused"] == 1)
        exporter.put(span(2))
        await until(lambda: counts["sent"] == 1)
    assert [one.attributes["grpo.step"] for one in receiver.spans] == [2]


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ('{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}', 2),
        ('{"partialSuccess": {"rejectedSpans": 99}}', 5),
        ('{"partialSuccess": {"errorMessage": "deprecated"}}', 0),
        *(
            (text, 0)
            for text in ("", "{}", "[]", "no json", '{"partialSuccess": null}', "[" * 100_000)
        ),
        ('{"partialSuccess": {"rejectedSpans": "many"}}', 0),
        ('{"partialSuccess": {"rejectedSpans": -3}}', 0),
        ('{"partialSuccess": {"rejectedSpans": 1e999}}', 0),
    ],
)
async def test_a_partial_success_counts_what_was_refused(answer: str, refused: int) -> None:
    receiver = Receiver(lambda: web.Response(text=answer))
    async with serving(receiver.handle) as url, sending(url) as (exporter, counts):
        for number in range(5):
            exporter.put(span(number))
        await until(lambda: counts["sent"] + counts["refused"] == 5)
    assert counts["refused"] == refused


@pytest.mark.parametrize("status", [200, 404])
async def test_a_page_at_a_wrong_address_takes_no_span_and_is_logged_once(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    page = "<!DOCTYPE html><p>sign in"
    answers = [web.Response(status=status, text=page) for _ in range(3)]
    receiver = Receiver(lambda: answers.pop() if answers else web.json_response({}))
    async with serving(receiver.handle) as url, sending(url) as (exporter, counts):
        for number in range(4):
            exporter.put(span(number))
            await until(lambda number=number: counts.total() == number + 1)  # type: ignore[misc]
        answers.append(web.Response(status=404))
        exporter.put(span())
        await until(lambda: counts["refused"] == 4)
    assert counts == {"refused": 4, "sent": 1}
    first, second = [
        record.getMessage() for record in caplog.records if record.name == module.__name__
    ]
    assert first.startswith("the collector refuses spans: ")
    assert "sign in" in first
    assert second == "the collector refuses spans: HTTP 404: b''"


async def test_a_collector_that_is_away_costs_nobody_a_wait_and_no_more_than_the_backlog() -> None:
    async with sending(f"http://127.0.0.1:{free_port()}") as (exporter, counts):
        for number in range(BACKLOG + 50):
            exporter.put(span(number))
        await asyncio.sleep(0.05)
        assert counts == {"dropped": 50}
        exporter.put(span())
    assert counts == {"dropped": BACKLOG + 51}, "the rest is given up with the process"


async def test_what_waits_at_the_end_is_still_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER", 60.0)
    monkeypatch.setattr(module, "FLUSH", 60.0)  # a machine may stand still for the product's
    receiver, many = Receiver(), BATCH + 1
    async with serving(receiver.handle) as url:
        async with sending(url) as (exporter, counts):
            for number in range(many):
                exporter.put(span(number))
            await asyncio.sleep(0)
        assert counts["sent"] == len(receiver.spans) == many


async def test_at_the_end_a_collector_that_does_not_answer_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FLUSH", 0.05)

    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with serving(never) as url:
        async with sending(url) as (exporter, counts):
            exporter.put(span())
            await asyncio.sleep(0.05)
        assert counts == {"dropped": 1}


async def test_a_collector_that_does_not_answer_does_not_delay_the_release_of_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    @asynccontextmanager
    async def elector(*_: object) -> AsyncIterator[None]:
        try:
            yield None
        finally:
            order.append("released")

    async def load(_: object) -> Configuration:
        configuration = Configuration()
        configuration.host = "http://127.0.0.1:9"
        return configuration

    async def flush(_: SpanExporter) -> None:
        order.append("flushed")

    def no_port(*_: object) -> None:
        raise ConfigurationError("the port is taken")

    monkeypatch.setattr(main, "_leader_elector", elector)
    monkeypatch.setattr(main, "serve_pages", no_port)
    monkeypatch.setattr(transport, "load", load)
    monkeypatch.setattr(SpanExporter, "flush", flush)
    chosen = Settings(tracing=Tracing(endpoint="http://127.0.0.1:9"))
    with pytest.raises(ConfigurationError):
        await main.run(chosen)
    assert order == ["released", "flushed"]


texts = st.text(st.characters(), max_size=40) | st.just("x" * (2 * MAX_TEXT)) | st.just("\ud800")


@settings(max_examples=cases(60))
@given(
    times=st.tuples(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12)),
    attributes=st.dictionaries(
        st.sampled_from([attribute.key for attribute in traces.ATTRIBUTES]),
        texts | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
    ),
    failure=st.none() | texts,
    attempt=st.integers(1, 2**31),
)
def test_any_span_is_valid_by_the_schema(
    times: tuple[float, float], attributes: Any, failure: str | None, attempt: int
) -> None:
    trace = Trace.of_attempt(make_job(), attempt, "1.2")
    made = trace.span(traces.ATTEMPT, *times, parent="", attributes=attributes)
    made = Span(**{name: getattr(made, name) for name in made.__slots__} | _failure(failure))
    body = export_request([made, span()])
    (first, second) = parsed(json.dumps(body))
    assert first.span.start_time_unix_nano <= first.span.end_time_unix_nano
    assert first.attributes.keys() == attributes.keys()
    assert (first.span.trace_id.hex(), first.span.span_id.hex()) == (trace.id, made.id)
    assert (first.span.status.code == 2) == (failure is not None)
    assert [link.trace_id.hex() for link in first.span.links] == (
        [trace.before.id] if trace.before else []
    )
    assert second.resource["k8s.namespace.name"] == "team-a"
    assert second.resource["k8s.job.name"] == "run-2"


def _failure(message: str | None) -> dict[str, Any]:
    return {} if message is None else {"failed": True, "message": message}
