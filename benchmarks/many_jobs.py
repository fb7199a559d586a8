"""Measures what a thousand running and ten thousand ended GRPOJobs cost the operator.

    python -m benchmarks many_jobs [--live 1000] [--ended 10000] [--checkout ../before --checkout .]

On a real API server with kwok nodes. The running jobs are real ones, started by the operator, of
one pod each, whose rank 0 does not answer; the ended ones are made, with full statuses and without
Jobs and pods. Then the operator of each checkout is started afresh, so that it lists everything,
and is left alone. Prints a table. Never part of the tests; the goals are in
docs/internals/architecture.md.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.bench_cluster import (
    NAMESPACE,
    NODES,
    Bench,
    bench_cluster,
    cpu_seconds,
    each,
    memory_mib,
    operator_process,
    ready,
)
from benchmarks.burst_kinds import ours
from benchmarks.pages import ROOT, table
from grpo_api.job import parse_spec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import STEP_PHASES
from grpo_api.status.status import ConditionType, GRPOJobStatus, Phase
from grpo_api.text.contract import API_VERSION, KIND
from grpo_api.text.units import GIB
from grpo_kube.client import Client
from grpo_kube.objects.resources import Object, Resource
from grpo_kube.objects.times import timestamp
from grpo_operator.records.names import GRPOJOBS, MANAGER
from grpo_operator.report.status import to_json
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import plan_job
from harness.cluster import Cluster
from harness.controlplane import ControlPlaneSettings, free_port
from harness.settings import ClusterSettings

TEAMS = 50
NAMESPACES = Resource("/api/v1", "namespaces")
QUIET = 60.0
SETTLED = 20.0
"""Seconds without a write after which the operator counts as settled."""
PATIENCE = 600.0
SCRAPES = 7
PING = 0.02
Row = dict[str, str]
PRODUCT = "NVIDIA-H100-80GB-HBM3"
PROMPT = (
    "Solve the problem. First think inside <reasoning> tags, then give nothing but the "
    "number in <answer> tags."
)
SPEC: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.2-1B-Instruct", "parameters": "1.24B"},
    "dataset": {
        "name": "openai/gsm8k",
        "config": "main",
        "promptColumn": "question",
        "systemPrompt": PROMPT,
    },
    "rewards": [
        {
            "format": {
                "pattern": r"<reasoning>[\s\S]*</reasoning>\s*<answer>[\s\S]*</answer>",
                "score": 0.5,
            }
        },
        {"accuracy": {"answerColumn": "answer", "score": 2.0}},
    ],
    "training": {"beta": 0.04, "numGenerations": 4, "maxCompletionLength": 786},
    "placement": {"gpus": {"min": 1, "max": 8}},
    "export": {"to": "None"},
}
GANG = 2
SAID: tuple[tuple[ConditionType, bool, str, str], ...] = (
    (ConditionType.ADMITTED, True, "Admitted", "attempt 1 has its place"),
    (
        ConditionType.PLANNED,
        True,
        "Planned",
        "Clone, all parameters, on 8 GPUs of one node; 3 other plans fit",
    ),
    (ConditionType.SCHEDULED, True, "AllPodsBound", "every pod of the gang has a node"),
    (ConditionType.RUNNING, False, "Finished", "the gang has ended"),
    (ConditionType.DEGRADED, False, "AsExpected", ""),
    (ConditionType.SUSPENDED, False, "NotSuspended", ""),
    (
        ConditionType.RECOVERABLE,
        True,
        "CheckpointVolume",
        "checkpoints outlive the pods on the claim of the job",
    ),
)


class Pings:
    """Asks the operator's health page again and again; a late answer is a blocked event loop."""

    def __init__(self, port: int) -> None:
        """Nothing is asked yet."""
        self._port = port
        self._stop = threading.Event()
        self.longest = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator["Pings"]:
        """Asks while the block runs; `longest` is the longest wait for an answer, in seconds."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.wait(PING):
            began = time.perf_counter()
            try:
                connection.request("GET", "/healthz")
                connection.getresponse().read()
            except OSError:  # it doesn't listen yet
                connection.close()
            else:
                self.longest = max(self.longest, time.perf_counter() - began)


def job(namespace: str, name: str) -> Object:
    """A GRPOJob as a user would apply it."""
    metadata = {
        "namespace": namespace,
        "name": name,
        "labels": {"team": namespace, "example.com/cost-center": "4711"},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": SPEC}


def ended(name: str, number: int, at: float) -> Object:
    """The status of a job that ended at this unix time, one of ten badly."""
    failed, steps = number % 10 == 0, 1868 - number % 700
    result = "BadInput" if failed else "Succeeded"
    message = f"finished after step {steps}"
    kinds = (
        *SAID,
        (ConditionType.SUCCEEDED, not failed, result, message),
        (ConditionType.FAILED, failed, result, ""),
    )
    conditions = [
        {"type": kind, "status": str(true), "reason": reason, "message": said,
        "observedGeneration": 1,
         "lastTransitionTime": timestamp(at)}
        for kind, true, reason, said in kinds
    ]  # fmt: skip
    memory = {"predictedBytes": 21 * GIB, "measuredBytes": 21 * GIB - number, "ratio": "1.001"}
    status = GRPOJobStatus.model_validate({
        "observedGeneration": 1, "phase": Phase.FAILED if failed else Phase.SUCCEEDED,
        "conditions": conditions,
        "attempt": 1, "startTime": timestamp(at - 9000), "completionTime": timestamp(at),
        "activeSeconds": 8900,
        "jobUid": f"6f1f2c9a-0000-4000-8000-{number:012}", "plan": _plan(),
        "progress": {"step": steps, "totalSteps": steps, "percent": 100,
        "summary": f"{steps}/{steps}",
                     "etaSeconds": 0, "lastStepTime": timestamp(at - 5)},
        "metrics": {"kl": f"{0.01 + number % 97 / 1e4:.4g}", "reward": "1.84", "rewardStd": "0.31",
        "loss": "0.0021",
                    "gradNorm": "0.42", "completionLength": "203.5"},
        "memory": {**memory, "phases": dict.fromkeys(STEP_PHASES, memory),
        "reservedBytes": 23 * GIB,
                   "predictedDeviceBytes": 24 * GIB, "deviceBytes": 24 * GIB},
        "outcome": {"result": result, "step": steps, "totalSteps": steps, "attempt": 1,
        "message": message,
                    "metrics": {"kl": 0.0132, "reward": 1.84, "loss": 0.0021}},
        "pods": [{"name": f"{name}-1-{index}-x{number % 9973:04}", "index": index,
        "node": f"node-{number % 40}",
                  "phase": "Failed" if failed else "Succeeded",
                  "reason": result} for index in range(GANG)],
    })  # fmt: skip
    return to_json(status)


@cache
def _plan() -> ExecutionPlan:
    node = Node(
        gpu_product=PRODUCT, gpu_memory_mib=81559, gpus_free=8, gpus_total=8,
        host_memory_free=1024 * GIB,
        host_memory_total=1024 * GIB, cpu_free=128.0, cpu_total=128.0,
        node_selector=(("nvidia.com/gpu.product", PRODUCT),), count=4,
    )  # fmt: skip
    chosen = plan_job(parse_spec(SPEC), Inventory((node,))).chosen
    if chosen is None:
        raise RuntimeError("the planner has no plan for the benchmark's job")
    return chosen


async def make_ended(client: Client, count: int) -> None:
    """Makes jobs that ended over the last ten days, in fifty namespaces."""
    for team in range(TEAMS):
        await client.create(NAMESPACES, "", {"metadata": {"name": f"team-{team}"}})
    now = time.time()

    async def one(number: int) -> None:
        namespace, name = f"team-{number % TEAMS}", f"gsm8k-{number}"
        made = await client.create(GRPOJOBS, namespace, job(namespace, name))
        version = {"resourceVersion": made["metadata"]["resourceVersion"]}
        status = ended(name, number, now - number * 864_000 / max(1, count))
        await client.patch(
            GRPOJOBS, namespace, name, {"metadata": version, "status": status}, "status"
        )

    await each(range(count), one)


async def make_live(bench: Bench, count: int) -> None:
    """Has the operator start jobs, and waits until all run."""

    async def one(number: int) -> None:
        await bench.client.create(GRPOJOBS, NAMESPACE, ours(f"live-{number}", 1, "live"))

    await each(range(count), one)
    await bench.phases("Running", count)


class Audit:
    """The API server's log of requests: what the operator asked, kopf's watch included."""

    def __init__(self, cluster: Cluster) -> None:
        self._file = cluster.directory / "audit.log"

    def size(self) -> int:
        """Where the log ends now."""
        return self._file.stat().st_size

    def asked(self, since: int) -> Counter[str]:
        """The operator's requests since then, by verb and kind."""
        with self._file.open("rb") as log:
            log.seek(since)
            lines = [json.loads(line) for line in log if line.endswith(b"\n")]
        return Counter(
            _name(one)
            for one in lines
            if one["userAgent"] == MANAGER and one["stage"] == "RequestReceived"
        )


