"""What rank 0 says to whom: metrics to everybody, training data to those who show the attempt's
token."""

import math
import re
import socket
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_api.report.report import Samples
from grpo_api.text.contract import HEADER, PROGRESS_BIND_ENV, TOKEN_DIGEST_ENV, digest
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.telemetry.progress_server import limits_of, serve
from harness.controlplane import free_port
from tests.generated import cases
from tests.support.ranks import runs

pytestmark = pytest.mark.realtime

PLAN = runs.plan(Path("/models/demo"))
OWN, OTHER = b"a1" * 32, b"b2" * 32
PROMPT = "2 + 2"
NAME = HEADER.encode()


def served(monkeypatch: pytest.MonkeyPatch, wanted: str) -> int:
    """The port of a rank 0 with samples, which was told of the token with this digest."""
    port = free_port()
    monkeypatch.setenv(PROGRESS_BIND_ENV, f"127.0.0.1:{port}")
    monkeypatch.setenv(TOKEN_DIGEST_ENV, wanted)
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    recorder.record_metrics(
        {"kl": 0.25}, [{"prompt": PROMPT, "completion": "4", "digits": math.nan}]
    )
    serve(limits_of(PLAN), recorder)
    return port


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a rank 0 that was told of its attempt's token."""
    return served(monkeypatch, digest(OWN.decode()))


def asked(port: int, path: str, *headers: bytes) -> tuple[int, bytes]:
    """Status and body for a request with these lines."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(
            b"\r\n".join([b"GET " + path.encode() + b" HTTP/1.0", *headers, b"", b""])
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def line(token: bytes, name: bytes = NAME) -> bytes:
    return name + b": " + token


def test_training_data_are_shown_with_the_attempts_token_alone(guarded: int) -> None:
    wrong = (
        OTHER,
        OWN[:-1],
        OWN + b"0",
        OWN.upper(),
        digest(OWN.decode()).encode(),
        b"",
        b"Bearer " + OWN,
    )
    for path in ("/samples", "/progress", "/progress?traceEvery=3", "/samples?x"):
        refused = asked(guarded, path)
        assert refused[0] == 403
        for headers in (
            *((line(token),) for token in wrong),
            (line(OWN, b"Authorization"),),
            (line(OTHER),) * 2,
        ):
            assert asked(guarded, path, *headers) == refused
        own = line(OWN)
        for headers in (
            (own,),
            (own, own),
            (line(OTHER), own),
            (line(OTHER + b", " + OWN),),
            (own.lower(),),
        ):
            assert asked(guarded, path, *headers)[0] == 200


def test_samples_are_on_their_own_page_only(guarded: int) -> None:
    shown = Samples.model_validate_json(asked(guarded, "/samples", line(OWN))[1])
    assert [sample["completion"] for sample in shown.samples] == ["4"]
    for page in ("/progress", "/metrics", "/healthz"):
        status, body = asked(guarded, page, line(OWN))
        assert (status, PROMPT.encode() in body) == (200, False)
    assert [asked(guarded, page)[0] for page in ("/metrics", "/healthz")] == [200, 200]


@settings(max_examples=cases(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.binary(max_size=60).map(lambda text: re.sub(rb"[\r\n]", b" ", text)), max_size=3
    )
)
def test_no_bytes_in_the_header_open_it(guarded: int, lines: list[bytes]) -> None:
    status, body = asked(guarded, "/samples", *map(line, lines))
    assert status in (400, 403, 431)
    assert PROMPT.encode() not in body


def test_who_was_told_of_no_token_shows_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    port = served(monkeypatch, "")
    assert asked(port, "/progress")[0] == 200
    for headers in ([], [line(b"")], [line(OWN)]):
        assert asked(port, "/samples", *headers)[0] == 403
