"""The Job of a preflight: what its pod has of the gang's, and which changes call for another."""

import json
from typing import Any

import pytest

from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_operator.pods.preflight_job import mounted_claims, preflight_job
from grpo_operator.records.names import COMPONENT_PREFLIGHT, LABEL_COMPONENT
from tests.unit.test_operator_preflight import GPUS, ON, digest_of, gpu_job


@pytest.mark.parametrize(
    ("spec", "is_same"),
    [
        ({"suspend": True}, True),
        ({"restarts": {"limit": 9}}, True),
        ({"preflight": "Required"}, True),
        ({"placement": {"gpus": {"min": 4}}}, True),
        ({"resources": {"requests": {"memory": "9Gi"}}}, True),
        ({"dataset": {"name": "x/z"}}, False),
        ({"image": "mine:1"}, False),
        ({"placement": {"nodeSelector": {"a": "b"}}}, False),
        ({"env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}]}, False),
    ],
)
def test_only_what_is_checked_calls_for_another_check(spec: dict[str, Any], is_same: bool) -> None:
    assert (digest_of(gpu_job()) == digest_of(gpu_job(**spec))) is is_same


def job_body(unbound: Any = (), **spec: Any) -> dict[str, Any]:
    job = gpu_job(**spec)
    return preflight_job(job, job.valid_spec, None, ON, unbound)


CLAIMS: dict[str, Any] = {
    "checkpoint": {"volumeClaimTemplate": {"size": "1Gi"}},
    "model": {**GPUS["model"], "cache": {"claimName": "hub"}},
}


def test_its_pod_is_the_gang_s_without_gpus_and_without_what_makes_it_one_of_the_gang() -> None:
    init = {"name": "get", "resources": {"requests": {"cpu": "64"}}}
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"initContainers": [init]}}
    body = job_body(podTemplate=template, **CLAIMS)
    pod = body["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "grpo_trainer.preflight"]
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "2Gi"},
        "limits": {"memory": "4Gi"},
    }
    assert "ports" not in container
    assert "resources" not in pod["spec"]["initContainers"][0]
    labels = pod["metadata"]["labels"]
    assert labels["team"] == "a"
    assert labels["app.kubernetes.io/managed-by"] == "grpo-operator"
    assert labels[LABEL_COMPONENT] == COMPONENT_PREFLIGHT
    assert not {"grpo.dev/job-uid", "grpo.dev/attempt"} & labels.keys()
    assert not any(key.startswith("kueue") for key in (*labels, *body["metadata"]["labels"]))
    assert body["metadata"]["ownerReferences"][0]["uid"] == "uid-of-run"
    assert mounted_claims(body) == ["hub", "run-checkpoints"]
    plan = json.loads(pod["metadata"]["annotations"][PLAN_ANNOTATION])
    assert plan["checkpointDirectory"].startswith("/checkpoints/run-")


def test_a_claim_without_a_volume_is_not_bound_to_the_node_of_the_preflight() -> None:
    body = job_body({"hub", "run-checkpoints"}, **CLAIMS)
    assert mounted_claims(body) == []
    plan = json.loads(body["spec"]["template"]["metadata"]["annotations"][PLAN_ANNOTATION])
    assert "checkpointDirectory" not in plan
