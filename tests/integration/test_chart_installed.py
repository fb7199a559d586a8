"""The Helm chart on a real API server: pod security, rights and uninstall; upgrades are in
test_chart_upgrade.py.

Platform teams own RBAC. The operator itself runs here under the release's own service account, so
that a missing verb fails a test.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from harness.access import Access, CommandError
from harness.definitions import definition_change
from harness.fixtures import AnyCluster
from harness.programs.patience import wait_for_exit
from harness.programs.processes import ClusterError, until
from tests.integration.upgrade_bench import forget_definitions
from tests.samples import changed, job
from tools.release import chart, source

NAMESPACE, RELEASE = "grpo-chart-test", "chart"
CLOSED = json.dumps({"spec": {"ingress": None}})
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-grpo-operator"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart's package, as a release has it."""
    return chart.package(source.current(source.LOCAL, ""), tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="module")
def release(grpo_cluster: AnyCluster, packaged: Path) -> Iterator[AnyCluster]:
    """The chart's package, installed by Helm into a namespace that enforces the restricted pod
    security standard."""
    forget_definitions(grpo_cluster)
    grpo_cluster.kubectl("create", "namespace", NAMESPACE)
    restricted = (
        "pod-security.kubernetes.io/enforce=restricted",
        "pod-security.kubernetes.io/enforce-version=latest",
    )
    grpo_cluster.kubectl("label", "namespace", NAMESPACE, *restricted)
    with definition_change(grpo_cluster):
        grpo_cluster.helm(
            "install", RELEASE, str(packaged), "--namespace", NAMESPACE, "--wait=false"
        )
    yield grpo_cluster
    grpo_cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found")
    grpo_cluster.kubectl("delete", "--wait=false", "namespace", NAMESPACE)


def test_the_operators_pod_meets_the_restricted_standard(release: AnyCluster) -> None:
    selector = ("--selector=app.kubernetes.io/component=operator", "--namespace", NAMESPACE)
    account = "jsonpath={.items[*].spec.serviceAccountName}"
    release.wait(
        "the pod",
        "get",
        "pods",
        *selector,
        "-o",
        account,
        expect=" ".join([f"{RELEASE}-grpo-operator"] * 2),
    )


def test_the_operators_account_has_no_wildcard(release: AnyCluster) -> None:
    def listed() -> str:
        return release.kubectl(
            "auth", "can-i", "--list", f"--as={ACCOUNT}", "--namespace", "default"
        )

    # the API server knows of new roles a moment after it has stored them
    until("all rights", lambda: listed().count("grpo.dev") >= 4)
    shown = listed()
    rights = [line for line in shown.splitlines() if "grpo.dev" in line]
    assert len(rights) == 4
    assert "[*]" not in shown
    assert "*.*" not in shown


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("update", "grpojobs.grpo.dev"),
        ("create", "grpojobs.grpo.dev"),
        ("patch", "jobs.batch"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("get", "secrets"),
        ("get", "configmaps"),
        ("delete", "persistentvolumeclaims"),
        ("get", "networkpolicies.networking.k8s.io"),
        ("patch", "nodes"),
        ("escalate", "clusterroles.rbac.authorization.k8s.io"),
    ],
)
def test_the_operator_may_not(release: AnyCluster, verb: str, what: str) -> None:
    with pytest.raises(CommandError):
        release.kubectl("auth", "can-i", verb, what, f"--as={ACCOUNT}", "--all-namespaces")


def test_the_clusters_own_roles_cover_grpojobs(release: AnyCluster) -> None:
    group = ("--as=somebody", "--as-group=team", "--namespace", NAMESPACE)
    for role, allowed in (("view", ["get"]), ("edit", ["get", "create", "delete"])):
        release.kubectl(
            "create",
            "rolebinding",
            f"team-{role}",
            f"--clusterrole={role}",
            "--group=team",
            "-n",
            NAMESPACE,
        )
        for verb in allowed:
            question = ("auth", "can-i", verb, "grpojobs.grpo.dev", *group)
            until(f"{role} to allow {verb}", partial(is_answered_yes, release, question))


def is_answered_yes(cluster: Access, question: tuple[str, ...]) -> bool:
    """Whether kubectl says yes; it says no by its exit code."""
    try:
        cluster.kubectl(*question)
    except CommandError:
        return False
    return True


