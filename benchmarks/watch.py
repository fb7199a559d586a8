"""kopf's watch of pods against our own: CPU time and memory for the same events at the same time.

    python -m benchmarks watch [--jobs 150]

Two processes watch the pods of one API level cluster while bare Jobs of two pods come and go: one
through kopf's `on.event`, one through grpo_kube.informer. Both only keep a record per pod. The
difference is why the operator watches pods itself and leaves only GRPOJobs to kopf.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import kopf

from benchmarks.bench_cluster import NAMESPACE, NODES, cpu_seconds, memory_mib
from benchmarks.burst_kinds import ROUND, bare
from benchmarks.pages import ROOT, table
from grpo_kube import transport
from grpo_kube.cache import Cache, Quarantine
from grpo_kube.client import Client
from grpo_kube.informer import Informer
from grpo_kube.objects.resources import JOBS, PODS, Selection, identity
from grpo_kube.transport import open_session
from grpo_operator.process import handlers
from grpo_operator.records.parsing import pod_record
from grpo_operator.records.records import PodRecord
from harness.cluster import Cluster
from harness.settings import ClusterSettings

MARK = "watched"
START_SECONDS = 8
SELECTOR = f"{ROUND}={MARK}"


def pods() -> Cache[PodRecord]:
    """An empty cache of pods."""
    return Cache(PODS, pod_record, Quarantine(), index=lambda pod: pod.job_key)


async def watch_by_kopf(kubeconfig: str) -> None:
    """Keeps the pods' records by kopf's events, until killed."""
    configuration, cache, registry = (
        await transport.load(kubeconfig),
        pods(),
        kopf.OperatorRegistry(),
    )

    async def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(
            server=configuration.host, aiohttp_session=open_session(configuration)
        )

    async def pod(event: Any, **_: Any) -> None:
        if event["type"] == "DELETED":
            cache.discard(identity(event["object"]), event["object"]["metadata"]["uid"])
        else:
            cache.put(event["object"])

    kopf.on.login(registry=registry, id="login")(login)
    kopf.on.event("", "v1", "pods", registry=registry, id="pod")(pod)
    settings = handlers.settings()
    settings.watching.label_selectors["", "v1", "pods"] = SELECTOR
    stop = threading.Event()
    await kopf.operator(
        registry=registry, settings=settings, standalone=True, clusterwide=True, stop_flag=stop
    )


async def watch_by_ours(kubeconfig: str) -> None:
    """Keeps the pods' records by our own mirror, until killed."""
    async with Client(await transport.load(kubeconfig)) as cluster:
        await Informer(
            cluster, Selection(PODS, labels=SELECTOR), pods(), lambda _: None, resync=300
        ).follow()


WATCHERS = {"kopf": watch_by_kopf, "ours": watch_by_ours}


async def _load(kubeconfig: str, jobs: int) -> None:
    """Creates Jobs, waits until all their pods run, and deletes everything."""
    pods = Selection(PODS, NAMESPACE, SELECTOR)
    async with Client(await transport.load(kubeconfig)) as client:
        for number in range(jobs):
            await client.create(JOBS, NAMESPACE, bare(f"watched-{number}", 2, MARK))
        await _running(client, pods, 2 * jobs)
        await client.delete_all(Selection(JOBS, NAMESPACE))
        await client.delete_all(pods)
        await _running(client, pods, 0)


async def _running(client: Client, pods: Selection, count: int) -> None:
    """Wait until exactly `count` of the pods run."""
    while True:
        found = [pod async for page, _ in client.pages(pods) for pod in page]
        if sum(pod["status"].get("phase") == "Running" for pod in found) == count:
            return
        await asyncio.sleep(1)


def _usage(pid: int) -> tuple[float, float]:
    """CPU seconds and MiB of a process."""
    return cpu_seconds(pid), memory_mib(pid)


def compare(jobs: int) -> None:
    """Runs both watchers beside one load and prints what each used."""
    with Cluster.create(f"watch-{os.getpid()}", ClusterSettings(kwok_nodes=NODES)) as cluster:
        processes = {name: _start(name, str(cluster.kubeconfig)) for name in WATCHERS}
        try:
            time.sleep(START_SECONDS)
            before = {name: _usage(process.pid) for name, process in processes.items()}
            asyncio.run(_load(str(cluster.kubeconfig), jobs))
            rows = []
            for name, process in processes.items():
                seconds, memory = _usage(process.pid)
                used, memory_before = seconds - before[name][0], before[name][1]
                rows.append([name, f"{used:.2f}", f"{memory_before:.0f}", f"{memory:.0f}"])
            header = [f"{2 * jobs} pods came and went", "CPU s", "MiB before", "MiB after"]
            print(table(header, rows), end="")
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


def _start(name: str, kubeconfig: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "watch",
        "--as",
        name,
        "--kubeconfig",
        kubeconfig,
    ]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "operator")}, cwd=ROOT
    )


def main() -> int:
    """Runs the benchmark, or one of its watchers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=150, help="bare Jobs of two pods (default 150)")
    parser.add_argument("--as", dest="watcher", choices=WATCHERS, help=argparse.SUPPRESS)
    parser.add_argument("--kubeconfig", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watcher:
        asyncio.run(WATCHERS[given.watcher](given.kubeconfig))
    else:
        compare(given.jobs)
    return 0
