"""Measures how long a gang is gone: from the moment when its end is certain until the pods of the
next one exist.

    python -m benchmarks restart [--rounds 20]

One GRPOJob of four pods at a time, on an API level cluster with kwok nodes, ended in two ways: one
rank is killed for its memory, which is certain at once, and all ranks end with an error, of which
the last decides. Times are between events of one watch of the pods. First restarts, which have no
pause. Never part of the tests.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

from benchmarks.bench_cluster import NAMESPACE, NODES, Bench, bench_cluster
from benchmarks.burst_kinds import FAILS, ROUND, ending, ours
from benchmarks.pages import table
from grpo_kube.objects.resources import PODS, Object, Selection
from grpo_operator.records.names import GRPOJOBS, LABEL_ATTEMPT
from harness.settings import ClusterSettings

RANKS = 4
KILLED = ending(137, reason="OOMKilled")


class Gangs:
    """The pods of one job by attempt, as a watch tells of them, and when."""

    def __init__(self) -> None:
        """Nothing has been seen."""
        self.created: dict[str, list[float]] = {}
        self.running: set[str] = set()
        self.failed: dict[str, float] = {}
        self.changed = asyncio.Event()

    def take(self, kind: str, pod: Object) -> None:
        """One event."""
        name, attempt = pod["metadata"]["name"], pod["metadata"]["labels"][LABEL_ATTEMPT]
        phase = pod.get("status", {}).get("phase")
        if kind == "ADDED":
            self.created.setdefault(attempt, []).append(time.perf_counter())
        if phase == "Running" and attempt == "1":
            self.running.add(name)
        if phase == "Failed":
            self.failed.setdefault(name, time.perf_counter())
        self.changed.set()

    async def until(self, met: Any) -> None:
        """Waits until a condition on what was seen is met."""
        while not met():
            self.changed.clear()
            await self.changed.wait()


async def round_of(one: Bench, number: int, ranks: int, end: Object) -> float:
    """Seconds from the last of the `ranks` ends to the last pod of the second gang."""
    mark, gangs = f"restart-{number}", Gangs()

    async def watch() -> None:
        async for kind, pod in one.client.watch(
            Selection(PODS, NAMESPACE, f"{ROUND}={mark}"), 0, 300
        ):
            if kind != "BOOKMARK":
                gangs.take(kind, pod)

    watching = asyncio.create_task(watch())
    await one.client.create(GRPOJOBS, NAMESPACE, ours(mark, RANKS, mark))
    await gangs.until(lambda: len(gangs.running) == RANKS)
    await asyncio.sleep(1.0)  # the status that the gang runs is written meanwhile
    for name in sorted(gangs.running)[:ranks]:
        await one.client.patch(PODS, NAMESPACE, name, end)
    await gangs.until(
        lambda: len(gangs.failed) >= ranks and len(gangs.created.get("2", ())) == RANKS
    )
    watching.cancel()
    ended = max(sorted(gangs.failed.values())[:ranks])
    await one.client.delete_all(Selection(GRPOJOBS, NAMESPACE))
    await one.client.delete_all(Selection(PODS, NAMESPACE, f"{ROUND}={mark}"))
    return max(gangs.created["2"]) - ended


async def measure(rounds: int) -> None:
    """Runs all rounds and prints the table."""
    kinds = (
        ("one rank is killed for its memory", 1, KILLED),
        ("all ranks end with an error", RANKS, FAILS),
    )
    found: dict[str, list[float]] = {name: [] for name, *_ in kinds}
    async with bench_cluster("restart", ClusterSettings(kwok_nodes=NODES)) as one:
        for number in range(rounds):
            for position, (name, ranks, end) in enumerate(kinds):
                seconds = await round_of(one, 2 * number + position, ranks, end)
                found[name].append(seconds)
                print(f"  {name}: {seconds:.3f} s", flush=True)
    rows = [
        [name, f"**{statistics.median(values):.3f}**", f"{min(values):.3f}", f"{max(values):.3f}"]
        for name, values in found.items()
    ]
    header = ["until the next gang's pods exist", "median, s", "least", "most"]
    print(f"\n{table(header, rows)}", end="")


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    asyncio.run(measure(parser.parse_args().rounds))
    return 0
