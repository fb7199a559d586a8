"""Compares a GRPOJob with the Indexed Job inside it: wall and CPU seconds until the pods exist.

    python -m benchmarks burst [--singles 20] [--bursts 3] [--jobs 200] [--fails] [--gpus]
                              [--preflight]

One job of four pods, and a burst of jobs of two pods, in all the ways of burst_kinds.py,
interleaved in one run on one API level cluster with kwok nodes, so that a noisy machine disturbs
all alike. With `--fails` all pods of a burst fail at once, and it ends when those of the next
attempts exist. With `--preflight` jobs on GPUs are checked first, by pods that find nothing. Prints
tables. Never part of the tests; the goals are in docs/internals/architecture.md.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence

from benchmarks.bench_cluster import (
    CLIENTS,
    NAMESPACE,
    NODES,
    Bench,
    bench_cluster,
    cpu_seconds,
    memory_mib,
)
from benchmarks.burst_floor import kinds
from benchmarks.burst_kinds import ROUND, Kind, fail, passing_preflights, sample
from benchmarks.pages import table
from grpo_kube.objects.resources import PODS, Object, Selection
from grpo_operator.records.names import COMPONENT_PREFLIGHT
from harness.settings import ClusterSettings, GpuSettings

GPUS_PER_NODE = 64
"""Room for a thousand jobs of two GPUs."""
ROLES = ("apiserver", "etcd", "controller-manager", "scheduler", "kwok")
SETTLE = 2.0
"""Seconds after the last pod runs in which late work is still counted as CPU time."""
QUIET = 0.15
"""CPU seconds a second of everything together while nobody asks for anything, at most."""


class BurstBench:
    """A cluster and its operator, and how many rounds there were."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.client = bench, bench.client
        self._number = 0
        self._idle: dict[str, float] = {}
        """CPU seconds a second while nobody asks for anything."""

    async def round(self, kind: Kind, failing: Kind | None, jobs: int, pods: int) -> None:
        """Creates the jobs, waits for their pods, and notes wall and CPU seconds; so again, after
        all pods have failed, for the next attempts, where that is wanted; and clears up."""
        self._number += 1
        mark = f"r{self._number}"
        async with kind.beside(self.client):
            await self._noted(kind, mark, jobs, pods, attempt=1)
            if failing:
                await self._noted(failing, mark, jobs, pods, attempt=2)
        await self.clear()

    async def _noted(self, kind: Kind, mark: str, jobs: int, pods: int, *, attempt: int) -> None:
        """One attempt of all jobs of the mark."""
        began, cpu = time.perf_counter(), self.cpu()
        gate = asyncio.Semaphore(CLIENTS)

        async def create(job: str) -> None:
            async with gate:
                await kind.create(self.client, job, mark, attempt)

        async with asyncio.TaskGroup() as tasks:
            seen = tasks.create_task(self._pods(mark, attempt, jobs * pods))
            if attempt == 1:
                for number in range(jobs):
                    tasks.create_task(create(f"{mark}-{number}"))
            else:
                tasks.create_task(fail(self.client, mark))
                async for job in self._failed(mark, jobs):
                    tasks.create_task(create(job))
        created, ran = (at - began for at in seen.result())
        await asyncio.sleep(SETTLE)
        took = time.perf_counter() - began
        used = {
            role: (at - cpu[role] - took * self._idle[role]) / jobs
            for role, at in self.cpu().items()
        }
        if not kind.operated:
            del used["operator"]
        kind.walls.append(created)
        kind.parts.append(used)
        print(f"  {kind.name:10} {jobs:4} x {pods}, attempt {attempt}: all pods {created:7.3f} s, "
              f"running {ran:7.3f} s, CPU {kind.cpus[-1] * 1000:6.1f} ms per job",
              flush=True)  # fmt: skip

    async def _pods(self, mark: str, attempt: int, count: int) -> tuple[float, float]:
        """When the last of `count` pods of an attempt existed, and when the last of them ran."""
        known: dict[str, str] = {}
        created = 0.0
        async for pod in self._watched(mark):
            if _attempt(pod) == attempt:
                known[pod["metadata"]["name"]] = pod.get("status", {}).get("phase", "Pending")
            if not created and len(known) == count:
                created = time.perf_counter()
            if created and all(phase == "Running" for phase in known.values()):
                break
        return created, time.perf_counter()

    async def _failed(self, mark: str, jobs: int) -> AsyncIterator[str]:
        """The jobs of a mark, each when the first of its pods has failed."""
        failed_jobs: set[str] = set()
        async for pod in self._watched(mark):
            job = pod["metadata"]["name"].rsplit("-", 3)[0]
            if pod.get("status", {}).get("phase") == "Failed" and job not in failed_jobs:
                failed_jobs.add(job)
                yield job
            if len(failed_jobs) == jobs:
                return

    async def _watched(self, mark: str) -> AsyncIterator[Object]:
        """The pods of a mark, each as often as it changes."""
        while True:
            async for _, pod in self.client.watch(
                Selection(PODS, NAMESPACE, f"{ROUND}={mark}"), 0, 600
            ):
                if "name" in pod["metadata"]:
                    yield pod

    async def clear(self) -> None:
        """Deletes everything and waits until the API server has nothing of it, and is quiet."""
        await self.bench.clear()
        await self._quiet()

    async def _quiet(self) -> None:
        """Waits until nothing works any more: the garbage collector looks at what is gone for a
        while. Notes what all of them use even so, which a round on a busy machine has more of."""
        while True:
            before = self.cpu()
            await asyncio.sleep(SETTLE)
            self._idle = {
                role: (seconds - before[role]) / SETTLE for role, seconds in self.cpu().items()
            }
            if sum(self._idle.values()) < QUIET:
                return

    def cpu(self) -> dict[str, float]:
        """CPU seconds that each part of the cluster, the operator and this client have used so
        far."""
        used = {
            "operator": cpu_seconds(self.bench.operator.pid),
            "client": cpu_seconds(os.getpid()),
        }
        for role in ROLES:
            used[role] = sum(cpu_seconds(pid) for pid in self.bench.cluster.processes.find(role))
        return used

    def writes(self) -> int:
        """Requests of the operator that change something, so far."""
        requests = self.bench.requests().items()
        verbs = ("POST", "PATCH", "DELETE")
        return sum(count for name, count in requests if name.startswith(verbs))