@pytest.fixture
def operator(release: AnyCluster, tmp_path: Path) -> Iterator[Path]:
    """The operator's log; it runs under the release's service account."""
    config = yaml.safe_load(release.kubeconfig.read_text())
    token = release.kubectl(
        "create", "token", f"{RELEASE}-grpo-operator", "--namespace", NAMESPACE
    ).strip()
    config["users"][0]["user"] = {"token": token}
    kubeconfig, log = tmp_path / "operator.kubeconfig", tmp_path / "operator.log"
    kubeconfig.write_text(json.dumps(config))
    command = [
        sys.executable,
        "-m",
        "grpo_operator",
        "--kubeconfig",
        str(kubeconfig),
        "--metrics-address",
        "127.0.0.1",
    ]
    command += ["--metrics-port", "0", "--log-format", "text", "--trainer-image", "trainer:1"]
    command.append("--network-policy-from=[]")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        yield log
        process.terminate()
        wait_for_exit(process, 30)


def lines(cluster: Access, kind: str, path: str) -> str:
    """A field of all objects of the kind in our namespace."""
    return cluster.kubectl(
        "get", kind, "--namespace", NAMESPACE, "-o", f"jsonpath={{.items[*]{path}}}"
    )


def test_the_operator_needs_no_right_that_it_lacks(release: AnyCluster, operator: Path) -> None:
    cpu = {
        "model.parameters": "77K",
        "placement": {"accelerator": "CPU", "priorityClassName": "system-node-critical"},
    }
    claims = changed(
        {"checkpoint": {"volumeClaimTemplate": {"size": "1Gi"}}, "suspend": False, **cpu}
    )
    for name, spec in (("runs", changed(cpu)), ("claims", claims)):
        release.kubectl(
            "create", "--namespace", NAMESPACE, "-f", "-", input=json.dumps(job(name, spec))
        )
    get_phase = (
        "get",
        "grpojob",
        "runs",
        "--namespace",
        NAMESPACE,
        "-o",
        "jsonpath={.status.phase}",
    )
    try:
        release.wait("the gang", *get_phase, expect="Running")
        until(
            "the claim",
            lambda: (
                lines(release, "persistentvolumeclaims", ".metadata.name") == "claims-checkpoints"
            ),
        )
        until(
            "the policy", lambda: "grpo-pods" in lines(release, "networkpolicies", ".metadata.name")
        )
        release.kubectl(
            "patch", "networkpolicy", "grpo-pods", "--namespace", NAMESPACE, "-p", CLOSED
        )
        until(
            "the policy as it was",
            lambda: "podSelector" in lines(release, "networkpolicies", ".spec.ingress[*].from[*]"),
        )
        until("events", lambda: "GRPOJob" in lines(release, "events", ".involvedObject.kind"))
        patch(release, "runs", {"spec": {"suspend": True}})
        release.wait("the job", *get_phase, expect="Suspended")
        patch(
            release,
            "runs",
            {"spec": {"suspend": False, "activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 1}},
        )
        until(
            "the finished job to go",
            lambda: lines(release, "grpojobs", ".metadata.name") == "claims",
        )
    except ClusterError as error:
        raise AssertionError(operator.read_text()) from error
    assert "forbidden" not in operator.read_text().lower()


def patch(cluster: Access, name: str, change: dict[str, object]) -> None:
    cluster.kubectl(
        "patch", "grpojob", name, "--namespace", NAMESPACE, "--type=merge", "-p", json.dumps(change)
    )


def test_uninstall_keeps_the_definition_and_the_jobs(release: AnyCluster, packaged: Path) -> None:
    namespace = ("--namespace", NAMESPACE)
    release.kubectl("create", *namespace, "-f", "-", input=json.dumps(job("survivor", changed({}))))
    release.helm("uninstall", RELEASE, *namespace)
    assert "survivor" in release.kubectl("get", "grpojobs", *namespace, "-o", "name")
    assert "deployment" not in release.kubectl("get", "deployments", *namespace, "-o", "name")
    release.helm("install", RELEASE, str(packaged), *namespace, "--wait=false")
