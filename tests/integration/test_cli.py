"""The commands that look at a cluster, against a real API server through a real kubectl."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from grpo_cli.__main__ import main
from harness.fixtures import AnyCluster
from harness.programs.build import component
from tests.samples import changed, job

NAME = "shown"
SPEC = changed(
    {
        "placement": {"accelerator": "CPU", "nodes": 2},
        "model.parameters": "77K",
        "image": "trainer:1",
    }
)
PLAN = {
    "strategy": "Clone",
    "method": "Full",
    "accelerator": "CPU",
    "nodes": 2,
    "microBatch": 32,
    "gradientAccumulation": 1,
    "stepsPerGeneration": 1,
    "dtype": "float32",
    "parameters": "77K",
    "saveEverySteps": 100,
    "reason": "small enough [for] a copy",
    "changes": ["nothing is changed"],
    "warnings": ["nothing is known"],
}
STATUS: dict[str, Any] = {
    "phase": "Running",
    "attempt": 2,
    "restarts": 1,
    "plan": PLAN,
    "progress": {"step": 7, "totalSteps": 20, "percent": 35, "summary": "7/20", "eta": "3m"},
    "metrics": {"kl": "0.0132", "reward": "1.84"},
    "memory": {"predictedBytes": 3 << 30, "measuredBytes": 2 << 30, "ratio": "1.500"},
    "ends": [{"attempt": 1, "reason": "Hang", "counted": True, "endTime": "2026-01-31T12:00:00Z"}],
    "avoidedNodes": ["node-0", "node-7"],
    "checkpoint": {
        "step": 6,
        "time": "2026-01-31T12:00:00Z",
        "bytes": 3 << 29,
        "where": "pvc://team/x/checkpoint-6",
    },
    "export": {"to": "Volume", "path": "pvc://team/x/export", "format": "Adapter", "bytes": 7 << 20}
    | {"weightsHash": f"sha256:{'3' * 64}"},
    "rollbacks": [{"attempt": 1, "reason": "Diverged", "skipped": {"first": 7, "last": 8}}],
    "outcome": {"result": "Hang", "step": 5, "attempt": 1, "rank": 1, "message": "rank 1 is silent"}
    | {
        "standstill": {
            "silentSeconds": 1800,
            "frames": ["reward.py:9 in judge", "engine.py:7 in step"],
        }
    },
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "lastTransitionTime": "2026-01-31T12:00:00Z",
            "reason": "AllPodsRunning",
            "message": "spec.rewards[0] answers",
        }
    ],
    "pods": [{"name": "shown-2-0-abcde", "index": 0, "node": "node-1", "phase": "Running"}],
}


@pytest.fixture
def new_job(crd_cluster: AnyCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnyCluster]:
    """A GRPOJob that no operator has seen, and kubectl for the commands."""
    monkeypatch.setenv("KUBECTL", shlex.join(map(str, component("kubectl"))))
    monkeypatch.setenv("KUBECONFIG", str(crd_cluster.kubeconfig))
    labels = {"team": "rl", "job-name": "another", "batch.kubernetes.io/controller-uid": "another"}
    metadata = {"name": NAME, "labels": labels, "annotations": {"example.com/cost": "größer"}}
    crd_cluster.kubectl(
        "create", "-f", "-", input=json.dumps(job(NAME, SPEC) | {"metadata": metadata})
    )
    yield crd_cluster
    crd_cluster.kubectl("delete", "grpojob", NAME)


@pytest.fixture
def running_job(new_job: AnyCluster) -> AnyCluster:
    """The same job in its second attempt."""
    patch = json.dumps({"status": STATUS})
    new_job.kubectl("patch", "grpojob", NAME, "--subresource=status", "--type=merge", "-p", patch)
    return new_job


def test_status_shows_one_screen(
    running_job: AnyCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", NAME]) == 0
    screen = capsys.readouterr().out
    for text in (
        f"default/{NAME}  Running",
        "Full, reference Clone, DDP, 2 CPU processes on 2 nodes",
        "small enough [for] a copy",
        "nothing is changed",
        "nothing is known",
        "7/20 steps, 35 %, 3m to go",
        "kl 0.0132, reward 1.84",
        "3.0 GiB predicted, 2.0 GiB measured",
        "2: restarts 1 of 3 after failures, 0 of 100 after disruptions; ended: 1 Hang",
        "node-0, node-7",
        "generations 7 to 8 (Diverged)",
        "step 6, 1.5 GiB at pvc://team/x/checkpoint-6 since 2026-01-31T12:00:00Z",
        f"adapter of 7 MiB at pvc://team/x/export, weights sha256:{'3' * 64}",
        "Hang at step 5: rank 1 is silent",
        "reward.py:9 in judge",
        "engine.py:7 in step",
        "spec.rewards[0] answers",
        "shown-2-0-abcde",
    ):
        assert text in screen


def test_status_of_a_job_that_nobody_has_seen(
    new_job: AnyCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", NAME, "-n", "default"]) == 0
    assert f"default/{NAME}  Pending" in capsys.readouterr().out


def test_render_takes_the_committed_plan(
    running_job: AnyCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", NAME]) == 0
    service, gang = yaml.safe_load_all(capsys.readouterr().out)
    uid = running_job.kubectl("get", "grpojob", NAME, "-o", "jsonpath={.metadata.uid}")
    assert service["kind"] == "Service"
    assert gang["metadata"]["name"] == f"{NAME}-2"
    assert gang["metadata"]["ownerReferences"][0]["uid"] == uid
    made = json.loads(
        running_job.kubectl(
            "create", "--dry-run=server", "-o", "json", "-f", "-", input=json.dumps(gang)
        )
    )
    for metadata in (made["metadata"], made["spec"]["template"]["metadata"]):
        assert metadata["labels"]["team"] == "rl"
        assert metadata["annotations"]["example.com/cost"] == "größer"
    assert made["spec"]["template"]["metadata"]["labels"]["job-name"] == f"{NAME}-2"


def test_render_without_a_plan_says_what_is_missing(
    new_job: AnyCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", NAME]) == 5
    assert f"grpo: {NAME} has no plan yet: the operator has not seen it" in capsys.readouterr().err


def test_an_unknown_job_is_told_in_kubectls_words(
    new_job: AnyCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "nobody"]) == 4
    assert 'grpojobs.grpo.dev "nobody" not found' in capsys.readouterr().err


def test_logs_ask_for_the_container_of_the_rank(
    running_job: AnyCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", NAME]) == 5
    assert "no pod of attempt 1 on node 0 of the gang; there are: none" in capfd.readouterr().err
    labels = {
        "grpo.dev/job-name": NAME,
        "grpo.dev/attempt": "1",
        "batch.kubernetes.io/job-completion-index": "1",
    }
    container = {"name": "trainer", "image": "trainer:1"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "first-pod", "labels": labels},
        "spec": {"containers": [container], "nodeName": "nowhere"},
    }
    running_job.kubectl("create", "-f", "-", input=json.dumps(pod))
    try:
        assert main(["logs", NAME, "--rank", "1", "--attempt", "1"]) == 1, (
            "kubectl's own exit code: there is no node"
        )
        assert "nowhere" in capfd.readouterr().err
    finally:
        running_job.kubectl("delete", "pod", "first-pod", "--grace-period=0", "--force")
