"""What jobs that wait for GPUs cost, and how soon the next starts: a real API server, kwok nodes,
the operator beside.

    python -m benchmarks waiting [--jobs 200] [--seconds 60] [--impossible 32 320] [--nodes 1000]
    [--checkout DIR]

Four nodes of eight GPUs are taken; all other jobs wait, each with a spec of its own. Then nothing
changes for a while: the operator's CPU seconds and requests are counted. Then one gang after the
other ends: from its rank 0's end to the next gang's Job. Then jobs for a product that no node has
come before one that could run. At last a pass by itself, on a thousand nodes. `--checkout` runs the
operator of another working tree. Prints a table; never part of the tests.
"""

import argparse
import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench_cluster import NAMESPACE, Bench, bench_cluster, cpu_seconds, each
from benchmarks.burst_kinds import ending, grpojob
from benchmarks.pages import ROOT
from benchmarks.plan_speed import PRODUCTS
from grpo_kube.objects.resources import JOBS, PODS, Object, Selection
from grpo_operator.admission.inventory import NodeFacts
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.scheduler import CycleInput, schedule
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Limits
from grpo_operator.records.names import GRPOJOBS
from grpo_operator.records.parsing import grpojob_record
from grpo_operator.records.records import GRPOJobRecord
from harness.settings import ClusterSettings, GpuSettings

NODES, GPUS = 4, 8
QUIET = 5.0
"""Seconds without a write after which every job has its verdict."""


def job(name: str, gpus: int, number: int = 0, **placement: Any) -> Object:
    """A GRPOJob for one node; `number` makes its spec another than all others'."""
    spec = {
        "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"},
        "dataset": {"name": "openai/gsm8k", "config": "main"},
        "rewards": [{"accuracy": {}}],
        "training": {"promptsPerStep": 8, "numGenerations": 8, "learningRate": 1e-6 * (1 + number)},
        "placement": {"gpus": {"min": gpus, "max": gpus}, "nodes": 1, **placement},
        "export": {"to": "None"},
    }
    return grpojob(name, spec)


class WaitingBench:
    """The jobs that hold GPUs and wait for them, on a cluster with its operator."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.client = bench, bench.client

    def cpu(self) -> float:
        """CPU seconds of the operator so far."""
        return cpu_seconds(self.bench.operator.pid)

    async def submit(self, *jobs: Object) -> None:
        """Creates the jobs, some at a time."""
        await each(jobs, partial(self.client.create, GRPOJOBS, NAMESPACE))

    async def still(self) -> None:
        """Waits until nobody has anything to write any more."""
        before, since = self.bench.requests()["PATCH grpojobs"], time.perf_counter()
        while time.perf_counter() - since < QUIET:
            await asyncio.sleep(0.5)
            if (now := self.bench.requests()["PATCH grpojobs"]) != before:
                before, since = now, time.perf_counter()

    async def starts(self, name: str | None = None) -> tuple[str, float]:
        """The GRPOJob whose Job is created next, and when."""
        known = {
            item["metadata"]["name"] for item in await self.bench.items(Selection(JOBS, NAMESPACE))
        }
        async for kind, item in self.client.watch(Selection(JOBS, NAMESPACE), 0, 600):
            found = item["metadata"].get("name", "")
            if kind == "ADDED" and found not in known and (name is None or found == f"{name}-1"):
                return found.rpartition("-")[0], time.perf_counter()
        raise TimeoutError("no Job was created")

    async def end(self, name: str) -> float:
        """Ends a job's pod well; returns when it had ended."""
        selection = Selection(PODS, NAMESPACE, f"grpo.dev/job-name={name}")
        (pod,) = await self.bench.items(selection)
        body = ending(0, message='{"result": "Succeeded"}')
        await self.client.patch(PODS, NAMESPACE, pod["metadata"]["name"], body)
        async for _, item in self.client.watch(selection, 0, 60):
            if item.get("status", {}).get("phase") == "Succeeded":
                return time.perf_counter()
        raise TimeoutError(f"the pod of {name} did not end")


def row(what: str, found: str) -> None:
    """A line of the table."""
    print(f"| {what} | {found} |", flush=True)


