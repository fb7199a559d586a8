"""Pods without a user pass what OpenShift's restricted-v2 asks of them, on an API server that
refuses all others.

OpenShift's own admission can't be had here. A policy stands in for what it validates: ids of the
namespace's range, no right beyond, no path of the node. (The real one also gives an id to a pod
that names none.)
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_api.job import parse_spec
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt
from grpo_operator.pods.pod_spec import PodDefaults
from harness.access import CommandError
from harness.fixtures import AnyCluster
from harness.programs.processes import until
from tests.integration.test_chart import only, rendered
from tests.pods_of_jobs import pods_of_jobs
from tests.samples import changed
from tests.unit.operator_world import SERVED_GPU_PLAN

NAMESPACE = "grpo-openshift"
RANGE = "openshift.io/sa.scc.uid-range"
FIRST, COUNT = 1000680000, 10000
CONTAINERS = "(object.spec.containers + object.spec.?initContainers.orValue([]))"
IN_RANGE = (
    "{0}.all(id, int(variables.range[0]) <= id && id < int(variables.range[0]) + "
    "int(variables.range[1]))"
)
USERS = (
    f"{CONTAINERS}.filter(c, has(c.securityContext) && has(c.securityContext.runAsUser))"
    ".map(c, c.securityContext.runAsUser)"
)
POD = (
    "[object.spec].filter(s, has(s.securityContext) && has(s.securityContext.{0})).map(s, "
    "s.securityContext.{0})"
)
ASKED = {
    "runAsUser of the pod is not in the range": IN_RANGE.format(POD.format("runAsUser")),
    "runAsUser of a container is not in the range": IN_RANGE.format(USERS),
    "fsGroup is not in the range": IN_RANGE.format(POD.format("fsGroup")),
    "runAsNonRoot is not true": "object.spec.?securityContext.runAsNonRoot.orValue(false) == true",
    "seccompProfile is not RuntimeDefault": (
        "object.spec.?securityContext.seccompProfile.type.orValue('') == 'RuntimeDefault'"
    ),
    "capabilities are not dropped": (
        f"{CONTAINERS}.all(c, 'ALL' in c.?securityContext.capabilities.drop.orValue([]) "
        "&& c.?securityContext.capabilities.add.orValue([]).all(added, added == "
        "'NET_BIND_SERVICE'))"
    ),
    "allowPrivilegeEscalation is not false": (
        f"{CONTAINERS}.all(c, c.?securityContext.allowPrivilegeEscalation.orValue(true) == false "
        "&& c.?securityContext.privileged.orValue(false) == false)"
    ),
    "a hostPath volume": "object.spec.?volumes.orValue([]).all(volume, !has(volume.hostPath))",
    "the node's network, processes or memory": (
        "[object.spec.?hostNetwork, object.spec.?hostPID, object.spec.?hostIPC].all(own, "
        "own.orValue(false) == false)"
    ),
}
"""Why a pod is refused, and the rule that holds where it isn't."""
NAME = "grpo-restricted-v2"
REGISTRATION = "admissionregistration.k8s.io/v1"
POLICY = {
    "apiVersion": REGISTRATION,
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": NAME},
    "spec": {
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}},
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["pods"],
                }
            ],
        },
        "variables": [
            {
                "name": "range",
                "expression": f"namespaceObject.metadata.annotations['{RANGE}'].split('/')",
            }
        ],
        "validations": [{"expression": rule, "message": why} for why, rule in ASKED.items()],
    },
}
BINDING = {
    "apiVersion": REGISTRATION,
    "kind": "ValidatingAdmissionPolicyBinding",
    "metadata": {"name": NAME},
    "spec": {"policyName": NAME, "validationActions": ["Deny"]},
}
PLACE = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": NAMESPACE, "annotations": {RANGE: f"{FIRST}/{COUNT}"}},
}
CACHED = {
    "model.cache": {"claimName": "hub"},
    "podTemplate.spec.initContainers": [{"name": "fetch", "command": ["x"]}],
}
NOBODYS = PodDefaults(image="trainer:1", user=None, pull_secrets=("registry",))
Pod = dict[str, Any]


