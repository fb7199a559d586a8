"""What jobs of a namespace share is made once, asked for at a bounded pace, and not used while it
is being deleted."""

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from grpo_kube.objects.errors import AlreadyExists, Denied
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.shared_objects import GOES_PAUSE, STAYS_PAUSE, SharedObjects
from grpo_operator.pods.namespace_objects import network_policy, rendezvous_service

WATCHERS: list[dict[str, Any]] = [{"namespaceSelector": {"matchLabels": {}}}]


class Server:
    """An API server with one NetworkPolicy at most, which it keeps in its own words: without what
    is empty."""

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        self.kept = kept
        self.denies = False
        self.requests: list[str] = []
        self.now = 0.0
        self._version = 1
        found: Any = self
        self.caches = Caches()
        self.shared = SharedObjects(found, self.caches, lambda: self.now, WATCHERS)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        spec = {**body["spec"], "ingress": [{"from": [{"namespaceSelector": {}}]}]}
        meta = {**body["metadata"], "uid": "u", "resourceVersion": str(self._version)}
        self.kept = {**body, "metadata": meta, "spec": spec}
        return self.kept

    async def create(self, _: Any, __: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append("create")
        if self.denies:
            raise Denied("networkpolicies is forbidden", 403)
        if self.kept:
            raise AlreadyExists("it is there", 409)
        return self._answer(body)

    async def get(self, *_: Any) -> dict[str, Any]:
        self.requests.append("get")
        assert self.kept
        return self.kept

    async def patch(self, _: Any, __: str, ___: str, ____: Any) -> dict[str, Any]:
        self.requests.append("patch")
        assert self.kept
        return self._answer(self.kept)


def stored(**metadata: Any) -> dict[str, Any]:
    body = network_policy("team", [])
    body["metadata"] |= {"uid": "u", "resourceVersion": "1", **metadata}
    return body


async def test_one_that_the_api_server_keeps_in_other_words_is_written_once() -> None:
    made, found = Server(), Server(stored())
    for _ in range(3):
        await made.shared.ensure_policy("team")
        await found.shared.ensure_policy("team")
    assert made.requests == ["create"]
    assert found.requests == ["create", "get", "patch"]


async def test_one_that_was_changed_since_is_mended() -> None:
    server = Server()
    await server.shared.ensure_policy("team")
    assert server.kept
    server.caches.network_policies.put(
        {**stored(), "metadata": {**server.kept["metadata"], "resourceVersion": "9"}}
    )
    await server.shared.ensure_policy("team")
    assert server.requests == ["create", "create", "get", "patch"]


class Overtaken(Server):
    """An API server whose event of a stranger's change comes before the answer to our patch."""

    async def patch(self, _: Any, __: str, ___: str, ____: Any) -> dict[str, Any]:
        answer = await super().patch(_, __, ___, ____)
        if self.requests.count("patch") == 1:
            meta = {**answer["metadata"], "resourceVersion": "9"}
            self.kept = {**stored(), "metadata": meta}
            self._version = 9
            self.caches.network_policies.put(self.kept)
        return answer


async def test_a_change_that_overtakes_our_answer_is_mended_too() -> None:
    server = Overtaken(stored())
    for _ in range(3):
        await server.shared.ensure_policy("team")
    assert server.requests == ["create", "get", "patch", "create", "get", "patch"]


async def test_a_strangers_is_left_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(stored(labels={}))
    for _ in range(3):
        await server.shared.ensure_policy("team")
        server.now += STAYS_PAUSE
    assert server.requests == ["create", "get"] * 3
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "is not the operator's" in said.message


async def test_one_that_is_denied_is_asked_for_again_after_a_pause_only() -> None:
    server = Server()
    server.denies = True
    for _ in range(3):
        with pytest.raises(Denied):
            await server.shared.ensure_policy("team")
    assert server.requests == ["create"]
    server.now, server.denies = STAYS_PAUSE, False
    await server.shared.ensure_policy("team")
    assert server.requests == ["create", "create"]


async def test_without_watchers_none_is_made() -> None:
    server = Server()
    found: Any = server
    await SharedObjects(found, server.caches, lambda: 0.0, None).ensure_policy("team")
    assert server.requests == []


class Slow(Server):
    """An API server that takes a second for each write."""

    async def create(self, kind: Any, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(1.0)
        return await super().create(kind, namespace, body)


async def test_jobs_that_start_together_make_it_once() -> None:
    server = Slow()
    await asyncio.gather(*(server.shared.ensure_policy("team") for _ in range(3)))
    assert server.requests == ["create"]


async def test_a_namespace_whose_writes_take_long_holds_no_other_up() -> None:
    """A webhook that does not answer delays each write there until its timeout."""
    server = Slow()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await asyncio.gather(*(server.shared.ensure_service(name) for name in ("a", "b", "c")))
    assert loop.time() - begin < 2.0


async def test_nothing_is_remembered_of_namespaces_that_are_gone() -> None:
    server = Server()
    for number in range(20):
        server.denies = number % 2 == 1
        namespace = f"ci-{number}"
        for ensure in (server.shared.ensure_service, server.shared.ensure_policy):
            with contextlib.suppress(Denied):
                await ensure(namespace)
            server.kept = None
        for cache in (server.caches.services, server.caches.network_policies):
            for record in [*cache]:
                cache.discard(record.key, record.uid)
        server.now += STAYS_PAUSE
    assert sum(len(kept) for kept in vars(server.shared).values() if isinstance(kept, dict)) <= 4


@pytest.mark.parametrize("known", [False, True])
async def test_one_that_is_being_deleted_is_not_used_and_left_alone(known: bool) -> None:
    service = rendezvous_service("team")
    service["metadata"] |= {
        "uid": "u",
        "resourceVersion": "1",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
    }
    server = Server(service)
    if known:
        server.caches.services.put(service)
    for _ in range(2):
        taken = await server.shared.ensure_service("team")
        assert taken
        assert (taken.message, taken.requeue_after) == (
            "Service grpo-rendezvous is being deleted",
            GOES_PAUSE,
        )
        server.now += GOES_PAUSE
    assert server.requests == ["create", "get"] * 2
