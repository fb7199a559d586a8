"""Whatever the API server answers: at rest the cache is like the server, each job was reconciled
after its last change, and nothing is written over what is newer or told twice."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration

from grpo_kube.client import Client
from grpo_kube.event_sender import EventRecorder
from grpo_kube.informer import Informer
from grpo_kube.objects.resources import ObjectKey, Selection
from grpo_kube.objects.times import Observed
from grpo_kube.work_queue import WorkObserver, WorkQueue, work
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.observation import observe
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.status_writer import StatusWriter
from grpo_operator.records.names import GRPOJOBS
from grpo_operator.report.events import status_events
from tests.generated import cases
from tests.unit.operator_world import NOW, job_object
from tests.virtual_time import virtually

Item = dict[str, Any]
PAGE = 2
"""Objects of a LIST's page."""
REST = 150.0
"""Seconds without a fault until everything rests: twice the longest pause before a retry."""
CODES = {"409": 409, "429": 429, "500": 500, "gone": 410}
FAULTS = ("", "", *CODES, "reset", "silent", "lost", "late", "html")
"""What becomes of a request. Of a watch, "lost" ends it amid a line, and "late" at once."""


class Answer(NamedTuple):
    """An answer as aiohttp gives it."""

    status: int
    chunks: AsyncIterator[bytes]
    headers: dict[str, str]

    @property
    def content(self) -> "Answer":
        return self

    def iter_any(self) -> AsyncIterator[bytes]:
        return self.chunks

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks])


class Exchange(NamedTuple):
    """A request that is on its way."""

    answer: Any

    async def __aenter__(self) -> Answer:
        answer: Answer = await self.answer
        return answer

    async def __aexit__(self, *_: object) -> None:
        """Nothing is to be closed."""


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


