"""What kubectl users expect of a kind: columns, short name, category, explain, describe, wait.

These come from the CRD alone, and no other test looks at them. The whole life of a job is in
tests/e2e.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.report.status import to_json
from harness.access import CommandError
from harness.fixtures import AnyCluster, job_classes_served
from tests.samples import changed, job
from tests.unit import operator_world as looks
from tests.unit.operator_world import after

NAME = "seen-by-kubectl"
SINCE = "2026-01-31T12:00:00Z"


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": f"{kind}: {status}",
        "lastTransitionTime": SINCE,
    }


STATUS: dict[str, Any] = {
    "phase": "Running",
    "reason": "CheckpointNotWritten",
    "attempt": 1,
    "restarts": 0,
    "conditions": [
        condition("Admitted", "True", "Admitted"),
        condition("Succeeded", "False", "Running"),
    ],
    "plan": {
        "strategy": "Clone",
        "method": "Full",
        "zeroStage": 2,
        "gpus": 2,
        "nodes": 1,
        "microBatch": 4,
        "gradientAccumulation": 4,
        "stepsPerGeneration": 4,
        "dtype": "bfloat16",
        "parameters": "1.24B",
        "saveEverySteps": 100,
    },
    "progress": {
        "step": 140,
        "totalSteps": 1868,
        "percent": 7,
        "summary": "140/1868",
        "eta": "2h28m",
    },
    "metrics": {"kl": "0.0132", "reward": "1.84"},
}


@pytest.fixture(scope="module")
def running(crd_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """A GRPOJob as the operator would have it while it runs."""
    spec = changed({"placement": {"gpus": {"min": 1, "max": 8}}})
    crd_cluster.kubectl("create", "-f", "-", input=json.dumps(job(NAME, spec)))
    patch_status(crd_cluster, STATUS)
    yield crd_cluster
    crd_cluster.kubectl("delete", "grpojob", NAME)


def patch_status(cluster: AnyCluster, status: dict[str, Any]) -> None:
    patch = json.dumps({"status": status})
    cluster.kubectl("patch", "grpojob", NAME, "--subresource=status", "--type=merge", "-p", patch)


def table(text: str) -> dict[str, str]:
    """The row of our job by column."""
    header, *rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    (row,) = [row for row in rows if NAME in row[0]]
    return dict(zip(header, row, strict=True))


@pytest.mark.parametrize("kind", ["grpojob", "grpojobs", "grpo", "grpojobs.v1alpha1.grpo.dev"])
def test_get_prints_the_promised_columns(running: AnyCluster, kind: str) -> None:
    row = table(running.kubectl("get", kind))
    row.pop("AGE")
    assert row == {
        "NAME": NAME,
        "PHASE": "Running",
        "REASON": "CheckpointNotWritten",
        "MODEL": "meta-llama/Llama-3.2-1B-Instruct",
        "SIZE": "1.24B",
        "REFERENCE": "Clone",
        "GPUS": "2",
        "STEP": "140/1868",
        "KL": "0.0132",
        "REWARD": "1.84",
        "RESTARTS": "0",
    }


def test_a_kl_that_is_no_number_is_shown_as_that(running: AnyCluster) -> None:
    patch_status(running, {"metrics": {"kl": "NaN", "reward": "-Inf"}})
    row = table(running.kubectl("get", "grpojob"))
    assert (row["KL"], row["REWARD"]) == ("NaN", "-Inf")
    patch_status(running, STATUS)


def test_wide_adds_what_explains_it(running: AnyCluster) -> None:
    wide = running.kubectl("get", "grpojob", "-o", "wide")
    assert wide.splitlines()[0].split()[11:] == [
        "AGE",
        "NODES",
        "ZERO",
        "TRAINS",
        "STAGE",
        "ETA",
        "OUTCOME",
    ]
    for text in ("Full", "2h28m"):
        assert text in wide


@pytest.mark.parametrize("category", ["all", "training"])
def test_categories_list_jobs(running: AnyCluster, category: str) -> None:
    assert f"grpojob.grpo.dev/{NAME}" in running.kubectl("get", category, "-o", "name")


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("grpojob", ["spec <Object> -required-", "What to train."]),
        ("grpojob.spec", ["rewards <[]Object> -required-", "model <Object> -required-"]),
        ("grpojob.spec.training.beta", ["<number>", "Weight of the KL term.", "Unset: 0.04"]),
        ("grpojob.spec.rewards", ["<[]Object>", "their weighted sum is the reward"]),
        (
            "grpojob.spec.reference.strategy",
            ["ENUM: Auto Clone Adapter Sharded", "the plan chooses and says why"],
        ),
        ("grpojob.status.plan.memory", ["Predicted memory"]),
    ],
)
def test_explain_reads_well(running: AnyCluster, path: str, texts: list[str]) -> None:
    said = " ".join(running.kubectl("explain", path).split())
    for text in texts:
        assert text in said


@pytest.fixture(scope="module")
def class_definition(running: AnyCluster) -> Iterator[None]:
    """One example has a class beside its job."""
    with job_classes_served(running):
        yield


@pytest.mark.usefixtures("class_definition")
@pytest.mark.parametrize(
    "example", sorted(Path("examples").glob("*.yaml")), ids=lambda path: path.stem
)
def test_examples_are_accepted(running: AnyCluster, example: Path) -> None:
    assert "grpojob.grpo.dev" in running.kubectl("create", "--dry-run=server", "-f", str(example))


def test_describe_shows_conditions(running: AnyCluster) -> None:
    assert "Succeeded: False" in running.kubectl("describe", "grpojob", NAME)


ENDS = {
    "Succeeded": Decision(Action.SUCCEED, "Succeeded", "done"),
    "Failed": Decision(Action.FAIL, "OutOfMemory", "too large"),
}


@pytest.mark.parametrize("end", ENDS)
def test_wait_for_finished_ends_at_success_and_at_failure(running: AnyCluster, end: str) -> None:
    wait = ("wait", "--for=condition=Finished", f"grpojob/{NAME}")
    patch_status(running, to_json(after(looks.running(), Decision(Action.WAIT))))
    with pytest.raises(CommandError, match="timed out"):
        running.kubectl(*wait, "--timeout=1s")
    patch_status(running, to_json(after(looks.running(), ENDS[end])))
    assert "condition met" in running.kubectl(*wait, "--timeout=30s")
    assert end in running.kubectl("get", "grpojob", NAME)


def test_a_job_that_no_operator_has_seen_says_so(crd_cluster: AnyCluster) -> None:
    """By the default of its status, which the API server applies whenever it shows the object."""
    name = "nobody-has-seen-it"
    created = crd_cluster.kubectl(
        "create", "-o", "json", "-f", "-", input=json.dumps(job(name, changed({})))
    )
    try:
        read = crd_cluster.kubectl("get", "grpojob", name, "-o", "json")
        for text in (created, read):
            shown = json.loads(text)
            assert shown["metadata"]["generation"] == 1
            assert shown["status"] == {"observedGeneration": 0}
    finally:
        crd_cluster.kubectl("delete", "grpojob", name)