def _attempt(pod: Object) -> int:
    """Which attempt a pod is of, by the name of its Job; 0 for a preflight's."""
    if COMPONENT_PREFLIGHT in pod["metadata"].get("labels", {}).values():
        return 0
    return int(pod["metadata"]["name"].rsplit("-", 3)[1])


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def _print(what: str, measured: Sequence[Kind]) -> None:
    """A table of all kinds, with what each takes of the one with the same pods, and of the
    floor."""
    same, floor = (
        next(kind for kind in measured if kind.name == name) for name in ("same pods", "floor")
    )

    def shares(values: Callable[[Kind], list[float]], kind: Kind) -> str:
        mine = statistics.median(values(kind))
        return " / ".join(
            f"{mine / statistics.median(values(other)):.2f}" for other in (same, floor)
        )

    rows = []
    for kind in measured:
        parts = {
            role: statistics.median(one[role] for one in kind.parts) * 1000
            for role in kind.parts[0]
        }
        said = ", ".join(f"{role} {spent:.1f}" for role, spent in parts.items())
        wall, cpu = _cell(kind.walls), f"{statistics.median(kind.cpus) * 1000:.0f}"
        of_others = [shares(lambda one: one.walls, kind), shares(lambda one: one.cpus, kind)]
        rows.append([kind.name, wall, of_others[0], cpu, of_others[1], said])
    of_these = "of same pods / floor"
    header = [what, "all pods exist, s", of_these, "CPU ms per job", of_these, "by part"]
    print(f"\n{table(header, rows)}", end="", flush=True)


async def _turns(
    one: BurstBench,
    rounds: int,
    jobs: int,
    pods: int,
    *,
    gpus: bool,
    fails: bool = False,
    preflight: bool = False,
) -> None:
    """All kinds in turns; prints what was measured."""
    if not rounds:
        return
    taken = await sample(one.client, pods, gpus=gpus, preflight=preflight)
    measured, failing = kinds(taken), kinds(taken)
    await one.clear()
    for kind in kinds(taken):  # the first of each pays for connections and code that is loaded late
        await one.round(kind, None, 1, pods)
    writes = one.writes()
    for _ in range(rounds):
        for kind, again in zip(measured, failing, strict=True):
            await one.round(kind, again if fails else None, jobs, pods)
    what = f"{jobs} of {pods} pods{' with a GPU each' if gpus else ''}"
    _print(what, measured)
    if fails:
        _print(f"{what} again, after all have failed", failing)
    print(f"{(one.writes() - writes) / (rounds * jobs):.1f} writes of the operator per job")


async def measure(arguments: argparse.Namespace) -> None:
    """Runs everything and prints the tables."""
    preflight = arguments.preflight
    gpus = arguments.gpus or preflight
    flags = [*arguments.operator, *(["--preflight"] if preflight else [])]
    settings = ClusterSettings(kwok_nodes=NODES, gpus=GpuSettings(GPUS_PER_NODE if gpus else 0))
    async with bench_cluster("burst", settings, arguments=flags) as bench:
        one = BurstBench(bench)
        idle = memory_mib(bench.operator.pid)
        async with passing_preflights(one.client) if preflight else contextlib.nullcontext():
            await _turns(one, arguments.singles, 1, 4, gpus=gpus, preflight=preflight)
            await _turns(
                one,
                arguments.bursts,
                arguments.jobs,
                2,
                gpus=gpus,
                fails=arguments.fails,
                preflight=preflight,
            )
        after = memory_mib(bench.operator.pid)
        print(f"\noperator: {idle:.0f} MiB idle, {after:.0f} MiB after the bursts")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--singles", type=int, default=20, help="rounds of one job (default 20)")
    parser.add_argument("--bursts", type=int, default=3, help="rounds of many jobs (default 3)")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of a burst (default 200)")
    parser.add_argument(
        "--fails",
        action="store_true",
        help="of a burst: all pods fail, and the next attempts start",
    )
    parser.add_argument("--gpus", action="store_true", help="jobs on GPUs instead of CPUs")
    parser.add_argument(
        "--preflight", action="store_true", help="jobs on GPUs that are checked first"
    )
    parser.add_argument("operator", nargs="*", help="further arguments of the operator, after --")
    return parser


def main() -> int:
    """Runs the benchmark."""
    asyncio.run(measure(_parser().parse_args()))
    return 0
