"""The client of the API server, against real HTTP servers that misbehave on purpose.

How they behave towards a real API server is in tests/integration/test_operator_lifecycle.py.
"""

import asyncio
import datetime
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kubernetes.aio.client import Configuration

from grpo_kube import client as cluster_module
from grpo_kube import transport
from grpo_kube.client import Client, list_and_parse
from grpo_kube.objects.errors import (
    AlreadyExists,
    ConfigurationError,
    Conflict,
    Denied,
    Expired,
    Forbidden,
    NotFound,
    Stale,
    Unavailable,
)
from grpo_kube.objects.resources import JOBS, PODS, Selection
from grpo_operator.records.names import GRPOJOBS

pytestmark = pytest.mark.realtime

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Seen = list[tuple[str, str, int]]
ALL_PODS = Selection(PODS)


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server on loopback that answers everything by the handler; its URL."""
    pages = web.Application()
    pages.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(pages, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def talking(handler: Handler, **chosen: Any) -> AsyncIterator[tuple[Client, Seen]]:
    """A client of such a server, and the requests that it counts."""
    seen: Seen = []
    async with serving(handler) as url:
        configuration = Configuration(host=url)
        configuration.api_key = {"BearerToken": "bearer secret"}
        async with Client(configuration, lambda *request: seen.append(request), **chosen) as client:
            yield client, seen


async def watched(client: Client, selection: Selection = ALL_PODS) -> list[tuple[str, Any]]:
    return [event async for event in client.watch(selection, 5, 10)]


def status(code: int, message: str = "no") -> web.Response:
    return web.json_response({"kind": "Status", "message": message, "code": code}, status=code)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_retry_delay", lambda *_: 0.01)


async def test_any_number_of_watches_leaves_connections_to_requests() -> None:
    """Each holds one for ever. Who serves fifty namespaces by name has hundreds."""
    opened: set[str] = set()

    async def hold(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"watches": len(opened)})
        opened.add(request.path)
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        await asyncio.sleep(60)
        return answer

    async with talking(hold, seconds=5, tries=1) as (client, _):
        watches = [
            asyncio.create_task(watched(client, Selection(PODS, f"team-{number}")))
            for number in range(100)
        ]
        async with asyncio.timeout(10):
            while len(opened) < len(watches):  # noqa: ASYNC110  the server sets no event
                await asyncio.sleep(0.05)
        assert await client.get(PODS, "team-0", "run-1") == {"watches": 100}
        for task in watches:
            task.cancel()


@pytest.mark.parametrize(
    ("code", "method", "error"),
    [
        (404, "get", NotFound),
        (409, "create", AlreadyExists),
        (409, "patch", Conflict),
        (410, "get", Expired),
        (422, "create", Denied),
        (403, "get", Forbidden),
        (401, "get", Unavailable),
        (429, "get", Unavailable),
        (503, "create", Unavailable),
    ],
)
async def test_every_answer_has_its_error(code: int, method: str, error: type[Exception]) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return status(code, "because")

    async with talking(refuse) as (client, seen):
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "get": lambda: client.get(JOBS, "n", "a"),
            "create": lambda: client.create(JOBS, "n", {}),
            "patch": lambda: client.patch(GRPOJOBS, "n", "a", {}, "status"),
        }
        with pytest.raises(error, match=f"{code} because"):
            await calls[method]()
    assert len(seen) == (4 if error is Unavailable else 1)


async def test_an_outage_within_the_retry_budget_is_not_noticed() -> None:
    answers = [status(503), status(429), web.json_response({"kind": "Job"})]

    async def recover(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "bearer secret"
        return answers.pop(0)

    async with talking(recover) as (client, seen):
        assert await client.get(JOBS, "n", "a") == {"kind": "Job"}
    assert [code for _, _, code in seen] == [503, 429, 200]


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with Client(Configuration(host="http://127.0.0.1:1")) as client:
        with pytest.raises(Unavailable):
            await watched(client)


async def test_a_redirect_gets_neither_the_token_nor_a_say() -> None:
    tokens = list[str | None]()

    async def login(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization"))
        return web.json_response({"items": [], "metadata": {"resourceVersion": "7"}})

    async with serving(login) as login_url:

        async def proxy(_: web.Request) -> web.Response:
            return web.Response(status=302, headers={"Location": login_url})

        async with talking(proxy) as (client, _):
            for ask in (list_and_parse(client, ALL_PODS, dict), watched(client)):
                with pytest.raises(Unavailable, match=f"redirected to {login_url}"):
                    await ask
    assert tokens == []


def kubeconfig(folder: Path, **cluster: str) -> str:
    """The path of a new kubeconfig with these fields of its cluster."""
    config = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    return str(file)


async def test_requests_go_through_the_proxy_url_of_a_kubeconfig(tmp_path: Path) -> None:
    targets = list[str]()

    async def proxy(request: web.Request) -> web.Response:
        targets.append(str(request.url))
        return web.json_response({})

    async with serving(proxy) as url:
        file = kubeconfig(tmp_path, server="http://api.invalid", **{"proxy-url": url})
        async with Client(await transport.load(file)) as client:
            await client.get(JOBS, "n", "a")
    assert targets == ["http://api.invalid/apis/batch/v1/namespaces/n/jobs/a"]


async def test_a_proxy_that_is_none_of_http_is_refused_with_the_field(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, server="http://api.invalid", **{"proxy-url": "socks5://a:1"})
    with pytest.raises(ConfigurationError, match="proxy-url: the proxy is neither"):
        await transport.load(file)


def certificate_of(name: str, folder: Path) -> Path:
    """A file with a certificate that this server name signs for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key_format = serialization.PrivateFormat.PKCS8
    key_bytes = key.private_bytes(pem, key_format, serialization.NoEncryption())
    file = folder / "server.pem"
    file.write_bytes(certificate.public_bytes(pem) + key_bytes)
    return file


