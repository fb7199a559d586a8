"""What a store may answer beside its objects, and settings that its client can't use: the real
client against a server that answers by a script."""

from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import pytest

from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_trainer.runtime.clock import OnWait, ignore_wait
from grpo_trainer.runtime.errors import BadInput, Denied, StoreFailed
from grpo_trainer.stores.store_client import Store, open_store
from tests.stepped_clock import SteppedClock
from tests.trainer.hub import serving

pytestmark = pytest.mark.realtime

Answer = tuple[int, dict[str, str], bytes]
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "s3cret"}
OBJECT: Answer = (200, {"ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, b"{}")
PAGE: Answer = (200, {"Content-Type": "text/html"}, b"<html>please log in</html>")
LISTING: Answer = (
    200,
    {},
    b"""<ListBucketResult><Contents><Key>runs/head.json</Key>
<LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>"1"</ETag><Size>2</Size></Contents>
</ListBucketResult>""",
)
CONFLICT: Answer = (409, {}, b"<Error><Code>OperationAborted</Code></Error>")
DENIED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SignatureDoesNotMatch</Code><Message>Check your
key</Message><AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId><CanonicalRequest>x-amz-security-token:s3cret
</CanonicalRequest></Error>"""


class ScriptedStore(ThreadingHTTPServer):
    """Answers each request by the next of its answers, and all further ones by the last."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = []

    @property
    def url(self) -> str:
        """For spec.checkpoint.store.endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedStore

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """The next answer."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        answers = self.server.answers
        status, headers, content = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_GET


@pytest.fixture
def server() -> Iterator[ScriptedStore]:
    with serving(ScriptedStore()) as server:
        yield server


def store_at(
    url: str, settings: Mapping[str, str] = MappingProxyType({}), tell: OnWait = ignore_wait
) -> Store:
    """A store whose waits take no time, and end after a few seconds."""
    spec = ObjectStoreSpec(url="s3://bucket/runs", endpoint=url)
    return open_store(spec, {**KEYS, **settings}, tell, clock=SteppedClock()).within(5.0)


@pytest.mark.parametrize("answer", [PAGE, CONFLICT, (412, {}, b"")])
@pytest.mark.parametrize(
    "ask", [lambda store: store.get("head.json"), lambda store: store.put("head.json", b"{}")]
)
def test_what_is_not_the_store_s_answer_to_a_request_passes(
    server: ScriptedStore, answer: Answer, ask: Callable[[Store], object]
) -> None:
    server.answers = [answer, OBJECT]
    ask(store_at(server.url))
    server.answers = [answer]
    with pytest.raises(StoreFailed):
        ask(store_at(server.url))


def test_a_page_is_no_list_without_an_object(server: ScriptedStore) -> None:
    server.answers = [PAGE, LISTING]
    assert store_at(server.url).object_sizes() == {"head.json": 2}
    server.answers = [PAGE]
    with pytest.raises(StoreFailed, match=r"list: no answer .*a proxy's page\?$"):
        store_at(server.url).object_sizes()


def test_a_refusal_says_the_store_s_reason_and_repeats_no_key(server: ScriptedStore) -> None:
    server.answers = [(403, {}, DENIED)]
    with pytest.raises(Denied) as refusal:
        store_at(server.url).get("head.json")
    assert str(refusal.value) == (
        "s3://bucket/runs: get head.json is refused: HTTP 403 Forbidden: SignatureDoesNotMatch: "
        "Check your key. Check the bucket, the endpoint, the region and the rights of the "
        "credentials (docs/how-to/models/object-stores.md)"
    )


def test_a_bucket_in_another_region_is_no_silence(server: ScriptedStore) -> None:
    server.answers = [(301, {}, b"<Error><Code>PermanentRedirect</Code></Error>")]
    with pytest.raises(Denied, match=r"region.*Check the bucket, the endpoint, the region"):
        store_at(server.url).get("head.json")


def test_a_wait_is_told_in_the_same_words_at_each_try(server: ScriptedStore) -> None:
    waits: list[str] = []
    server.answers = [(503, {}, b"<Error><Code>SlowDown</Code></Error>")]
    with pytest.raises(StoreFailed, match=r"with: HTTP 503 Service Unavailable: SlowDown$"):
        store_at(server.url, tell=waits.append).get("head.json")
    assert set(waits) == {"s3://bucket/runs: HTTP 503 Service Unavailable: SlowDown", ""}
    with pytest.raises(StoreFailed, match=r"with: connection refused by s3://bucket/runs$"):
        store_at("http://127.0.0.1:1").get("head.json")


@pytest.mark.parametrize("name", ["AWS_ALLOW_HTTP", "TIMEOUT"])
def test_a_setting_at_which_the_client_panics_is_bad_input(name: str) -> None:
    with pytest.raises(BadInput, match=rf"can't be opened with .*{name}.*such as ALLOW_HTTP"):
        store_at("http://127.0.0.1:1", {name: "true"})


def test_a_value_at_which_the_client_panics_is_named_without_it(server: ScriptedStore) -> None:
    server.answers = [OBJECT]
    with pytest.raises(Denied, match="holds a line break") as refusal:
        store_at(server.url, {"AWS_SESSION_TOKEN": "s3cret\ntoken"}).get("head.json")
    assert "s3cret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "region"), [({}, "us-east-1"), ({"AWS_REGION": "eu-west-1"}, "eu-west-1")]
)
def test_a_secret_may_name_the_region(settings: dict[str, str], region: str) -> None:
    store = open_store(ObjectStoreSpec(url="s3://bucket"), {**KEYS, **settings})
    backend: Any = store._backend
    assert backend.config["region"] == region


@pytest.mark.parametrize("settings", [{}, {"AZURE_STORAGE_ACCOUNT_NAME": "account"}])
def test_an_azure_url_names_account_and_container(settings: dict[str, str]) -> None:
    keys = {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5", **settings}
    store = open_store(ObjectStoreSpec(url="az://account/container/runs"), keys, folder="demo-0")
    assert store.url == "az://account/container/runs/demo-0"
    backend: Any = store._backend
    assert backend.prefix == "runs/demo-0"
    assert backend.config == {
        "account_name": "account",
        "container_name": "container",
        "account_key": "a2V5",
    }
