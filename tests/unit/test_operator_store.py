"""What pods are given where checkpoints are on an object store: a folder of their own, settings,
and no volume."""

from typing import Any

from grpo_api.job import parse_spec
from grpo_operator.pods.manifests import Attempt, indexed_job, training_plan
from tests.unit.operator_world import KEY, PLAN, PODS, SPEC, UID


def attempt(**spec: Any) -> Attempt:
    return Attempt(key=KEY, uid=UID, spec=parse_spec({**SPEC, **spec}), plan=PLAN, number=3)


def container(**spec: Any) -> Any:
    return indexed_job(attempt(**spec), PODS)["spec"]["template"]["spec"]["containers"][0]


def test_checkpoints_on_a_store_pass_through_each_pods_own_disk() -> None:
    store = {"url": "s3://bucket/runs", "credentialsSecretRef": {"name": "keys"}}
    plan = training_plan(attempt(checkpoint={"store": store}))
    assert plan.checkpoint_directory == f"/tmp/checkpoints/run-{UID}"
    assert plan.checkpoint.store is not None
    mounts = [
        mount["mountPath"] for mount in container(checkpoint={"store": store})["volumeMounts"]
    ]
    assert "/checkpoints" not in mounts


def test_a_stores_secret_becomes_variables_that_no_other_client_reads() -> None:
    store = {"url": "s3://bucket/runs", "credentialsSecretRef": {"name": "keys"}}
    given = [{"prefix": "NCCL_", "configMapRef": {"name": "nccl"}}]
    settings = {"prefix": "GRPO_CHECKPOINT_STORE_", "secretRef": {"name": "keys"}}
    assert container(checkpoint={"store": store}, envFrom=given)["envFrom"] == [settings, *given]
    assert "envFrom" not in container(checkpoint={"store": {"url": "s3://bucket"}})