async def test_a_server_is_known_by_the_tls_server_name_of_a_kubeconfig(tmp_path: Path) -> None:
    file = certificate_of("api.example", tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(file)

    async def api(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Job"})

    cluster = {"certificate-authority": str(file), "tls-server-name": "api.example"}
    async with serving(api, tls) as url:
        configuration = await transport.load(kubeconfig(tmp_path, server=url, **cluster))
        async with Client(configuration) as client:
            assert await client.get(JOBS, "n", "a") == {"kind": "Job"}


async def test_an_answer_without_json_is_quoted() -> None:
    async def confused(_: web.Request) -> web.Response:
        return web.Response(status=400, text="<html>proxy</html>")

    async with talking(confused) as (client, _):
        with pytest.raises(Denied, match="400 <html>proxy</html>"):
            await client.get(JOBS, "n", "a")


@pytest.mark.parametrize(
    "text", ["<html>welcome</html>", "[]", "null", '{"metadata": {}}', '{"metadata": null}', "{}"]
)
async def test_a_success_that_is_no_list_is_an_outage(text: str) -> None:
    async def confused(_: web.Request) -> web.Response:
        return web.Response(text=text)

    async with talking(confused) as (client, _):
        with pytest.raises(Unavailable, match=r"no list|no JSON object"):
            await list_and_parse(client, ALL_PODS, lambda item: item)


@pytest.mark.parametrize(
    "line", ["<html>", "[]", "7", '{"type": "ADDED"}', '{"type": "ADDED", "object": 3}']
)
@pytest.mark.parametrize("end", ["\n", ""])
async def test_a_line_that_is_no_event_is_an_outage(line: str, end: str) -> None:
    async def confused(_: web.Request) -> web.Response:
        return web.Response(text=line + end)

    async with talking(confused) as (client, _):
        with pytest.raises(Unavailable, match="no event"):
            await watched(client)


def test_the_pause_follows_the_servers_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cluster_module._retry_delay(1, Unavailable("", 429, 3.0)) == 3.0
    assert cluster_module._retry_delay(1, Unavailable("", 429, 60.0)) == 5.0
    assert 0.2 <= cluster_module._retry_delay(1, Unavailable("")) <= 0.4


class Looked(NamedTuple):
    uid: str
    version: int


async def test_deleting_names_what_was_looked_at_and_takes_gone_for_deleted() -> None:
    bodies: list[Any] = []

    async def gone(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return status(404 if len(bodies) == 1 else 409)

    async with talking(gone) as (client, _):
        await client.delete(JOBS, "n", "a", Looked("uid-1", 7))
        with pytest.raises(Conflict):
            await client.delete(JOBS, "n", "a", Looked("uid-1", 7))
    preconditions = {"uid": "uid-1", "resourceVersion": "7"}
    assert bodies[0] == {"propagationPolicy": "Background", "preconditions": preconditions}


async def test_lists_come_in_pages() -> None:
    queries: list[dict[str, str]] = []

    async def pages(request: web.Request) -> web.Response:
        queries.append(dict(request.query))
        more = {} if "continue" in request.query else {"continue": "token"}
        return web.json_response({"items": [{}], "metadata": {"resourceVersion": "7", **more}})

    async with talking(pages) as (client, _):
        found = [page async for page in client.pages(Selection(PODS, "n", "a=b"))]
    assert found == [([{}], 7), ([{}], 7)]
    assert queries == [
        {"labelSelector": "a=b", "limit": "100"},
        {"labelSelector": "a=b", "limit": "100", "continue": "token"},
    ]


async def test_events_longer_than_a_buffer_arrive_whole() -> None:
    big = {"type": "ADDED", "object": {"metadata": {"name": "x" * 300_000}}}

    async def stream(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for event in (big, {"type": "BOOKMARK", "object": {"metadata": {}}}):
            await answer.write(json.dumps(event).encode() + b"\n")
        return answer

    async with talking(stream) as (client, _):
        found = await watched(client, Selection(PODS, fields="a=b"))
    assert [kind for kind, _ in found] == ["ADDED", "BOOKMARK"]
    assert len(found[0][1]["metadata"]["name"]) == 300_000


async def test_a_silent_watch_asks_for_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was restored from a backup says nothing for hours."""
    monkeypatch.setattr(cluster_module, "SILENCE_SECONDS", 0.2)

    async def stream(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await asyncio.sleep(5.0)
        return answer

    async with talking(stream) as (client, _):
        with pytest.raises(Stale, match="nothing was received for 0 s"):
            await watched(client)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"code": 410, "message": "too old"}, Expired),
        ({"code": 500, "message": "broken"}, Unavailable),
    ],
)
async def test_an_error_in_the_stream_is_raised(event: Any, error: type[Exception]) -> None:
    async def stream(_: web.Request) -> web.StreamResponse:
        return web.Response(body=json.dumps({"type": "ERROR", "object": event}).encode() + b"\n")

    async with talking(stream) as (client, _):
        with pytest.raises(error, match=event["message"]):
            await watched(client)


async def test_a_watch_that_is_refused_says_so() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return status(410, "too old")

    async with talking(refuse) as (client, seen):
        with pytest.raises(Expired):
            await watched(client)
    assert seen == [("WATCH", "pods", 410)]


async def test_the_client_is_used_inside_its_block_only() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client(Configuration(host="http://127.0.0.1:1")).get(GRPOJOBS, "n", "a")


async def test_no_way_to_the_api_server_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match="no way to the API server"):
        await transport.load(str(tmp_path / "absent"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigurationError, match="no service account"):
        await transport.load()


@pytest.mark.parametrize(
    ("groups", "resources", "named"),
    [
        ([], None, False),
        (["grpo.dev"], None, False),
        (["grpo.dev"], ["others"], False),
        (["apps", "grpo.dev"], ["grpojobs/status", "grpojobs"], True),
    ],
    ids=["no group", "no version", "another kind", "all there"],
)
async def test_a_kind_is_discovered_when_its_group_and_its_version_name_it(
    groups: list[str], resources: list[str] | None, named: bool
) -> None:
    async def discovery(request: web.Request) -> web.Response:
        if request.path == "/apis":
            return web.json_response({"groups": [{"name": name} for name in groups]})
        assert request.path == "/apis/grpo.dev/v1alpha1"
        if resources is None:
            return status(404)
        return web.json_response({"resources": [{"name": name} for name in resources]})

    async with talking(discovery) as (client, _):
        assert await client.is_discovered(GRPOJOBS) is named


@pytest.mark.parametrize(
    "document", [{"groups": "none"}, {"groups": ["x"]}, {"groups": [{"name": 7}]}]
)
async def test_what_is_no_discovery_is_an_outage(document: Any) -> None:
    async def confused(_: web.Request) -> web.Response:
        return web.json_response(document)

    async with talking(confused) as (client, _):
        with pytest.raises(Unavailable, match="no discovery document"):
            await client.is_discovered(GRPOJOBS)
