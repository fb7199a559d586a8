"""What the chart records of DCGM's series, by promtool, on series as a scrape of NVIDIA's exporter
leaves them.

Two ways: with the exporter's labels kept (honorLabels), and with those moved to `exported_…`.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_codegen import recording_rules
from tests.integration.test_alerts import promtool, rules

OWN = {"namespace": "gpu-operator", "pod": "dcgm-x2k9p"}
"""Where the exporter itself runs."""
TARGET = {"job": "dcgm", "instance": "10.0.0.5:9400"}
H100, A10 = "NVIDIA H100 80GB HBM3", "NVIDIA A10"
GPUS: list[tuple[str, str, str, int]] = [
    ("team", "run-a-2-0-fghij", H100, 90),
    ("team", "run-a-2-0-fghij", H100, 70),
    ("team", "run-a-2-1-klmno", H100, 80),
    ("team", "run-a-2-engine-0-qwert", H100, 0),
    ("team", "notebook-7", H100, 2),
    ("other", "run-a-2-0-pqrst", A10, 1),
    ("", "", H100, 0),
    ("", "", A10, 0),
    ("", "", A10, 0),
]
"""Namespace and pod that hold the GPU, product and busy percent. `other/run-a` is no GRPOJob."""


JOB_PODS = {
    "run-a-2-0-fghij": "trainer",
    "run-a-2-1-klmno": "trainer",
    "run-a-2-engine-0-qwert": "engine",
}


def job_of_pod(pod: str, component: str) -> dict[str, str]:
    """What the operator says of a pod of team/run-a; another leader may have said so, too."""
    names = {"namespace": "team", "grpojob": "run-a", "attempt": "2"}
    return {**names, "pod": pod, "node": "gpu-1", "component": component}


def labels(namespace: str, pod: str, *, kept: bool) -> dict[str, str]:
    """The labels of a GPU that the pod holds."""
    if not pod:
        return OWN
    if kept:
        return {"namespace": namespace, "pod": pod}
    return {**OWN, "exported_namespace": namespace, "exported_pod": pod}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    named = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{named}}}", "values": values}


def world(*, kept: bool) -> list[dict[str, str]]:
    """Twenty minutes of eight GPUs, and of one job."""
    found = [
        series("up", "1x20", **TARGET, **OWN),
        *(
            series("grpo_job_pod_info", "1x20", **job_of_pod(pod, component), instance=instance)
            for pod, component in JOB_PODS.items()
            for instance in ("old leader", "new leader")
        ),
    ]
    for number, (namespace, pod, product, busy) in enumerate(GPUS):
        own = {
            **TARGET,
            **labels(namespace, pod, kept=kept),
            "gpu": str(number),
            "modelName": product,
        }
        found.append(series("DCGM_FI_DEV_GPU_UTIL", f"{busy}x20", **own))
        found.append(series("DCGM_FI_DEV_FB_USED", f"{1024 * number}x20", **own))
        found.append(series("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", f"{busy / 256}x20", **own))
    return found


def recorded(rule: recording_rules.Recorded, *samples: tuple[str, float]) -> dict[str, Any]:
    """What a rule has recorded after fifteen minutes: labels and value."""
    expected = [{"labels": f"{rule.name}{{{labels}}}", "value": value} for labels, value in samples]
    return {"expr": rule.name, "eval_time": "15m", "exp_samples": expected}


JOB = 'namespace="team",grpojob="run-a"'
LOOKS = [
    recorded(recording_rules.UTILISATION, (JOB, 0.6)),
    recorded(recording_rules.TENSOR_ACTIVE, (JOB, 60 / 256)),
    recorded(recording_rules.MEMORY_USED, (JOB, 3 * 2.0**30)),
    recorded(recording_rules.FREE, (f'modelName="{H100}"', 1), (f'modelName="{A10}"', 2)),
    recorded(
        recording_rules.IDLE,
        (f'namespace="team",modelName="{H100}"', 2),
        (f'namespace="other",modelName="{A10}"', 1),
    ),
]


@pytest.mark.parametrize("kept", [True, False], ids=["honorLabels", "exported labels"])
def test_gpus_are_told_by_job_and_free_and_idle_ones_by_product(tmp_path: Path, kept: bool) -> None:
    assert {look["expr"] for look in LOOKS} == {rule.name for rule in recording_rules.RULES}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    test = {"interval": "1m", "input_series": world(kept=kept), "promql_expr_test": LOOKS}
    everything = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(everything))
    assert promtool(tmp_path, "test", "rules", "test.yaml") == ""


def test_nothing_is_recorded_without_the_exporter(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    silent = [recorded(rule) for rule in recording_rules.RULES]
    jobs = [one for one in world(kept=True) if one["series"].startswith("grpo_job")]
    test = {"interval": "1m", "input_series": jobs, "promql_expr_test": silent}
    everything = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(everything))
    assert promtool(tmp_path, "test", "rules", "test.yaml") == ""
