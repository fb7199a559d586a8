"""GRPOJobClasses on a real API server: which are refused, what the pods of a gang get, and what
becomes of a class that changes while a gang runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.text.contract import API_VERSION
from harness.client import ApiStatusError
from harness.cluster import Cluster
from harness.fixtures import job_classes_served
from harness.programs.processes import until
from tests.class_samples import BAD_CLASSES, GOOD_CLASSES, job_class
from tests.integration.operator_bench import GRPOJOBS, SPEC, Bench, Object, outcome
from tests.integration.operator_thread import OperatorThread
from tests.integration.test_bad_specs import refusal_at
from tests.samples import job

CLASSES = f"/apis/{API_VERSION}/grpojobclasses"
PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}
H100: dict[str, Any] = {
    "fixed": {
        "env": [PROXY],
        "podTemplate": {"spec": {"imagePullSecrets": [{"name": "registry"}]}},
    },
    "limits": {"activeDeadlineSeconds": 3600},
    "platform": {"resources": {"limits": {"rdma/hca": "1"}}},
}
RDMA_NODES = {"rdma/hca": "8"}
POLICIES = "/apis/admissionregistration.k8s.io/v1"
ROOT = Path(__file__).parents[2]
ENFORCE = "pod-security.kubernetes.io/enforce"


@pytest.fixture(scope="module")
def bench(grpo_cluster: Cluster) -> Iterator[Bench]:
    """A namespace of a cluster that has the definition."""
    with job_classes_served(grpo_cluster):
        yield Bench(grpo_cluster, grpo_cluster.control_plane.client())


@pytest.fixture(scope="module", autouse=True)
def operator(bench: Bench) -> Iterator[OperatorThread]:
    with bench.operating() as one:
        yield one


@pytest.fixture
def h100(bench: Bench) -> Iterator[str]:
    """The class h100, and nodes with the devices that it gives."""
    for node in bench.get("/api/v1/nodes")["items"]:
        patch = {"status": {"capacity": RDMA_NODES, "allocatable": RDMA_NODES}}
        name = node["metadata"]["name"]
        bench.client.request(
            "PATCH", f"/api/v1/nodes/{name}/status", patch, "application/merge-patch+json"
        )
    bench.client.request("POST", CLASSES, job_class("h100", H100))
    yield "h100"
    bench.client.request("DELETE", f"{CLASSES}/h100")


def change_class(bench: Bench, name: str, spec: dict[str, Any]) -> None:
    body = {"spec": spec}
    bench.client.request("PATCH", f"{CLASSES}/{name}", body, "application/merge-patch+json")


def test_the_server_refuses_bad_classes_with_their_path_and_takes_good_ones(bench: Bench) -> None:
    path = f"{CLASSES}?dryRun=All&fieldValidation=Strict"
    for bad in BAD_CLASSES:
        answer = refusal_at(bench.client, path, job_class(bad.name, bad.spec))
        assert bad.path.rpartition(".")[2] in answer, bad.name
        assert re.search(f"{bad.says}|strict decoding", answer), (bad.name, answer)
    for name, spec in GOOD_CLASSES.items():
        bench.client.request("POST", path, job_class(name, spec))


def trainer(pod: Object) -> Object:
    (container,) = pod["spec"]["containers"]
    found: Object = container
    return found


def proxy_of(pod: Object) -> str:
    found: str = next(one["value"] for one in trainer(pod)["env"] if one["name"] == "HTTPS_PROXY")
    return found


def test_every_pod_has_what_the_class_gives_and_a_running_attempt_keeps_it(
    bench: Bench, h100: str
) -> None:
    bench.submit("run", jobClassName=h100)
    pods = bench.wait_running("run")
    assert len(pods) == 2
    for pod in pods:
        assert trainer(pod)["resources"]["limits"] == {"rdma/hca": "1"}
        assert proxy_of(pod) == PROXY["value"]
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    applied = bench.status("run")["jobClass"]
    assert (applied["name"], applied["generation"], applied["spec"]) == (h100, 1, H100)

    bench.submit("limited", jobClassName=h100, activeDeadlineSeconds=7200)
    verdict(bench, "limited", "RefusedByJobClass")
    moved = {"name": "HTTPS_PROXY", "value": "http://other.example:3128"}
    change_class(bench, h100, {"fixed": {"env": [moved]}, "limits": None})
    bench.wait("the operator to know the new class", lambda: bench.children("limited"), hurry=True)
    bench.end(pods[1], 1, outcome("Error", message="a fault of the test"))
    again = bench.wait_running("run", attempt=2)
    assert proxy_of(pods[0]) == PROXY["value"]
    assert [proxy_of(pod) for pod in again] == [moved["value"]] * 2
    assert bench.status("run")["jobClass"]["generation"] == 2
    assert bench.status("run")["restarts"] == 1


def verdict(bench: Bench, name: str, reason: str) -> str:
    """The message of a job that is not admitted for this reason."""
    bench.wait(reason, lambda: bench.condition("Admitted", name)[1] == reason, hurry=True)
    status, _, message = bench.condition("Admitted", name)
    assert status == "False"
    assert bench.children(name) == []
    return message


def test_a_job_beyond_a_limit_is_refused_with_its_sentence(bench: Bench, h100: str) -> None:
    bench.submit("long", jobClassName=h100, activeDeadlineSeconds=7200)
    assert verdict(bench, "long", "RefusedByJobClass") == (
        "GRPOJobClass h100: spec.activeDeadlineSeconds is 7200; at most 3600 is allowed"
    )
    change_class(bench, h100, {"limits": {"activeDeadlineSeconds": 7200}})
    bench.wait("a start", lambda: bench.children("long"), hurry=True)


def test_a_job_waits_for_its_class_and_for_the_label_of_its_namespace(bench: Bench) -> None:
    bench.submit("early", jobClassName="late")
    assert "there is no GRPOJobClass late" in verdict(bench, "early", "JobClassNotFound")
    spec = {"platform": {"hostNetwork": True}}
    bench.client.request("POST", CLASSES, job_class("late", spec))
    try:
        message = verdict(bench, "early", "PodSecurityForbids")
        assert f"label {ENFORCE} of namespace {bench.namespace} is not set" in message
        namespace = f"/api/v1/namespaces/{bench.namespace}"
        patch = {"metadata": {"labels": {ENFORCE: "privileged"}}}
        bench.client.request("PATCH", namespace, patch, "application/merge-patch+json")
        bench.wait("a start", lambda: bench.children("early"), hurry=True)
        pods = bench.wait("pods", lambda: bench.pods("early"))
        assert all(pod["spec"]["hostNetwork"] for pod in pods)
    finally:
        bench.client.request("DELETE", f"{CLASSES}/late")


def test_a_default_class_is_that_of_jobs_that_name_none(bench: Bench) -> None:
    spec = {"default": {"image": "example/by-class:1"}}
    bench.client.request("POST", CLASSES, job_class("usual", spec, default=True))
    try:
        # Of the class and a job that doesn't name it the operator may hear in any order.
        bench.submit("named", jobClassName="usual")
        bench.wait("the operator to know the class", lambda: bench.children("named"), hurry=True)
        bench.submit("unnamed")
        bench.wait("pods", lambda: bench.pods("unnamed"), hurry=True)
        assert {trainer(pod)["image"] for pod in bench.pods("unnamed")} == {"example/by-class:1"}
    finally:
        bench.client.request("DELETE", f"{CLASSES}/usual")
    shown = bench.status("unnamed")["jobClass"]
    assert json.dumps(shown["spec"]) == json.dumps(spec)


def test_the_page_s_policy_forces_jobs_to_name_the_class(bench: Bench) -> None:
    page = (ROOT / "docs/how-to/operate/job-classes.md").read_text()
    (block,) = re.findall(
        r"^```yaml\n(apiVersion: admission.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    policy = yaml.safe_load(block)
    name = policy["metadata"]["name"]
    # Of its own: a policy lives on for seconds after it is deleted.
    namespace = f"{bench.namespace}-forced"
    bench.client.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    binding = {
        "apiVersion": policy["apiVersion"],
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {
            "policyName": name,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": here},
        },
    }
    kinds = {"validatingadmissionpolicies": policy, "validatingadmissionpolicybindings": binding}
    for kind, document in kinds.items():
        bench.client.request("POST", f"{POLICIES}/{kind}", document)
    path = f"{GRPOJOBS.format(namespace)}?dryRun=All"

    def is_refused() -> bool:
        try:
            bench.client.request("POST", path, job("free", SPEC))
        except ApiStatusError as error:
            return "set spec.jobClassName to h100-rdma" in str(error)
        return False

    try:
        until("the policy to refuse a job without the class", is_refused)
        bench.client.request("POST", path, job("named", SPEC | {"jobClassName": "h100-rdma"}))
    finally:
        for kind in kinds:
            bench.client.request("DELETE", f"{POLICIES}/{kind}/{name}")
        bench.client.request("DELETE", f"/api/v1/namespaces/{namespace}")