def _name(event: Object) -> str:
    about = event.get("objectRef", {})
    return f"{event['verb']} {about.get('resource', '?')}"


async def _settled(audit: Audit) -> None:
    """Waits until the operator has written nothing for a while."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        mark = audit.size()
        await asyncio.sleep(SETTLED)
        if not any(
            name.split()[0] in ("create", "patch", "update", "delete") for name in audit.asked(mark)
        ):
            return
    print("  the operator still writes", flush=True)


def _scraped(port: int) -> tuple[float, int]:
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        size = len(answer.read())
    return time.perf_counter() - began, size


async def measure(cluster: Cluster, checkout: Path) -> Row:
    """Starts the operator of a checkout and measures it."""
    audit, port, began = Audit(cluster), free_port(), time.perf_counter()
    with operator_process(cluster, port, checkout=checkout) as process:
        with Pings(port).running() as listing:
            await ready(port)
            until_ready = time.perf_counter() - began
            await _settled(audit)
        scrapes = [await asyncio.to_thread(_scraped, port) for _ in range(SCRAPES)]
        mark, cpu = audit.size(), cpu_seconds(process.pid)
        with Pings(port).running() as idle:
            await asyncio.sleep(QUIET)
        asked = audit.asked(mark)
        return {
            "ready after": f"{until_ready:.1f} s",
            "longest wait of the event loop, listing": f"{listing.longest * 1000:.0f} ms",
            "longest wait of the event loop, idle": f"{idle.longest * 1000:.0f} ms",
            "RSS": f"{memory_mib(process.pid):.0f} MiB",
            "RSS at most": f"{memory_mib(process.pid, 'VmHWM'):.0f} MiB",
            "`/metrics`": f"{statistics.median(seconds for seconds, _ in scrapes) * 1000:.0f} ms",
            "its size": f"{scrapes[-1][1] / 1e6:.2f} MB",
            "CPU in 60 quiet seconds": f"{cpu_seconds(process.pid) - cpu:.1f} s",
            "requests in them": ", ".join(f"{count} {name}" for name, count in asked.most_common())
            or "none",
        }


@contextlib.asynccontextmanager
async def populated(live: int, gone: int) -> AsyncIterator[Cluster]:
    """A cluster with that many running and ended jobs."""
    settings = ClusterSettings(kwok_nodes=NODES, control_plane=ControlPlaneSettings(audit=True))
    async with bench_cluster("many-jobs", settings) as bench:
        began = time.perf_counter()
        await make_live(bench, live)
        print(f"{live} jobs run after {time.perf_counter() - began:.0f} s", flush=True)
        bench.operator.terminate()
        bench.operator.wait(30)
        began = time.perf_counter()
        await make_ended(bench.client, gone)
        print(f"{gone} ended jobs are made after {time.perf_counter() - began:.0f} s", flush=True)
        yield bench.cluster


async def compare(live: int, gone: int, checkouts: list[Path]) -> None:
    """Measures each checkout's operator on the same jobs and prints the table."""
    async with populated(live, gone) as cluster:
        rows = []
        for checkout in checkouts:
            rows.append(await measure(cluster, checkout.resolve()))
            print(f"{checkout}: {rows[-1]}", flush=True)
    header = ["", *map(str, checkouts)]
    print(f"\n{table(header, [[what, *(row[what] for row in rows)] for what in rows[0]])}", end="")


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, default=1000, help="running jobs (default 1000)")
    parser.add_argument("--ended", type=int, default=10_000, help="ended jobs (default 10000)")
    parser.add_argument(
        "--checkout", type=Path, action="append", help="whose operator is measured (default: this)"
    )
    chosen = parser.parse_args()
    asyncio.run(compare(chosen.live, chosen.ended, chosen.checkout or [ROOT]))
    return 0