@pytest.fixture(scope="module")
def openshift(api_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """A namespace with a range of ids, and the policy once it is obeyed."""
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": [PLACE, POLICY, BINDING]})
    api_cluster.kubectl("create", "--filename", "-", input=objects)
    there = ("get", "serviceaccounts", "-n", NAMESPACE, "-o", "name")
    until("the default service account", lambda: "default" in api_cluster.kubectl(*there), 60)
    careless = {"containers": [{"name": "c", "image": "i"}]}
    until(
        "the policy to be obeyed",
        lambda: f"Policy '{NAME}'" in (refusal(api_cluster, careless) or ""),
        60,
    )
    yield api_cluster
    api_cluster.kubectl("delete", "--wait=false", "--filename", "-", input=objects)


def refusal(cluster: AnyCluster, pod: Pod) -> str | None:
    """Why the API server doesn't take a pod; None: it does."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", "namespace": NAMESPACE},
        "spec": pod,
    }
    try:
        cluster.kubectl(
            "create", "--dry-run=server", "--validate=strict", "-f", "-", input=json.dumps(body)
        )
    except CommandError as error:
        return str(error)
    return None


def pods(defaults: PodDefaults) -> dict[str, Pod]:
    """The pod of every Job that is made for a GRPOJob."""
    key, spec = ObjectKey(NAMESPACE, "run"), parse_spec(changed(CACHED))
    return pods_of_jobs(
        Attempt(key=key, uid="uid-of-run", spec=spec, plan=SERVED_GPU_PLAN, number=1), defaults
    )


KINDS = sorted(pods(NOBODYS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_without_a_user_is_taken_and_one_of_user_1000_is_not(
    openshift: AnyCluster, kind: str
) -> None:
    assert refusal(openshift, pods(NOBODYS)[kind]) is None
    assert refusal(openshift, pods(PodDefaults(image="trainer:1", user=FIRST))[kind]) is None
    refused = refusal(openshift, pods(PodDefaults(image="trainer:1"))[kind])
    assert refused is not None
    assert "runAsUser of the pod is not in the range" in refused


def test_the_operators_own_pod_is_taken(openshift: AnyCluster) -> None:
    deployment = only(rendered(), "Deployment")
    assert (
        refusal(
            openshift, deployment["spec"]["template"]["spec"] | {"serviceAccountName": "default"}
        )
        is None
    )


def with_container(pod: Pod, **security: Any) -> Pod:
    (container,) = pod["containers"]
    return {
        **pod,
        "containers": [
            {**container, "securityContext": {**container["securityContext"], **security}}
        ],
    }


def with_pod(pod: Pod, **security: Any) -> Pod:
    return {**pod, "securityContext": {**pod["securityContext"], **security}}


PATH = {"name": "node", "hostPath": {"path": "/"}}
WORSE: dict[str, Callable[[Pod], Pod]] = {
    "runAsUser of the pod": lambda pod: with_pod(pod, runAsUser=FIRST + COUNT),
    "runAsUser of a container": lambda pod: with_container(pod, runAsUser=1000),
    "fsGroup": lambda pod: with_pod(pod, fsGroup=1000),
    "runAsNonRoot": lambda pod: with_pod(pod, runAsNonRoot=False),
    "seccompProfile": lambda pod: with_pod(pod, seccompProfile={"type": "Unconfined"}),
    "capabilities": lambda pod: with_container(pod, capabilities={}),
    "allowPrivilegeEscalation": lambda pod: with_container(pod, allowPrivilegeEscalation=True),
    "a hostPath volume": lambda pod: {**pod, "volumes": [*pod["volumes"], PATH]},
    "the node's network": lambda pod: {**pod, "hostNetwork": True},
}


@pytest.mark.parametrize("part", WORSE)
def test_the_policy_refuses_each_pod_that_is_worse(openshift: AnyCluster, part: str) -> None:
    refused = refusal(openshift, WORSE[part](pods(NOBODYS)["gang"]))
    assert refused is not None
    assert part in refused
