"""Answers that are not the hub's, and settings that no request can be made of: the real client
against hub.py. What a hub itself answers is in test_hub.py and test_hub_push.py."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from logging import INFO
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_api.spec.checkpoint import HubExportSpec
from grpo_api.text.contract import EXPORT_TOKEN_ENV
from grpo_api.text.messages import MAX_MESSAGE
from grpo_trainer.hub import push
from grpo_trainer.hub.repositories import Hub, Repository
from grpo_trainer.runtime.clock import LONGEST_WAIT
from grpo_trainer.runtime.errors import BadInput, HubUnavailable
from tests.stepped_clock import SteppedClock
from tests.trainer.hub import Answer, HubServer, hub_server, use
from tests.trainer.hub_uploads import WritableHub, writable_hub_in_use

pytestmark = pytest.mark.realtime

FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
SECRETS = ("s3cret", "hf_alone")
JSON = {"Content-Type": "application/json"}
GZIP: Answer = (200, {**JSON, "Content-Encoding": "gzip"}, b"no gzip")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a model, and an empty cache."""
    with hub_server() as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        server.add("model", "team/model", FILES)
        yield server


@pytest.fixture
def export_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    """An empty hub, and a token that may write to it."""
    with writable_hub_in_use(monkeypatch, tmp_path / "cache") as server:
        yield server


def fetched(
    token: str | None = None, waits: list[str] | None = None, longest_wait: float = LONGEST_WAIT
) -> dict[str, bytes]:
    """The files of the model, with waits that take no time."""
    tell = (lambda _: None) if waits is None else waits.append
    repository = Repository("model", "team/model", None, "model", token)
    way = Hub(clock=SteppedClock(), on_wait=tell, longest_wait=longest_wait)
    folder, _ = way.snapshot(repository, lambda fetch: fetch(["*.json"]))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def push_folder(folder: Path) -> str:
    """Push the folder, with waits that take no time."""
    spec = HubExportSpec.model_validate(
        {"repository": "team/out", "tokenSecretRef": {"name": "hub", "key": "token"}}
    )
    return push.push_folder(
        folder, spec, "a model", lambda _: None, is_only_copy=False, clock=SteppedClock()
    )


def first(part: str, answer: Answer, count: int = 1) -> Callable[[str, Answer], Answer]:
    """Gives this answer to the first requests with `part`."""
    answers = [answer] * count

    def change(request: str, right: Answer) -> Answer:
        return answers.pop() if part in request and answers else right

    return change


def always(part: str, answer: Answer) -> Callable[[str, Answer], Answer]:
    """Gives this answer to every request with `part`."""
    return lambda request, right: answer if part in request else right


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        ("/api/", (200, JSON, b"null")),
        ("/api/", (200, JSON, b"{}")),
        ("/tree/", (200, JSON, b"null")),
        ("/tree/", (200, JSON, b'[{"type": "file", "path": "config.json", "oid": "0"}]')),
        ("/api/", GZIP),
        ("GET /team/", GZIP),
    ],
)
def test_an_answer_that_is_not_the_hub_s_is_asked_for_again(
    hub: HubServer, part: str, answer: Answer
) -> None:
    hub.change = first(part, answer)
    assert fetched() == FILES


def test_redirects_that_lead_nowhere_pass(hub: HubServer) -> None:
    round_again = (302, {"Location": "/api/models/team/model"}, b"")
    hub.change = first("/api/models/team/model", round_again, 21)
    assert fetched() == FILES


def test_a_link_to_another_host_that_has_expired_is_asked_for_again(hub: HubServer) -> None:
    links, elsewhere = list[str](), f"http://localhost:{hub.server_address[1]}"

    def linked(request: str, answer: Answer) -> Answer:
        method, _, path = request.partition(" ")
        if not path.startswith("/team/") or "config.json" not in path:
            return answer
        if method == "GET":  # at localhost
            return (403, {}, b"<Error>Request has expired</Error>") if len(links) < 2 else answer
        links.append(path)
        size = {"X-Linked-Size": str(len(answer[2]))}
        return 302, answer[1] | size | {"Location": f"{elsewhere}{path}?signature=s3cret"}, b""

    hub.change = linked
    waits: list[str] = []
    assert fetched(waits=waits) == FILES
    assert len(links) == 2
    assert any("localhost refuses it (HTTP 403): the link has expired" in wait for wait in waits)


