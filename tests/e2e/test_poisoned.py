"""A run whose learning rate is poison, on the real cluster: a real Prometheus with the chart's
rules tells of it, and the dashboard shows it.

The rules wait for nothing here: how long each does, and in which stories, is promtool's matter
(test_alerts.py).
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.report.training_metrics import FINDING
from grpo_api.text.contract import PROGRESS_PORT
from grpo_cli.show.kubectl_yaml import load_documents
from grpo_codegen.dashboards import engines, vllm
from harness import stack
from harness.jobs import Jobs, Object
from harness.programs.processes import until
from harness.programs.prometheus import query, serving
from tools.pictures.browser import browser, page
from tools.pictures.drawing import Drawing, View, draw

pytestmark = pytest.mark.slow

NAME = "poisoned"
POISON = {"learningRate": 1.0, "maxSteps": 2000}
METRICS_PORT = 8081
"""Of the operator, as the chart has it."""
EVALUATION_SECONDS = 2
UNTOLD = {
    "Peak memory by phase",
    "Predicted over measured memory",
    "Effective training time",
    "What its GPUs did",
    "Cost so far",
    "How busy its GPUs are",
    "Memory of its GPUs",
    "Time in queues",
    "All-reduce bandwidth",
    "Slow rank",
    "Slowest rank over the median",
    "Rows lost by trackers",
    *(panel.title for panel in (*engines.PANELS, *vllm.PANELS)),
}
"""Panels of the dashboard that a short run of one rank on a CPU, without tracker and queue, leaves
empty."""
ALERT, EVALUATED = "GRPORunFinding", "evaluated"


@pytest.fixture
def target(jobs: Jobs) -> Iterator[str]:
    """The address of the poisoned run's metrics; it trains no more when the block ends."""
    jobs.create(NAME, POISON, placement={"accelerator": "CPU", "nodes": 1}, restarts={"limit": 0})
    job = jobs.wait(
        NAME, "placed", lambda _: any(pod["status"].get("podIP") for pod in jobs.list("pods", NAME))
    )
    (pod,) = jobs.list("pods", job["metadata"]["name"])
    yield f"{pod['status']['podIP']}:{PROGRESS_PORT}"
    jobs.kubectl("delete", "grpojob", NAME)


def rules(jobs: Jobs) -> list[Object]:
    """The chart's rules, after one that marks each evaluation."""
    chosen = "monitoring.prometheusRule.enabled=true,imageRegistry=localhost"
    text = jobs.access.helm("template", str(stack.CHART), "--set", chosen)
    (found,) = [
        document for document in load_documents(text) if document["kind"] == "PrometheusRule"
    ]
    group = found["spec"]["groups"][0]
    return [
        {"record": EVALUATED, "expr": "vector(1)"},
        *({**rule, "for": "0s"} for rule in group["rules"]),
    ]


def operator(jobs: Jobs) -> str:
    """The address of the metrics of the operator that leads."""
    where = ("--namespace", stack.SYSTEM_NAMESPACE, "get")
    leader = jobs.access.kubectl(
        *where, "lease", stack.RELEASE, "--output", "jsonpath={.spec.holderIdentity}"
    )
    address = jobs.access.kubectl(*where, "pod", leader, "--output", "jsonpath={.status.podIP}")
    return f"{address}:{METRICS_PORT}"


def settings(jobs: Jobs, target: str, folder: Path) -> dict[str, Any]:
    """A Prometheus that sees run and operator as the chart's monitors have it, and evaluates the
    rules soon."""
    (folder / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "grpo", "rules": rules(jobs)}]})
    )
    labels = {"namespace": jobs.namespace, "grpojob": NAME, "attempt": "1"}
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": f"{EVALUATION_SECONDS}s"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [
            {"job_name": "training", "static_configs": [{"targets": [target], "labels": labels}]},
            {
                "job_name": "operator",
                "honor_labels": True,
                "static_configs": [{"targets": [operator(jobs)]}],
            },
        ],
    }


def samples(address: str, series: str) -> list[tuple[float, float]]:
    """Time and value of what was kept of a series."""
    return [
        (float(at), float(value))
        for one in query(address, f"{series}[10m]")
        for at, value in one["values"]
    ]


def test_the_alert_fires_within_two_evaluations_of_the_first_finding(
    jobs: Jobs, target: str, tmp_path: Path
) -> None:
    firing = f'ALERTS{{alertname="{ALERT}",alertstate="firing",namespace="{jobs.namespace}",grpojob="{NAME}"}}'  # noqa: E501
    with serving(tmp_path, settings(jobs, target, tmp_path)) as address:
        told = min(at for at, _ in until(f"{ALERT} to fire", lambda: samples(address, firing), 180))
        found = min(at for at, value in samples(address, FINDING.name) if value == 1)
        evaluations = [at for at, _ in samples(address, EVALUATED)]
        until(
            "a checkpoint", lambda: query(address, "grpo_training_checkpoint_timestamp_seconds"), 60
        )
        with browser(page()) as chromium:

            def drawn() -> Drawing:
                # Rates need steps and answers of the last seconds, which a busy machine has late.
                # The second that has begun counts: what was just seen may be younger than the one
                # before.
                shown = View(
                    title=NAME,
                    end=int(time.time()) + 1,
                    seconds=30,
                    namespace=jobs.namespace,
                    job=NAME,
                    step=1,
                )
                drawing = draw(chromium, address, "training-health", shown)
                if wrong := drawing.empty ^ UNTOLD:
                    raise OSError(f"with data or without, and not as expected: {sorted(wrong)}")
                return drawing

            drawing = until("all other panels to have data", drawn)
            (tmp_path / "poisoned.png").write_bytes(chromium.picture(drawing.height))
    assert 1 <= len([at for at in evaluations if found <= at <= told]) <= 2
    assert (drawing.errors, [panel for panel in drawing.panels if panel["faults"]]) == ([], [])
