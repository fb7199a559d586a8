"""Watches that end at once wait for each other, as client-go's do; all else passes untouched."""

import asyncio
import base64
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from grpo_kube.objects.errors import ConfigurationError, Stale
from grpo_kube.transport import (
    FIRST_PAUSE,
    LAST_PAUSE,
    SHORT_WATCH,
    EmptyLists,
    WatchPace,
    authorization,
    json_only,
    load,
    open_session,
)
from grpo_operator.loop.caches import Caches
from harness.pki import Authority
from tests.virtual_time import virtually


class World:
    """Watches of which each lasts so long and delivers so many bytes."""

    def __init__(self) -> None:
        self.pace = WatchPace(lambda: 1.0)

    async def ask(self, url: str, lasts: float = 0.0, size: int = 0) -> float:
        """Sends a request that then lasts; returns the pause before it, in seconds."""

        async def send(_: Any) -> Any:
            return type("Answer", (), {"content": type("Content", (), {"total_bytes": size})})

        clock = asyncio.get_running_loop().time
        before = clock()
        await self.pace(type("Request", (), {"url": URL(url)}), send)  # type: ignore[arg-type]
        pause = clock() - before
        await asyncio.sleep(lasts)
        return pause


PODS, JOBS = "http://a/api/v1/pods?watch=true", "http://a/apis/batch/v1/jobs?watch=true"


async def test_short_watches_wait_longer_and_longer() -> None:
    world = World()
    pauses = [await world.ask(PODS) for _ in range(9)]
    assert pauses == pytest.approx([0, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])


async def test_a_watch_that_ends_at_once_for_days_waits_the_longest_pause() -> None:
    world = World()
    pauses = [await world.ask(PODS) for _ in range(1100)]
    assert pauses[-1] == pytest.approx(LAST_PAUSE)


async def test_only_the_same_watch_waits() -> None:
    world = World()
    await world.ask(PODS)
    assert (await world.ask(JOBS), await world.ask("http://a/api/v1/pods")) == (0, 0)
    assert await world.ask(f"{PODS}&labelSelector=grpo.dev%2Fjob-name") == 0, "as do other pods"
    assert await world.ask(f"{PODS}&fieldSelector=spec.nodeName%21%3D") == 0
    assert await world.ask(f"{PODS}&resourceVersion=7") == pytest.approx(FIRST_PAUSE)


@given(st.lists(st.tuples(st.floats(0, 400), st.integers(0, 1)), max_size=40))
def test_a_watch_that_told_something_or_lasted_is_followed_at_once(
    watches: list[tuple[float, int]],
) -> None:
    async def story() -> None:
        world, short = World(), 0
        for lasts, size in watches:
            pause = await world.ask(PODS, lasts, size)
            assert pause == pytest.approx(
                min(LAST_PAUSE, FIRST_PAUSE * 2 ** (short - 1)) if short else 0
            )
            short = short + 1 if lasts < SHORT_WATCH and not size else 0

    virtually(story())


LISTED = "/apis/grpo.dev/v1alpha1/namespaces/a/grpojobs"


def sent(method: str, url: str, ok: bool = True) -> tuple[str, int]:
    """The URL that goes out, and how often the LIST was told of."""
    told: list[str] = []
    request = type("Request", (), {"url": URL(url), "method": method})

    async def send(_: Any) -> Any:
        return type("Answer", (), {"ok": ok})

    asyncio.run(EmptyLists({LISTED: lambda: told.append(url)})(request, send))  # type: ignore[arg-type]
    return str(request.url), len(told)  # type: ignore[attr-defined]


def test_a_watch_from_before_a_restore_is_begun_again() -> None:
    """The API server would send it nothing for hours."""
    cache = Caches().grpojobs
    lists = EmptyLists({LISTED: lambda: None}, lambda: cache.restores)
    watch = type("Request", (), {"url": URL(f"http://a{LISTED}?watch=true"), "method": "GET"})

    answer: Any = "an answer"

    async def send(_: Any) -> Any:
        return answer

    assert asyncio.run(lists(watch, send)) == answer  # type: ignore[arg-type]
    cache.newest = 30
    with pytest.raises(Stale), cache.relist() as relist:
        relist.finish(12)
    with pytest.raises(Stale, match="restored from a backup"):
        asyncio.run(lists(watch, send))  # type: ignore[arg-type]
    begun_again = EmptyLists({LISTED: lambda: None}, lambda: cache.restores)
    assert asyncio.run(begun_again(watch, send)) == answer  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["http://a", "http://a:1/k8s/clusters/c-1"])
def test_a_list_is_made_to_select_nothing_and_told_of_once_it_was_answered(prefix: str) -> None:
    assert sent("GET", prefix + LISTED) == (f"{prefix}{LISTED}?fieldSelector=metadata.name%3D-", 1)
    assert (
        sent("GET", f"{prefix}{LISTED}?limit=5")[0]
        == f"{prefix}{LISTED}?limit=5&fieldSelector=metadata.name%3D-"
    )
    assert sent("GET", prefix + LISTED, ok=False)[1] == 0


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", f"http://a{LISTED}?watch=true&resourceVersion=7"),
        ("GET", f"http://a{LISTED}/run"),
        ("PATCH", f"http://a{LISTED}"),
        ("GET", "http://a/apis/grpo.dev/v1alpha1/grpojobs"),
        ("GET", "http://a/apis/grpo.dev/v1alpha1"),
    ],
)
def test_whatever_is_no_list_of_them_passes_untouched(method: str, url: str) -> None:
    assert sent(method, url) == (url, 0)