@pytest.mark.parametrize(
    ("part", "answer", "says"),
    [
        (
            "HEAD /team/",
            (403, {}, b""),
            r"refuses the token \(HTTP 403\).*spec.model.tokenSecretRef",
        ),
        ("GET /team/", (416, {}, b""), r"HTTP 416 .*\. Check the name"),
        ("/api/", (404, {}, b""), r"HTTP 404 Not Found\. Check the name"),
        (
            "/api/",
            (400, JSON, json.dumps({"error": "y" * 999}).encode()),
            r"HTTP 400 Bad Request: y",
        ),
    ],
)
def test_a_refusal_is_one_short_sentence(
    hub: HubServer, part: str, answer: Answer, says: str
) -> None:
    hub.change = always(part, answer)
    with pytest.raises(BadInput, match=says) as refusal:
        fetched()
    assert len(str(refusal.value)) <= MAX_MESSAGE
    assert "http://" not in str(refusal.value)


def test_no_file_outside_of_the_cache_is_taken_for_the_model_s(
    hub: HubServer, tmp_path: Path
) -> None:
    outside = tmp_path / "cache" / "hub" / "outside.json"
    outside.parent.mkdir(parents=True)
    outside.write_text("of another model")
    hub.add("model", "team/model", {**FILES, "../../../outside.json": b"{}"})
    for _ in range(2):
        with suppress(HubUnavailable):
            fetched(longest_wait=1.0)
    assert outside.exists()


def test_no_word_about_a_hub_has_its_password(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[str] = []
    hub.faults = ["503"] * 100
    for url in (hub.url, "http://127.0.0.1:1"):
        monkeypatch.setattr(constants, "ENDPOINT", url.replace("://", "://bob:s3cret@"))
        with pytest.raises(HubUnavailable) as end:
            fetched(waits=waits, longest_wait=5.0)
        # The pods' log begins at warnings.
        logged = [record.getMessage() for record in caplog.records if record.levelno > INFO]
        assert "s3cret" not in f"{end.value} {waits} {logged}"
    assert "connection refused by 127.0.0.1:1" in waits


@pytest.mark.parametrize("token", ["hf_alone\n# of bob", "\u201chf_alone\u201d"])
def test_a_token_that_no_request_takes_is_named_without_it(
    hub: HubServer, export_hub: WritableHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    token: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(EXPORT_TOKEN_ENV, token)
    (tmp_path / "export").mkdir()
    for ask, field in (
        (lambda: fetched(token), "spec.model.tokenSecretRef: the token holds"),
        (lambda: push_folder(tmp_path / "export"), "spec.export.hub.tokenSecretRef: the token"),
    ):
        with pytest.raises(BadInput, match=field) as refusal:
            ask()
        assert not any(secret in str(refusal.value) for secret in SECRETS)
    assert hub.requests == export_hub.requests == []


def test_an_endpoint_that_is_no_url_is_bad_input(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "bob:s3cret@hub.example")
    with pytest.raises(BadInput, match="HF_ENDPOINT begins with neither") as refusal:
        fetched()
    assert "s3cret" not in str(refusal.value)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An exported model."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("part", ["GET /api/models/", "/batch", "/commit/", "/tree/"])
def test_a_push_survives_answers_that_are_not_the_hub_s(
    export_hub: WritableHub, export: Path, part: str
) -> None:
    export_hub.change = first(part, (200, JSON, b"null"))
    commit = push_folder(export)
    repository = export_hub.repositories["models/team/out"]
    assert repository.commits[commit]["model.safetensors"] == b"weights"
    assert len(repository.commits) == 2, "the one that made the repository, and ours"


def test_a_refused_push_says_the_hub_s_reason_and_repeats_no_link(
    export_hub: WritableHub, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = json.dumps({"error": "Private storage limit reached"}).encode()
    export_hub.change = always("/commit/", (403, JSON, quota))
    with pytest.raises(BadInput, match=r"HTTP 403 Forbidden: Private storage limit reached") as end:
        push_folder(export)
    assert len(str(end.value)) <= MAX_MESSAGE
    export_hub.repositories.clear()
    export_hub.uploads.objects.clear()
    export_hub.change = lambda _, answer: answer
    refused: Answer = (403, {}, b"<Error>expired</Error>")
    monkeypatch.setattr(export_hub.uploads, "_put", lambda *_: refused)
    with pytest.raises(HubUnavailable, match="HTTP 403 Forbidden") as away:
        push_folder(export)
    assert "/store/" not in str(away.value)
