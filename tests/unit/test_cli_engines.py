"""What the command line shows of engines in pods of their own."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from grpo_api.job_object import GRPOJob
from grpo_cli.__main__ import main
from grpo_cli.commands import status
from grpo_cli.commands.logs import choose_pod
from grpo_cli.show.errors import NotYet
from tests.samples import changed, job
from tests.unit.operator_world import SERVED_GPU_PLAN, active_status, make_job
from tests.unit.test_cli import pod

SERVED: dict[str, Any] = {
    "placement.accelerator": "CPU",
    "generation": {"engine": "Servers", "servers": {"replicas": 2}},
}


def engine(attempt: int, index: int, made: str) -> dict[str, Any]:
    found = pod(attempt, index)
    found["metadata"]["labels"]["grpo.dev/component"] = "engine"
    return {
        "metadata": found["metadata"]
        | {"name": f"e-{attempt}-{index}-{made}", "creationTimestamp": made}
    }


PODS = [
    pod(1, 0),
    engine(1, 0, "2026-01-02"),
    engine(1, 0, "2026-01-01"),
    engine(1, 1, "2026-01-01"),
    pod(2, 0),
]


def test_logs_come_from_a_rank_or_from_the_youngest_pod_of_an_engine() -> None:
    assert choose_pod(PODS, None, 0) == "p-2-0"
    assert choose_pod(PODS, 1, 0) == "p-1-0"
    assert choose_pod(PODS, None, 0, engine=True) == "e-1-0-2026-01-02"
    assert choose_pod(PODS, 1, 1, engine=True) == "e-1-1-2026-01-01"
    with pytest.raises(
        NotYet, match="attempt 2 for engine 0; there are: attempt 1 engine 0, attempt 1 engine 1"
    ):
        choose_pod(PODS, 2, 0, engine=True)


def test_render_prints_the_engines_beside_their_gang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job("first", changed(SERVED))))
    assert main(["render", "-f", str(path), "-n", "team"]) == 0
    found = [
        (item["kind"], item["metadata"]["name"])
        for item in yaml.safe_load_all(capsys.readouterr().out)
    ]
    assert found == [
        ("Service", "grpo-rendezvous"),
        ("Service", "grpo-engines"),
        ("Job", "first-1"),
        ("Job", "first-1-engine"),
    ]


def test_status_tells_engines_from_ranks() -> None:
    pods = [{"name": "run-1-0", "index": 0, "phase": "Running"},
            {"name": "run-1-engine-0", "index": 0, "phase": "Failed", "engine": True}]  # fmt: skip
    metrics = {
        "kl": "0.01",
        "weightsVersion": 1000000003,
        "phaseSeconds": {"generate": "29", "sync": "0.5"},
    }
    known = make_job(status=active_status(plan=SERVED_GPU_PLAN, pods=pods, metrics=metrics))
    assert known.spec
    out = Console(width=200, file=io.StringIO(), highlight=False)
    status.show_status(out, "team/run", GRPOJob(spec=known.spec, status=known.status))
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    rows = [[part.strip() for part in line.split("  ", 1)] for line in text.splitlines()]
    assert "vLLM in 2 pods of their own, 2 × NVIDIA-L4 each" in text
    assert "engine 0" in text
    assert ["metrics", "kl 0.01, weightsVersion 1000000003"] in rows
    assert ["step seconds", "sync 0.5, generate 29"] in rows