@pytest.mark.parametrize(
    ("ok", "kind", "broken"),
    [(True, "text/html", True), (True, "application/json", False), (False, "text/html", False)],
)
def test_a_proxys_page_is_a_connection_that_broke(ok: bool, kind: str, broken: bool) -> None:
    closed: list[bool] = []
    answer = type(
        "Answer", (), {"ok": ok, "content_type": kind, "close": lambda _: closed.append(True)}
    )()

    async def send(_: Any) -> Any:
        return answer

    request: Any = type("Request", (), {"url": URL("http://a/apis")})
    if broken:
        with pytest.raises(
            aiohttp.ClientConnectionError, match="/apis was answered with text/html, not JSON"
        ):
            asyncio.run(json_only(request, send))
    else:
        assert asyncio.run(json_only(request, send)) is answer
    assert closed == [True] * broken


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"- 1", b"a: [", b"\xff\xfe\x00", b"contexts: {}"],
    ids=["empty", "text", "a list", "cut", "binary", "without a context"],
)
async def test_a_file_that_is_no_kubeconfig_is_named_in_a_sentence(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"no usable {file}"):
        await load(str(file))


@pytest.mark.parametrize("data", ["-", "no certificate", "\u00e9\xff"])
@pytest.mark.parametrize("field", ["certificate-authority", "client-certificate"])
async def test_a_certificate_that_is_none_is_named_by_file_and_field(
    field: str, data: str, tmp_path: Path
) -> None:
    file = tmp_path / "kubeconfig"
    encoded = base64.b64encode(data.encode()).decode()
    cluster, user = {"server": "https://127.0.0.1:1"}, dict[str, str]()
    if field == "client-certificate":
        user = {f"{field}-data": encoded, "client-key-data": encoded}
    else:
        cluster[f"{field}-data"] = encoded
    config = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=f"no usable {file}: {field}"):
        await load(str(file))


CREDENTIAL = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}


class Plugin:
    """A credential plug-in that gives what it was last told to."""

    def __init__(self, folder: Path, server: str, authority: str = "") -> None:
        self._file, self.kubeconfig = folder / "credential", folder / "kubeconfig"
        plugin: dict[str, Any] = {"apiVersion": CREDENTIAL["apiVersion"], "command": sys.executable}
        plugin |= {"args": ["-c", f"print(open({str(self._file)!r}).read())"]}
        config = {
            "clusters": [
                {"name": "c", "cluster": {"server": server, "certificate-authority": authority}}
            ],
            "users": [{"name": "u", "user": {"exec": plugin}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def issue(self, **status: str) -> None:
        self._file.write_text(json.dumps(CREDENTIAL | {"status": status}))

    def fail(self) -> None:
        self._file.unlink()


@pytest.mark.realtime
async def test_a_token_of_a_credential_plugin_is_renewed_when_it_expires(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, "http://127.0.0.1:1")
    plugin.issue(token="first", expirationTimestamp="2020-01-01T00:00:00Z")
    configuration = await load(str(plugin.kubeconfig))
    plugin.issue(token="second", expirationTimestamp="2999-01-01T00:00:00Z")
    assert await authorization(configuration) == {"Authorization": "Bearer second"}
    plugin.fail()
    assert await authorization(configuration) == {"Authorization": "Bearer second"}


@pytest.mark.realtime
@pytest.mark.parametrize("kind", ["certificate", "token"])
async def test_credentials_of_a_plugin_are_renewed_when_the_api_server_refuses_them(
    kind: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "pki")
    authority.issue("server", "/CN=server", "IP:127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.crt("ca"))
    tls.load_cert_chain(authority.crt("server"), authority.key("server"))
    tls.verify_mode = ssl.CERT_OPTIONAL

    async def serve(request: web.Request) -> web.Response:
        assert request.transport is not None
        given = str(request.transport.get_extra_info("peercert")) + str(request.headers)
        status = 200 if "second" in given else 401
        return web.json_response({"kind": "Status"}, status=status)

    pages = web.Application()
    pages.router.add_get("/api", serve)
    runner = web.AppRunner(pages, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    server = f"https://127.0.0.1:{runner.addresses[0][1]}"
    plugin = Plugin(tmp_path, server, str(authority.crt("ca")))

    def issue(name: str) -> None:
        if kind == "token":
            plugin.issue(token=name)
            return
        authority.issue(name, f"/CN={name}")
        certificate, key = authority.crt(name).read_text(), authority.key(name).read_text()
        plugin.issue(clientCertificateData=certificate, clientKeyData=key)

    issue("first")
    async with open_session(await load(str(plugin.kubeconfig))) as session:
        issue("second")
        statuses: list[int] = []
        for _ in range(3):
            async with session.get("/api") as answer:
                await answer.json()
                statuses.append(answer.status)
    await runner.cleanup()
    assert statuses == [401, 200, 200]
