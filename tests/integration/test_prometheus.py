"""The real Prometheus reads what operator and trainer export, and its own tool agrees with names
and units."""

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from grpo_api.report import training_metrics
from grpo_api.report.metrics import TIMES_TO
from grpo_api.report.report import STEP_PHASES, Progress
from grpo_trainer.process.step_counters import StepCounters
from grpo_trainer.telemetry.progress_server import ProgressCollector
from harness.cluster import Cluster
from harness.controlplane import free_port
from harness.programs.processes import until
from harness.programs.prometheus import program, query, serving
from tests.integration.operator_bench import Bench
from tests.integration.operator_thread import OperatorThread

SECONDS = 60.0


TOLD = {metric.key: 1.0 for metric in training_metrics.TRAINING}
TOLD |= {f"{metric.key}/accuracy": 1.0 for metric in training_metrics.LABELLED}
PROGRESS = Progress(
    attempt=1,
    step=7,
    total_steps=100,
    last_step_time=1.7e9,
    seconds_per_step=2.0,
    metrics={**TOLD, "kl": 0.0132, "reward_by_function/accuracy": 0.5},
    memory={"generate": 10**9, "reserved": 10**9, "device": 10**9, "host": 10**8},
)
TOLD_OF_PROGRESS = {
    "grpo_training_kl": 0.0132,
    "grpo_training_reward_by_function": 0.5,
    "sum(grpo_training_phase_seconds_total)": 1.75,
    'grpo_training_reward_sum_total{sign="negative"}': 0.5,
    'grpo_training_memory_bytes{step_phase="generate"}': 1e9,
}
"""Values of queries while `rank_zero` serves."""
LIMITS = {metric: {("backward",) * len(metric.labels): 1.0} for metric in training_metrics.LIMITS}


@pytest.fixture
def rank_zero() -> Iterator[str]:
    """The address of a trainer's metrics in the middle of a run."""
    registry, port = CollectorRegistry(), free_port()
    registry.register(ProgressCollector(lambda: PROGRESS, LIMITS))
    counters = StepCounters()
    counters.add_step(2.0, dict.fromkeys(STEP_PHASES, 0.25))
    counters.add_rewards([[1.0], [-0.5]], ["accuracy"], [1.0], group_size=2)
    registry.register(counters)
    server, thread = start_http_server(port, "127.0.0.1", registry)
    yield f"127.0.0.1:{port}"
    server.shutdown()
    thread.join()


def test_promtool_finds_nothing_to_say_of_all_that_a_trainer_exports(rank_zero: str) -> None:
    text = page(rank_zero)
    assert checked(text) == ""
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert exported == {metric.name for metric in training_metrics.TRAINER}


def page(address: str) -> str:
    """The /metrics page."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def checked(text: str) -> str:
    """What promtool has to say about a page."""
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def scraping(targets: dict[str, str]) -> dict[str, Any]:
    """The settings of a Prometheus that scrapes the targets every second."""
    scrapes = [
        {"job_name": name, "static_configs": [{"targets": [target]}]}
        for name, target in targets.items()
    ]
    return {"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes}


def has_value(address: str, expression: str, value: float) -> bool:
    """Whether an instant query finds this value, and no other."""
    return [float(one["value"][1]) for one in query(address, expression)] == [value]


def test_prometheus_scrapes_operator_and_trainer(
    grpo_cluster: Cluster, rank_zero: str, tmp_path: Path
) -> None:
    bench = Bench(grpo_cluster, grpo_cluster.control_plane.client())
    with bench.operating() as operator:
        bench.submit()
        bench.wait_running()
        port = operator.settings.metrics_port
        targets = {"operator": f"127.0.0.1:{port}", "trainer": rank_zero}
        assert checked(page(targets["operator"])) == checked(page(rank_zero)) == ""
        running = f'grpo_job_phase{{namespace="{bench.namespace}",grpojob="run",phase="Running"}}'
        with serving(tmp_path, scraping(targets)) as address:
            for expression, value in {running: 1.0, **TOLD_OF_PROGRESS, "min(up)": 1.0}.items():
                # each is waited for: a scrape that takes more than its second takes all away
                until(expression, partial(has_value, address, expression, value), SECONDS)


def milestones(operator: OperatorThread) -> list[float]:
    """How many jobs' first attempts this operator has seen admitted, scheduled and running."""
    text = operator.page("metrics")[1]
    found = [
        re.search(rf"^{metric.name}_count ([0-9.]+)$", text, re.MULTILINE)
        for metric in TIMES_TO[:3]
    ]
    return [float(one[1]) if one else -1.0 for one in found]


def test_an_operator_that_starts_anew_counts_no_milestone_twice(grpo_cluster: Cluster) -> None:
    bench = Bench(grpo_cluster, grpo_cluster.control_plane.client())
    with bench.operating() as first:
        bench.submit()
        bench.wait_running()
        until("the milestones", lambda: milestones(first) == [1.0, 1.0, 1.0], SECONDS)
    looked = 'controller_runtime_reconcile_total{controller="grpojob",result='
    with bench.operating() as second:
        until("a look at the job", lambda: looked in second.page("metrics")[1], SECONDS)
        assert milestones(second) == [0.0, 0.0, 0.0]
