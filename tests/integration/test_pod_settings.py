"""What the API lets users say about pods becomes a Job that Kubernetes takes, and pods that are
`restricted`.

The Job is validated strictly, so that a field that core/v1 doesn't know is an error; the pod is
judged by the admission plugin of the pod security standards itself.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_api.job import parse_spec
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt, engines_job, indexed_job
from harness.access import CommandError
from harness.fixtures import AnyCluster
from harness.programs.processes import until
from tests.container_samples import GOOD_CONTAINERS
from tests.pod_samples import GOOD_PODS
from tests.samples import changed
from tests.unit.operator_world import PODS, SERVED_GPU_PLAN

NAMESPACE = "restricted"
SAMPLES = GOOD_CONTAINERS | GOOD_PODS
NEEDS_MORE = "pod-settings"
"""A sample whose ServiceAccount and RuntimeClass a pod must find."""


@pytest.fixture(scope="module")
def restricted(api_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """A namespace that takes only `restricted` pods."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": labels},
    }
    api_cluster.kubectl("create", "-f", "-", input=json.dumps(namespace))
    there = ("get", "serviceaccounts", "-n", NAMESPACE, "-o", "name")
    until("the default service account", lambda: "default" in api_cluster.kubectl(*there), 60)
    yield api_cluster
    api_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def children(sample: str) -> list[dict[str, Any]]:
    """The Jobs of both roles."""
    spec = parse_spec(changed(SAMPLES[sample]))
    attempt = Attempt(
        key=ObjectKey(NAMESPACE, "run"), uid="uid-of-run", spec=spec, plan=SERVED_GPU_PLAN, number=1
    )
    return [job for job in (indexed_job(attempt, PODS), engines_job(attempt, PODS)) if job]


def create(cluster: AnyCluster, body: dict[str, Any]) -> None:
    cluster.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", input=json.dumps(body)
    )


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_job_is_valid(restricted: AnyCluster, sample: str) -> None:
    for job in children(sample):
        create(restricted, job)


@pytest.mark.parametrize("sample", sorted(SAMPLES.keys() - {NEEDS_MORE}))
def test_the_pod_is_restricted(restricted: AnyCluster, sample: str) -> None:
    for job in children(sample):
        template = job["spec"]["template"]
        metadata = {**template["metadata"], "name": "run-1-0", "namespace": NAMESPACE}
        create(
            restricted,
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]},
        )


def test_the_namespace_does_refuse_what_is_not_restricted(restricted: AnyCluster) -> None:
    pod = children("environment")[0]["spec"]["template"]["spec"] | {"hostNetwork": True}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", "namespace": NAMESPACE},
        "spec": pod,
    }
    with pytest.raises(CommandError, match='violates PodSecurity "restricted'):
        create(restricted, body)