async def wait_and_start(one: WaitingBench, jobs: int, seconds: float) -> None:
    """Nothing changes; then gangs end."""
    await one.submit(*(job(f"holds-{number}", GPUS) for number in range(NODES)))
    await one.bench.phases("Running", NODES)
    cpu, began = one.cpu(), time.perf_counter()
    await one.submit(*(job(f"waits-{number}", GPUS, number) for number in range(jobs)))
    await one.bench.phases("Queued", jobs)
    row(
        f"{jobs} jobs submitted, all Queued with a reason",
        f"{time.perf_counter() - began:.1f} s, {one.cpu() - cpu:.1f} CPU-s",
    )
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(one.still(), 150)
    row(
        "until their last sentence is written",
        f"{time.perf_counter() - began:.0f} s, {one.cpu() - cpu:.1f} CPU-s",
    )
    cpu, before = one.cpu(), one.bench.requests()
    await asyncio.sleep(seconds)
    used, made = one.cpu() - cpu, one.bench.requests() - before
    said = ", ".join(f"{count} {name}" for name, count in sorted(made.items())) or "none"
    row(f"{jobs} waiting, nothing changes, {seconds:.0f} s: CPU seconds", f"{used:.2f}")
    row("requests in that time", said)
    times = []
    for number in range(NODES):
        started = asyncio.create_task(one.starts())
        await asyncio.sleep(2)
        ended = await one.end(f"holds-{number}")
        times.append((await started)[1] - ended)
    row("rank 0 done → next gang's Job, s", ", ".join(f"{found:.2f}" for found in times))


async def impossible_first(one: WaitingBench, count: int) -> None:
    """Jobs that can never run, then one that can."""
    await one.bench.clear()
    await one.submit(*(job(f"never-{n}", 1, n, gpuProduct="NVIDIA-Nothing") for n in range(count)))
    started, began = asyncio.create_task(one.starts("can")), time.perf_counter()
    await asyncio.sleep(0.5)
    await one.submit(job("can", 1))
    try:
        found = f"{(await asyncio.wait_for(started, 60))[1] - began - 0.5:.2f}"
    except TimeoutError:
        found = "not within 60"
    row(f"{count} impossible jobs ahead: a possible one's Job, s", found)


async def on_the_cluster(given: argparse.Namespace) -> None:
    """Everything that needs one."""
    settings = ClusterSettings(kwok_nodes=NODES, gpus=GpuSettings(per_node=GPUS))
    async with bench_cluster("waiting", settings, checkout=given.checkout) as bench:
        one = WaitingBench(bench)
        await wait_and_start(one, given.jobs, given.seconds)
        for count in given.impossible:
            await impossible_first(one, count)


def _node(name: str, product: str) -> NodeFacts:
    """A node that is full."""
    labels = {
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.count": "8",
    }
    offers = {"nvidia.com/gpu": 8.0, "cpu": 128.0, "memory": 2.0**40}
    return NodeFacts(name=name, labels=labels, offers=offers, usable=True, taints=())


def _record(number: int, product: str | None) -> GRPOJobRecord:
    """A job that asks for an attempt."""
    item = job(f"j{number}", GPUS, number, **({"gpuProduct": product} if product else {}))
    created = f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z"
    item["metadata"] |= {
        "uid": f"u{number}",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": created,
    }
    return grpojob_record(item)


def passes(count: int) -> None:
    """Measure one scheduling cycle: 320 jobs of as many specs on `count` nodes of twelve products,
    at most one free."""
    products = [*PRODUCTS] * (count // len(PRODUCTS) + 1)
    nodes = tuple(_node(f"n{number}", product) for number, product in enumerate(products[:count]))
    for what, product, free in (
        ("that wait", None, 0),
        ("behind one that starts", products[0], 1),
        ("that can never run", "NVIDIA-Nothing", 0),
    ):
        jobs = tuple(_record(number, product) for number in range(320))
        busy = Snapshot(
            nodes=nodes, other_use={node.name: {"nvidia.com/gpu": 8.0} for node in nodes[free:]}
        )
        asked = CycleInput(jobs=jobs, snapshot=busy, limits=Limits(), default_image="none")
        plans, times = Plans(), list[float]()
        while not times or schedule(asked, plans).not_reached:
            times.append(time.process_time())
        times.append(time.process_time())
        schedule(asked, plans)
        found = f"{times[-1] - times[0]:.2f}, {time.process_time() - times[-1]:.2f}"
        row(
            (
                f"320 jobs {what}, {count:,} nodes: all planned for the first time, a later pass, "
                "CPU-s"
            ),
            found,
        )


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="jobs that wait (default 200)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long nothing changes (default 60)"
    )
    parser.add_argument(
        "--impossible",
        type=int,
        nargs="*",
        default=[32, 320],
        help="impossible jobs (default 32 320)",
    )
    parser.add_argument(
        "--nodes", type=int, default=1000, help="of a pass by itself (default 1000)"
    )
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="working tree whose operator is run"
    )
    given = parser.parse_args()
    print("| what | measured |\n|---|---|")
    asyncio.run(on_the_cluster(given))
    if given.checkout == ROOT:
        passes(given.nodes)
    return 0
