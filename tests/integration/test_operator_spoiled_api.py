"""An API server that misbehaves: it closes watches at once, forgets the pages of a LIST, sends
errors in a watch.

A healthy server can't be asked for that, so a proxy in front of the real one spoils some of its
answers.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from harness.cluster import Cluster
from tests.generated import gated
from tests.integration.api_proxy import ApiProxy, is_watch, plural
from tests.integration.operator_bench import Bench
from tests.integration.operator_thread import quiet_for

MOST_WATCHES_PER_SECOND = 5.0
"""Of one kind, and of the operator's clock. An operator without pauses opens hundreds in a real
second.

The pauses are decided in tests of WatchPace. Here they start again whenever the test's clock jumps
by a second while a watch is open, since such a watch did not end at once; pods have two informers.
"""


@pytest.fixture
def proxy(grpo_cluster: Cluster, tmp_path: Path) -> Iterator[ApiProxy]:
    with ApiProxy(grpo_cluster, tmp_path).running() as one:
        yield one


@pytest.mark.parametrize("kind", gated(["all", "grpojobs"]))
def test_a_watch_that_closes_at_once_is_not_hammered(
    bench: Bench, proxy: ApiProxy, kind: str
) -> None:
    async def close(request: web.Request) -> web.StreamResponse | None:
        return web.Response() if is_watch(request) and kind in ("all", plural(request)) else None

    def watches() -> Counter[str]:
        """Return how often each closed kind was watched so far. Other kinds' watches end with every
        resync."""
        prefix = "WATCH " if kind == "all" else f"WATCH {kind}"
        return Counter(
            {name: count for name, count in proxy.request_counts.items() if name.startswith(prefix)}
        )

    proxy.spoil = close
    started = bench.clock.wall()
    with bench.operating(kubeconfig=str(proxy.kubeconfig), resync=2.0) as one:
        quiet_for(one, 5.0)
        counted = watches()
        most = MOST_WATCHES_PER_SECOND * (bench.clock.wall() - started)
        assert "WATCH grpojobs" in counted
        assert {name: count for name, count in counted.items() if count > most} == {}
        bench.submit()
        bench.wait_running()
        assert one.page("healthz")[0] == 200


@pytest.mark.parametrize("kind", gated(["pods", "grpojobs", "nodes"]))
def test_a_410_in_the_middle_of_a_list_begins_it_anew(
    bench: Bench, proxy: ApiProxy, kind: str
) -> None:
    """The first pages claim that there are more, and those are too old when they are asked for."""
    spoiled: list[str] = []

    async def expire(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("continue") == "spoiled":
            return web.json_response(
                {"kind": "Status", "code": 410, "message": "too old"}, status=410
            )
        if (
            request.method != "GET"
            or is_watch(request)
            or plural(request) != kind
            or len(spoiled) >= 2
        ):
            return None
        spoiled.append(kind)
        page = {
            "kind": "List",
            "metadata": {"resourceVersion": "1", "continue": "spoiled"},
            "items": [],
        }
        return web.json_response(page)

    proxy.spoil = expire
    with bench.operating(kubeconfig=str(proxy.kubeconfig)) as operator:
        bench.submit(placement={"accelerator": "GPU", "gpus": {"max": 1}}, name="gpu")
        bench.submit()
        bench.wait_running()
        bench.wait("an answer on GPUs", lambda: bench.condition("Admitted", "gpu")[1])
        assert operator.page("healthz")[0] == 200
    assert len(spoiled) == 2


def test_kopf_begins_anew_after_an_error_in_its_watch(bench: Bench, proxy: ApiProxy) -> None:
    """An error event other than 410 is fatal to kopf's operator; it must not be to ours."""
    sent: list[str] = []

    async def fail(request: web.Request) -> web.StreamResponse | None:
        if not is_watch(request) or plural(request) != "grpojobs" or len(sent) >= 2:
            return None
        sent.append("error")
        event = {
            "type": "ERROR",
            "object": {"kind": "Status", "code": 500, "message": "etcdserver: leader changed"},
        }
        return web.Response(text=json.dumps(event) + "\n")

    proxy.spoil = fail
    with bench.operating(kubeconfig=str(proxy.kubeconfig)) as operator:
        bench.wait("both errors", lambda: len(sent) == 2)
        bench.submit()
        bench.wait_running()
        assert operator.page("readyz")[0] == 200


def test_kopf_lists_no_object_and_misses_none_when_its_watch_is_too_old(
    bench: Bench, proxy: ApiProxy
) -> None:
    """A job that comes between kopf's LIST and the watch after it is found by the mirror's LIST,
    long before resync."""
    lists: list[web.Request] = []
    made: list[str] = []

    async def too_old(request: web.Request) -> web.StreamResponse | None:
        if plural(request) != "grpojobs" or request.method != "GET":
            return None
        if not is_watch(request):
            lists.append(request)
        elif len(made) < 2:
            made.append(f"late-{len(made)}")
            await asyncio.to_thread(bench.submit, made[-1])
            event = {
                "type": "ERROR",
                "object": {"kind": "Status", "code": 410, "message": "too old"},
            }
            return web.Response(text=json.dumps(event) + "\n", content_type="application/json")
        return None

    proxy.spoil = too_old
    with bench.operating(kubeconfig=str(proxy.kubeconfig)):
        for number in range(2):
            bench.wait_running(f"late-{number}")
        bench.wait("kopf's third LIST", lambda: len(by_kopf(lists)) >= 3)
    assert len(by_kopf(lists)) == 3
    assert {one.query["fieldSelector"] for one in by_kopf(lists)} == {"metadata.name=-"}


def by_kopf(lists: list[web.Request]) -> list[web.Request]:
    """Those that no informer has asked for."""
    return [one for one in lists if "limit" not in one.query]