@dataclass
class Server:
    """An API server with GRPOJobs and events, by the session of a client."""

    faults: list[str]
    objects: dict[str, Item] = field(default_factory=dict)
    version: int = 10
    log: list[tuple[int, str, Item]] = field(default_factory=list)
    """What a watch shows: version, kind and object."""
    oldest: int = 0
    """The first version from which a watch may go on."""
    lists: dict[int, list[Item]] = field(default_factory=dict)
    events: list[Item] = field(default_factory=list)
    requests: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    # what a user does

    def create(self, name: str) -> None:
        meta: Item = {"name": name, "uid": f"{name}-{self.version}", "generation": 1}
        if name not in self.objects:
            self._put("ADDED", job_object(**meta))

    def edit(self, name: str) -> None:
        if name in self.objects:
            item = self._copy(name)
            item["metadata"]["generation"] += 1
            self._put("MODIFIED", item)

    def delete(self, name: str) -> None:
        if name in self.objects:
            self._put("DELETED", self._copy(name))
            del self.objects[name]

    def compact(self, _: str) -> None:
        self.oldest = self.version

    def _copy(self, name: str) -> Item:
        item: Item = json.loads(json.dumps(self.objects[name]))
        return item

    def _put(self, kind: str, item: Item) -> Item:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.objects[item["metadata"]["name"]] = item
        self.log.append((self.version, kind, item))
        self.news.set()
        self.news = asyncio.Event()
        return item

    # what a client asks

    def request(self, method: str, path: str, **given: Any) -> Exchange:
        return Exchange(self._answer(method, path, **given))

    def get(self, _: str, *, params: Item, **__: Any) -> Exchange:
        return Exchange(self._watch(int(params["resourceVersion"]), int(params["timeoutSeconds"])))

    async def _answer(self, method: str, path: str, **given: Any) -> Answer:
        fault = await self._fault()
        if fault in CODES:
            return self._refuse(CODES[fault])
        if fault == "reset":
            raise aiohttp.ServerDisconnectedError
        if fault == "silent":
            await asyncio.sleep(given["timeout"].total)
            raise TimeoutError
        query, data = given["params"] or {}, given["data"] or b"{}"
        code, body = self._apply(method, path, query, json.loads(data))
        if fault == "lost":
            raise aiohttp.ServerDisconnectedError
        if fault == "late":
            await asyncio.sleep(5.0)
        if fault == "html":
            return Answer(200, _once(b"<html>login</html>"), {})
        return Answer(code, _once(json.dumps(body).encode()), {})

    async def _fault(self) -> str:
        self.requests += 1
        await asyncio.sleep(0.01)
        return self.faults.pop(0) if self.faults else ""

    def _refuse(self, code: int) -> Answer:
        body = json.dumps({"message": "no", "code": code}).encode()
        return Answer(code, _once(body), {"Retry-After": "2"} if code == 429 else {})

    def _apply(self, method: str, path: str, params: Item, body: Item) -> tuple[int, Item]:
        if path.endswith("/events"):
            name = body["metadata"].get("name")
            if name and name in [event["metadata"].get("name") for event in self.events]:
                return 409, {"message": "exists"}
            self.events.append(body)
            return 201, body
        if method == "GET" and "limit" in params:
            return self._list(params.get("continue", ""))
        name = path.removesuffix("/status").rpartition("/")[2]
        if name not in self.objects:
            return 404, {"message": "not found"}
        if method == "GET":
            return 200, self.objects[name]
        item = self._copy(name)
        if body["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        item["status"] = {**item["status"], **body["status"]}
        return 200, self._put("MODIFIED", item)

    def _list(self, token: str) -> tuple[int, Item]:
        version, begin = map(int, token.split(":")) if token else (self.version, 0)
        if version < self.oldest and token:
            return 410, {"message": "the continue token is too old"}
        items = self.lists.setdefault(version, list(self.objects.values()))
        end = begin + PAGE
        rest = f"{version}:{end}" if end < len(items) else ""
        meta = {"resourceVersion": str(version), "continue": rest}
        return 200, {"metadata": meta, "items": items[begin:end]}

    async def _watch(self, version: int, seconds: int) -> Answer:
        fault = await self._fault()
        if fault in CODES and fault != "gone":
            return self._refuse(CODES[fault])
        if fault == "reset":
            raise aiohttp.ServerDisconnectedError
        return Answer(200, self._stream(version, seconds, fault), {})

    async def _stream(self, version: int, seconds: float, fault: str) -> AsyncIterator[bytes]:
        end = asyncio.get_running_loop().time() + seconds
        if fault == "html":
            yield b"<html>login</html>"
            return
        while fault != "late":
            news = self.news
            if version < self.oldest or fault == "gone":
                yield _line("ERROR", {"code": 410, "message": "too old"})
                return
            for number, kind, item in [entry for entry in self.log if entry[0] > version]:
                line = _line(kind, item)
                if fault == "lost":
                    yield line[:20]
                    raise aiohttp.ClientPayloadError
                yield line
                version = number
            if fault == "silent":
                version = self.version
                yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
            left = end - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(left):
                    await news.wait()
            except TimeoutError:
                return


def _line(kind: str, item: Item) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


class Controller:
    """What the operator does with GRPOJobs, by its real parts: it writes each generation into the
    status and sends an event of it."""

    def __init__(self, server: Server) -> None:
        self.cluster = Client(Configuration())
        self.cluster._session = server  # type: ignore[assignment]
        self.caches = Caches()
        self.queue = WorkQueue()
        self.events = EventRecorder(self.cluster)
        self.writer = StatusWriter(self.cluster, self.caches.grpojobs, 5.0, self.publish)
        self.last: dict[ObjectKey, Any] = {}
        """The object that each job was last reconciled with."""

    async def run(self) -> None:
        jobs = Selection(GRPOJOBS)
        informer = Informer(
            self.cluster, jobs, self.caches.grpojobs, self.queue.add_all, resync=1e6
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(informer.follow())
            tasks.create_task(self.events.run())
            for _ in range(2):
                tasks.create_task(work(self.queue, self.reconcile, WorkObserver()))

    def publish(self, job: Any, status: Any, now: float) -> None:
        for event in status_events(job, status, now):
            self.events.record(job.key, event)

    async def reconcile(self, key: ObjectKey) -> float | None:
        job = self.caches.grpojobs.get(key)
        self.last[key] = job
        if job is None:
            self.writer.forget(key)
            return None
        at = Observed(asyncio.get_running_loop().time())
        seen = observe(job, (), (), now=NOW + at.at, at=at, first_seen_tracker=FirstSeenTracker())
        decision = Decision(Action.REJECT, f"Generation{job.generation}", "this is invalid")
        pause = await self.writer.publish(seen, decision)
        # An event of a GRPOJob's deletion always wakes it (process/handlers.py).
        return pause if self.caches.grpojobs.get(key) else 0.0


STEPS = st.tuples(
    st.sampled_from(("create", "edit", "edit", "delete", "compact")),
    st.sampled_from("abc"),
    st.sampled_from((0.0, 0.005, 0.02, 1.0, 6.0)),
)


@settings(max_examples=cases(150))
@given(st.lists(STEPS, max_size=15), st.lists(st.sampled_from(FAULTS), max_size=25))
def test_after_any_faults_the_cache_is_like_the_server_and_all_is_told_once(
    steps: list[tuple[str, str, float]], faults: list[str]
) -> None:
    virtually(_rest(steps, faults))


async def _rest(steps: list[tuple[str, str, float]], faults: list[str]) -> None:
    server = Server(faults)
    for name in "abc":
        server.create(name)
    controller = Controller(server)
    running = asyncio.create_task(controller.run())
    for step, name, pause in steps:
        await asyncio.sleep(pause)
        getattr(server, step)(name)
    while server.faults:
        asked = server.requests
        await asyncio.sleep(REST)
        if server.requests == asked:
            server.create("d")
            server.edit("d")
    await asyncio.sleep(REST)
    asked = server.requests
    await asyncio.sleep(60.0)
    assert server.requests == asked, "nothing is to be done"
    running.cancel()
    known = {job.name: (job.uid, job.version) for job in controller.caches.grpojobs}
    there = {
        name: (item["metadata"]["uid"], int(item["metadata"]["resourceVersion"]))
        for name, item in server.objects.items()
    }
    assert known == there
    for item in server.objects.values():
        generation = item["metadata"]["generation"]
        said = {one["type"]: one["reason"] for one in item["status"]["conditions"]}
        assert said["Admitted"] == f"Generation{generation}"
        assert item["status"]["observedGeneration"] == generation
    for key, job in controller.last.items():
        assert (job is None) == (key.name not in server.objects)
    told = Counter((one["involvedObject"]["uid"], one["reason"]) for one in server.events)
    assert max(told.values(), default=1) == 1, told
