"""The process around the loop: settings, logs, the pages, the mirror of a kind of object."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, Request, Response

from grpo_api.report.metrics import (
    HEARD,
    LEADER,
    MEMORY_LIMIT,
    OPERATOR,
    TAKEOVER,
    UNREADABLE_OBJECTS,
)
from grpo_api.report.report import Progress
from grpo_kube.cache import Cache
from grpo_kube.informer import Informer
from grpo_kube.leader_election import Election, Terms
from grpo_kube.objects.errors import ConfigurationError, Expired, NotFound, Unavailable
from grpo_kube.objects.resources import PODS, Object, ObjectKey, Selection
from grpo_kube.pacing import Backoff
from grpo_kube.work_queue import WorkQueue
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.progress import Target, http_fetch
from grpo_operator.process import settings
from grpo_operator.process.job_metrics import JobMetrics
from grpo_operator.process.metrics_server import Metrics, application, memory_limit, serve_pages
from grpo_operator.process.wiring import Operator
from grpo_operator.records.names import GRPOJOBS
from grpo_operator.records.records import PodRecord
from harness.controlplane import free_port
from tests.unit.operator_world import GPU_PLAN, NOW, active_status, make_job
from tests.unit.test_operator_queue import item, pods
from tests.virtual_time import block


def test_flags_become_settings() -> None:
    line = (
        "--namespace a --namespace b --namespace a --trainer-image t:1 --metrics-port 9 --workers 0"
    )
    line += " --scheduling-timeout-seconds 60 --resync-seconds 7 --log-format text"
    line += " --gpu-hour-price NVIDIA-H100-80GB-HBM3=2.49 --gpu-hour-price A=B=0"
    line += " --trainer-image-architecture arm64 --trainer-image-architecture amd64"
    chosen = settings.parse(line.split())
    assert chosen.pods.architectures == ("arm64", "amd64")
    assert chosen.gpu_hour_prices == {"NVIDIA-H100-80GB-HBM3": 2.49, "A=B": 0.0}
    assert (chosen.namespaces, chosen.pods.image, chosen.metrics_port) == (("a", "b"), "t:1", 9)
    assert (
        chosen.limits.scheduling_timeout_seconds,
        chosen.resync,
        chosen.log_format,
        chosen.workers,
    ) == (
        60.0,
        7.0,
        "text",
        1,
    )


def test_without_flags_the_defaults_hold() -> None:
    assert settings.parse([]) == settings.Settings()


def test_traces_go_where_a_flag_or_opentelemetry_s_own_variables_say() -> None:
    given = "Authorization=Bearer%20x%3D,b = c%2Cd ,"
    environment = {settings.ENDPOINT_ENV: "http://c:4318", settings.HEADERS_ENV: given}
    headers = {"Authorization": "Bearer x=", "b": "c,d"}
    assert settings.parse([], {}).tracing is None
    assert settings.parse([], environment).tracing == settings.Tracing(
        endpoint="http://c:4318", headers=headers
    )
    flags = ["--tracing-endpoint", "https://[::1]/otlp", "--trace-every-nth-step", "3"]
    assert settings.parse(flags, environment).tracing == settings.Tracing(
        endpoint="https://[::1]/otlp", headers=headers, every=3
    )
    assert settings.parse(["--tracing-endpoint="], environment).tracing is None


@pytest.mark.parametrize(
    ("flags", "headers", "says"),
    [
        *(
            (["--tracing-endpoint", url], "", "is no URL such as")
            for url in ("c:4317", "grpc://c", "http://", "http:")
        ),
        (["--tracing-endpoint", "http://c?x"], "", "is no URL such as"),
        (["--tracing-endpoint", "http://c/\n"], "", "is no URL such as"),
        (["--tracing-endpoint", "http://[c"], "", "no URL such as"),
        (["--tracing-endpoint", "http://c:99999"], "", "no URL such as"),
        (["--tracing-endpoint", "http://c"], "a=b%0Ac", "is not name=value"),
        (["--tracing-endpoint", "http://c"], "secret", "is not name=value"),
        (["--tracing-endpoint", "http://c"], "na me=x", "is not name=value"),
        (["--trace-every-nth-step", "0"], "", "is not a number from 1"),
    ],
)
def test_tracing_that_can_not_work_is_refused(
    flags: list[str], headers: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings.parse(flags, {settings.HEADERS_ENV: headers})
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "H100", "H100=", "=2", "H100=-1", "H100=nan", "H100=inf", "H100=1e7"]
)
def test_a_price_is_a_number_of_a_product(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(["--gpu-hour-price", text])
    assert "is not PRODUCT=PRICE with a price from 0 to 1000000" in capsys.readouterr().err


def test_an_operator_stands_for_a_lease_as_its_pod() -> None:
    line = ["--leader-elect", "grpo-system/grpo-operator", "--lease-seconds", "20"]
    election = settings.parse(line, {settings.IDENTITY_ENV: "pod-1"}).election
    assert election == Election(
        lease=ObjectKey("grpo-system", "grpo-operator"),
        identity="pod-1",
        terms=Terms(duration=20.0),
    )
    assert settings.parse([], {settings.IDENTITY_ENV: "pod-1"}).election is None


@pytest.mark.parametrize(
    ("flags", "pod", "says"),
    [
        (["--leader-elect", "a/b"], "", "$POD_NAME is empty; set it to the pod's name"),
        (["--leader-elect", "lease"], "pod-1", "'lease' is not NAMESPACE/NAME"),
        (["--leader-elect", "a/b/c"], "pod-1", "'a/b/c' is not NAMESPACE/NAME"),
        *(
            (
                ["--leader-elect", "a/b", "--lease-seconds", seconds],
                "pod-1",
                "is not a time above 0",
            )
            for seconds in ("0", "nan", "inf")
        ),
    ],
)
def test_an_election_that_can_not_work_is_refused(
    flags: list[str], pod: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings.parse(flags, {settings.IDENTITY_ENV: pod})
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "soon"])
def test_a_time_must_be_above_zero(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(["--resync-seconds", text])
    assert "--resync-seconds" in capsys.readouterr().err


@pytest.mark.realtime
async def test_the_pages_tell_health_and_metrics(tmp_path: Path) -> None:
    job = make_job(status=active_status(plan=GPU_PLAN, phase="Running", progress={"step": 140}))
    queue = WorkQueue()
    queue.add_all(ObjectKey("team-a", name) for name in ("a", "b", "c"))
    metrics, jobs = Metrics(queue, 4), JobMetrics(lambda: [job], lambda: NOW)
    metrics.export_families(
        {UNREADABLE_OBJECTS: lambda: {"pods": 2}, HEARD: lambda: {"pods": 1.7e9}}
    )
    metrics.export_families({LEADER: lambda: {"": 1.0}, TAKEOVER: lambda: {"": 2.5}})
    limit_file = tmp_path / "memory.max"
    limit_file.write_text("536870912\n")
    metrics.export_families({MEMORY_LIMIT: lambda: memory_limit(limit_file)})
    metrics.record_wait(0.2)
    metrics.record_reconcile(0.01, "success")
    metrics.record_request("PATCH", "grpojobs", 200)
    metrics.record_pull("error")
    problems = ["", "not listed yet: pods"]
    pages = application(
        metrics.registry,
        jobs.text,
        lambda: problems[0],
        lambda: problems[1],
        lambda: "not served now: pods/b",
    )
    async with TestClient(TestServer(pages)) as client:
        assert (await client.get("/healthz")).status == 200
        unready = await client.get("/readyz")
        assert (unready.status, await unready.text()) == (
            503,
            "not listed yet: pods\nnot served now: pods/b",
        )
        text = await (await client.get("/metrics")).text()
    who = 'namespace="team-a",grpojob="run"'
    assert f"grpo_job_step{{{who}}} 140\n" in text
    assert f'grpo_job_phase{{{who},phase="Running"}} 1\n' in text
    assert 'grpo_jobs{namespace="team-a",phase="Running"} 1\n' in text
    assert 'rest_client_requests_total{code="200",method="PATCH",resource="grpojobs"} 1.0' in text
    assert 'grpo_operator_progress_pulls_total{result="error"} 1.0' in text
    assert 'workqueue_depth{name="grpojob"} 3.0' in text
    assert 'workqueue_adds_total{name="grpojob"} 3.0' in text
    assert 'controller_runtime_max_concurrent_reconciles{controller="grpojob"} 4.0' in text
    assert 'controller_runtime_reconcile_total{controller="grpojob",result="success"} 1.0' in text
    assert 'grpo_operator_watch_heard_timestamp_seconds{resource="pods"} 1.7e+09' in text
    assert "grpo_operator_leader 1.0\n" in text
    assert "grpo_operator_takeover_seconds 2.5\n" in text
    assert "process_resident_memory_bytes " in text
    assert "grpo_operator_memory_limit_bytes 5.36870912e+08\n" in text
    assert 'grpo_operator_unreadable_objects{resource="pods"} 2.0' in text
    assert 'workqueue_queue_duration_seconds_count{name="grpojob"} 1.0' in text
    exported = {
        line.split()[2]
        for line in text.splitlines()
        if line.startswith("# TYPE") and "process_" not in line
    }
    assert exported == {metric.name for metric in OPERATOR}


@pytest.mark.parametrize("text", ["max\n", None])
def test_a_container_without_a_memory_limit_exports_none(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    assert memory_limit(file) == {}


async def test_a_blocked_event_loop_is_seen() -> None:
    metrics = Metrics(WorkQueue(), 4)
    following = asyncio.create_task(metrics.follow_lag())
    await asyncio.sleep(0)
    block(1.0)
    await asyncio.sleep(1.0)
    following.cancel()
    assert (
        metrics.registry.get_sample_value("grpo_operator_event_loop_lag_seconds_sum") or 0.0
    ) > 0.2


class Script:
    """A cluster that answers by a script: each LIST its items, each watch its events or an
    error."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches, self.versions = lists, watches, list[int]()

    async def pages(self, _: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        answer = self.lists.pop(0) if self.lists else Unavailable("the script is over")
        if isinstance(answer, Exception):
            raise answer
        yield answer

    async def watch(
        self, _: Selection, version: int, seconds: float
    ) -> AsyncIterator[tuple[str, Object]]:
        assert seconds > 0
        self.versions.append(version)
        if not self.watches:
            await asyncio.Event().wait()
        for event in self.watches.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event


async def mirrored(script: Script, until_watches: int) -> tuple[Cache[PodRecord], list[ObjectKey]]:
    cache, changed = pods(), list[ObjectKey]()
    backoff, selection = Backoff(0.01, 0.02), Selection(PODS)
    mirror = Informer(script, selection, cache, changed.extend, resync=60, backoff=backoff)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    for _ in range(500):
        await asyncio.sleep(0.01)
        if len(script.versions) >= until_watches:
            break
    task.cancel()
    return cache, changed


def pod(name: str, version: int) -> Any:
    return item(name, version)


async def test_a_mirror_follows_from_where_the_list_ended() -> None:
    events = [
        ("ADDED", pod("b", 8)),
        ("BOOKMARK", {"metadata": {"resourceVersion": "20"}}),
        ("DELETED", pod("a", 21)),
    ]
    script = Script([([pod("a", 5)], 7)], [events])
    cache, changed = await mirrored(script, 2)
    assert [record.name for record in cache] == ["b"]
    assert script.versions == [7, 21]
    assert changed == [ObjectKey("n", "run")] * 3


async def test_a_kind_that_a_cluster_may_not_know_is_asked_for_again_when_it_is_wanted() -> None:
    script, heard = Script([NotFound("404"), ([pod("a", 5)], 7)], []), asyncio.Event()

    def changed(keys: Iterable[ObjectKey]) -> None:
        if list(keys):
            heard.set()

    mirror = Informer(script, Selection(PODS), pods(), changed, resync=60, optional=True)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    await mirror.settled.wait()
    assert mirror.not_served
    await asyncio.sleep(0)
    mirror.request_list()
    async with asyncio.timeout(20):
        await heard.wait()
    task.cancel()


async def test_a_kind_that_a_cluster_lacks_is_asked_for_once_for_all_who_want_it() -> None:
    script = Script([NotFound("404")] * 1000, [])
    mirror = Informer(script, Selection(PODS), pods(), list, resync=300, optional=True)  # type: ignore[arg-type]
    task = asyncio.create_task(mirror.follow())
    for _ in range(600):
        mirror.request_list()
        await asyncio.sleep(0.1)
    task.cancel()
    assert 1000 - len(script.lists) <= 13


async def test_a_deletion_of_something_unknown_concerns_nobody() -> None:
    script = Script([([], 7)], [[("DELETED", pod("a", 9))]])
    assert (await mirrored(script, 2))[1] == []


async def test_a_mirror_that_fell_behind_lists_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    script = Script([([pod("ghost", 5)], 7), ([pod("a", 30)], 40)], [[Expired("too old")]])
    cache, changed = await mirrored(script, 2)
    assert [record.name for record in cache] == ["a"]
    assert script.versions == [7, 40]
    assert changed == [ObjectKey("n", "run")] * 2
    assert "found 1 deletions that no event had reported" in caplog.text


async def test_a_mirror_outlives_an_outage() -> None:
    script = Script([Unavailable("away"), ([], 7)], [[("ADDED", pod("a", 8)), Unavailable("cut")]])
    cache, _ = await mirrored(script, 2)
    assert [record.name for record in cache] == ["a"]
    assert script.versions == [7, 8]


@pytest.mark.realtime
@pytest.mark.parametrize(("address", "asked"), [("", "127.0.0.1"), ("", "[::1]"), ("::1", "[::1]")])
async def test_the_pages_are_served_over_ipv4_and_ipv6(address: str, asked: str) -> None:
    metrics, jobs = Metrics(WorkQueue(), 4), JobMetrics(list, lambda: NOW)
    pages = application(metrics.registry, jobs.text, str, str, str)
    port = free_port()
    async with serve_pages(pages, address, port), ClientSession() as session:
        answer = await session.get(f"http://{asked}:{port}/healthz")
        assert answer.status == 200


@pytest.mark.realtime
async def test_only_a_port_that_is_taken_is_blamed_on_the_port() -> None:
    metrics, jobs = Metrics(WorkQueue(), 4), JobMetrics(list, lambda: NOW)
    port = free_port()

    def served() -> AbstractAsyncContextManager[None]:
        pages = application(metrics.registry, jobs.text, str, str, str)
        return serve_pages(pages, "127.0.0.1", port)

    with pytest.raises(ConnectionResetError, match="of another connection"):
        async with served():
            raise ConnectionResetError("of another connection")
    with pytest.raises(ConfigurationError, match=f"--metrics-port {port}"):
        async with served(), served():
            pass


class Succession:
    """An empty cluster in which this operator becomes the leader after a LIST of GRPOJobs, while
    the other LISTs are under way; counts the LISTs."""

    def __init__(self, leading: asyncio.Event) -> None:
        self.leading, self.lists = leading, Counter[str]()

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        self.lists[selection.resource.plural] += 1
        yield [], 7
        if selection.resource is GRPOJOBS:
            self.leading.set()

    async def watch(self, *_: Any) -> AsyncIterator[tuple[str, Object]]:
        await asyncio.Event().wait()
        yield "", {}


@pytest.mark.parametrize(("leads_from_start", "lists"), [(True, 1), (False, 2)])
async def test_what_was_listed_before_the_leader_before_had_ended_is_listed_again(
    leads_from_start: bool, lists: int
) -> None:
    leading, queue = asyncio.Event(), WorkQueue()
    cluster: Any = Succession(leading)
    if leads_from_start:
        leading.set()
    async with ClientSession() as session:
        operator = Operator(
            settings.Settings(),
            cluster,
            caches=Caches(),
            queue=queue,
            metrics=Metrics(queue, 4),
            session=session,
            leading=leading,
            wall=lambda: NOW,
        )
        running = asyncio.create_task(operator.run(lambda: None))
        await operator.working.wait()
        assert cluster.lists["grpojobs"] == lists
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.realtime
async def test_progress_is_pulled_from_a_pod_with_an_ipv6_address() -> None:
    pages = Application()

    async def progress(_: Request) -> Response:
        return Response(
            text=Progress(attempt=1, step=7).model_dump_json(), content_type="application/json"
        )

    pages.router.add_get("/progress", progress)
    async with TestServer(pages, host="::1") as server, ClientSession() as session:
        assert server.port
        target = Target(ObjectKey("n", "a"), "pod", "::1", "job", 1)
        told = await http_fetch(session, server.port)(target)
    assert told.step == 7
