"""No write of the operator's passes the gate once it does not lead, and what the chart's fence
refuses is no denial."""

from collections.abc import AsyncIterator, Awaitable
from math import inf
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from grpo_kube import client as cluster_module
from grpo_kube.client import LIST_SECONDS, REQUEST_SECONDS, Client
from grpo_kube.objects.errors import NotLeading, Unavailable
from grpo_kube.objects.resources import JOBS
from grpo_operator.records.names import FENCE, GRPOJOBS
from tests.unit.test_kube_client import ALL_PODS, Looked, serving, status, talking

pytestmark = pytest.mark.realtime


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_retry_delay", lambda *_: 0.01)


async def each_write(client: Client) -> AsyncIterator[Awaitable[Any]]:
    """A request of every kind that changes something."""
    yield client.create(JOBS, "n", {})
    yield client.replace(JOBS, "n", "a", {})
    yield client.patch(JOBS, "n", "a", {})
    yield client.patch(GRPOJOBS, "n", "a", {}, "status")
    yield client.delete(JOBS, "n", "a", Looked("uid-1", 7))
    yield client.delete_all(ALL_PODS)


async def test_no_write_is_sent_past_the_gate_not_even_a_second_try_and_reads_go_on() -> None:
    sent: list[str] = []
    left = [10.0]

    def gate() -> float:
        if not left:
            raise NotLeading("over")
        return left.pop()

    async def unavailable(request: web.Request) -> web.Response:
        sent.append(request.method)
        return status(503) if request.method != "GET" else web.json_response({})

    async with (
        serving(unavailable) as url,
        Client(Configuration(host=url), gate=gate) as client,
    ):
        async for write in each_write(client):
            left[:] = [10.0]
            with pytest.raises(NotLeading):
                await write
        await client.get(JOBS, "n", "a")
    assert sent == ["POST", "PUT", "PATCH", "PATCH", "DELETE", "DELETE", "GET"]


class Noting:
    """A session that sends nothing and notes for how long each request would be awaited."""

    def __init__(self) -> None:
        self.seconds: list[float | None] = []

    def request(self, *_: Any, timeout: aiohttp.ClientTimeout, **__: Any) -> Any:
        """Break the connection."""
        self.seconds.append(timeout.total)
        raise aiohttp.ClientConnectionError


@pytest.mark.parametrize(
    ("left", "seconds"),
    [(4.0, [4.0] * 6), (inf, [REQUEST_SECONDS] * 5 + [LIST_SECONDS])],
    ids=["four seconds", "for ever"],
)
async def test_a_write_is_awaited_for_no_longer_than_the_gate_allows(
    left: float, seconds: list[float]
) -> None:
    client = Client(Configuration(host="http://nowhere"), gate=lambda: left, tries=1)
    client._session = session = Noting()  # type: ignore[assignment]
    async for write in each_write(client):
        with pytest.raises(Unavailable):
            await write
    assert session.seconds == seconds


async def test_what_the_fence_refuses_is_asked_again_and_is_no_denial() -> None:
    answers = [status(403, f"policy says: {FENCE}"), web.json_response({"kind": "Job"})]

    async def fenced(_: web.Request) -> web.Response:
        return answers.pop(0)

    async with talking(fenced, try_again=lambda said: FENCE in said) as (client, _):
        assert await client.create(JOBS, "n", {}) == {"kind": "Job"}
