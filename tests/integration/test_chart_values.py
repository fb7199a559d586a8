"""Each value of the chart with each other one: Helm finds nothing to say, a real API server takes
what is rendered.

A value by itself is seldom wrong; what goes wrong is one in the presence of another. So each pair
of choices stands together in some case (pairwise testing, by allpairspy).
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from allpairspy import AllPairs

from grpo_api.text.contract import GROUP, PLURAL
from grpo_codegen import chart_page
from harness.definitions import is_discovered
from harness.fixtures import AnyCluster
from harness.programs.build import module_folder
from harness.programs.processes import until
from harness.stack import create_namespace
from tests.generated import gated
from tests.integration.test_chart import CHART, REGISTRY, helm, parsed

RELEASE, NAMESPACE, OTHER = "values", "grpo-chart-values", "grpo-chart-elsewhere"
TEAMS = ["grpo-chart-team-a", "grpo-chart-team-b"]
MONITORING = ("podmonitors", "servicemonitors", "prometheusrules")
"""The Prometheus operator's kinds that the chart makes."""
LABEL, LONG = {"team": "ml-7"}, {"example.com/note": "ünïcode: 'quoted' {{ braces }} # and\nlines"}
SERVED = f"{PLURAL}.{GROUP}"
TAKEN: set[str] = set()
"""What the API server took of the definition that it serves. Its rules cost a second each time, and
no value changes them, so further cases bring their labels and annotations alone."""
DIGEST = f"sha256:{'0a' * 32}"
TOLERATION = {
    "key": "node.kubernetes.io/unreachable",
    "effect": "NoExecute",
    "tolerationSeconds": 30,
}
AFFINITY = {"labelSelector": {"matchLabels": LABEL}, "topologyKey": "kubernetes.io/hostname"}
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"release": "{{ .Release.Name }}"}}
TEXT = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}-text}\n"
CHOICES: dict[str, list[Any]] = {
    "nameOverride": ["", "other"],
    "fullnameOverride": ["", "a" * 50, "t"],
    "namespaceOverride": ["", OTHER],
    "commonLabels": [{}, LABEL, {"app.kubernetes.io/name": "taken", "helm.sh/chart": "x"}, None],
    "imageRegistry": ["registry.example", "registry.example:5000/team"],
    "image": [
        {},
        {"digest": DIGEST, "pullSecrets": [{"name": "registry"}], "pullPolicy": "Always"},
    ],
    "trainerImage": [
        {},
        {"digest": DIGEST, "tag": "1.0_rc.1", "pullSecrets": [{"name": "registry"}]},
        {"architectures": ["amd64", "arm64"]},
    ],
    "trainerPods": [{}, {"user": None}, {"user": 2**31 - 1}],
    "watchNamespaces": [[], TEAMS],
    "preflight": [{"enabled": True}, {"enabled": False}],
    "gpuHourPrices": [{}, {"NVIDIA-H100-80GB-HBM3": 2.49, "A10": 0}],
    "logFormat": ["json", "text"],
    "extraArgs": [[], ["--workers=8", "--scheduling-timeout-seconds=60"]],
    "extraEnv": [
        [],
        [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}],
    ],
    "resources": [
        {},
        {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi", "ephemeral-storage": "1Gi"}},
        None,
    ],
    "replicaCount": [2, 1, 3],
    "leaderElection": [{}, {"fence": False, "leaseSeconds": 60}],
    "podDisruptionBudget": [{}, {"enabled": False}],
    "podSecurityContext": [{}, {"runAsUser": 1234, "fsGroup": 1234}],
    "securityContext": [{}, {"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}],
    "livenessProbe": [{}, {"initialDelaySeconds": 5, "timeoutSeconds": 3}, None],
    "startupProbe": [{}, {"failureThreshold": 1}],
    "extraVolumes": [[], [{"name": "more", "emptyDir": {}}]],
    "extraVolumeMounts": [[], [{"name": "tmp", "mountPath": "/var/more", "subPath": "more"}]],
    "extraObjects": [[], [CONFIG | {"metadata": {"name": "{{ .Release.Name }}-map"}}, TEXT]],
    "podLabels": [{}, LABEL, {"app.kubernetes.io/instance": "taken"}],
    "podAnnotations": [{}, LONG],
    "nodeSelector": [{}, {"pool": "system"}],
    "tolerations": [[], [TOLERATION, {"operator": "Exists"}], None],
    "affinity": [
        {},
        {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [AFFINITY]}},
    ],
    "priorityClassName": ["", "system-cluster-critical"],
    "serviceAccount": [
        {},
        {"create": False, "name": "mine"},
        {"name": "named", "annotations": LONG},
    ],
    "rbac": [{}, {"create": False, "aggregate": False}, {"foreignPods": False}],
    "crds": [{}, {"enabled": False}, {"keep": False}],
    "metrics": [
        {},
        {"port": 65535, "service": {"annotations": LONG}},
        {"service": {"enabled": False}},
    ],
    "networkPolicy": [
        {},
        {"enabled": False},
        {
            "from": [
                {"namespaceSelector": {"matchLabels": LABEL}},
                {"ipBlock": {"cidr": "10.0.0.0/8"}},
            ]
        },
        {"egress": {"enabled": True}},
        {
            "egress": {
                "enabled": True,
                "apiServerPorts": [8443],
                "extra": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            }
        },
    ],
    "tracing": [{}, {"endpoint": "http://collector.observability:4318", "everyNthStep": 1}],
    "podMonitor": [{}, {"enabled": True, "interval": "1m30s"}, {"enabled": True, "labels": LABEL}],
    "serviceMonitor": [{}, {"enabled": True, "interval": "1h", "labels": {"helm.sh/chart": "x"}}],
    "prometheusRule": [
        {},
        {"enabled": True, "labels": LABEL, "disabled": ["GRPOEngineDown"]},
        {
            "enabled": True,
            "dashboardURL": "https://grafana",
            "thresholds": {"waitSeconds": 60, "lagSeconds": 0.5},
        },
    ],
    "dashboard": [{}, {"enabled": True, "annotations": LONG}, {"enabled": True, "labels": LABEL}],
}
"""What is worth choosing of each value; the last four are of `monitoring`."""
UNCHOSEN = {"logLevel", "readinessProbe", "monitoring"}
"""Values whose brothers stand for them, and the one above those."""
CASES = [
    {name: value for name, value in zip(CHOICES, case, strict=True) if value != {}}
    for case in AllPairs(list(CHOICES.values()))
]


def values(case: dict[str, Any]) -> dict[str, Any]:
    monitoring = ("podMonitor", "serviceMonitor", "prometheusRule", "dashboard")
    nested = {name: case[name] for name in monitoring if name in case}
    return {name: value for name, value in case.items() if name not in monitoring} | {
        "monitoring": nested
    }


@pytest.fixture(scope="module")
def cluster(crd_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """An API server that knows the Prometheus operator's own definitions, and namespaces of the
    restricted standard."""
    definitions = module_folder("prometheus-operator") / "example" / "prometheus-operator-crd"
    files = [
        part
        for kind in MONITORING
        for part in ("-f", str(definitions / f"monitoring.coreos.com_{kind}.yaml"))
    ]
    crd_cluster.kubectl("create", *files)
    for kind in MONITORING:
        crd_cluster.kubectl(
            "wait", "--for=condition=Established", f"crd/{kind}.monitoring.coreos.com"
        )
        name = f"{kind}.monitoring.coreos.com"
        until(f"{name} to be discovered", partial(is_discovered, crd_cluster, name))
    for namespace in (NAMESPACE, OTHER, *TEAMS):
        create_namespace(crd_cluster, namespace)
        accounts = ("get", "serviceaccounts", "--namespace", namespace, "--output", "name")
        crd_cluster.wait("its account", *accounts, expect="serviceaccount/default")
    yield crd_cluster
    crd_cluster.kubectl("delete", "--wait=false", *files)
    crd_cluster.kubectl("delete", "--wait=false", "namespace", NAMESPACE, OTHER, *TEAMS)


def test_every_value_is_chosen() -> None:
    written = yaml.safe_load((CHART / "values.yaml").read_text())
    assert (CHOICES.keys() - written["monitoring"].keys()) | UNCHOSEN == written.keys()


@pytest.mark.parametrize("case", gated(CASES, 4), ids=range(len(CASES)))
def test_every_pair_of_choices_is_linted_and_taken(
    cluster: AnyCluster, case: dict[str, Any], tmp_path: Path
) -> None:
    chosen = tmp_path / "values.yaml"
    chosen.write_text(yaml.safe_dump(values(case), allow_unicode=True))
    linted = helm("lint", "--strict", str(CHART), "--namespace", NAMESPACE, "--values", str(chosen))
    assert (linted.returncode, "[ERROR]" in linted.stdout, "[WARNING]" in linted.stdout) == (
        0,
        False,
        False,
    ), linted
    rendered = helm(
        "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(chosen)
    )
    assert rendered.returncode == 0, rendered.stderr
    documents = parsed(rendered.stdout)
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    assert (
        deployment["spec"]["selector"]["matchLabels"].items()
        <= template["metadata"]["labels"].items()
    )
    # the namespace's standard judges pods
    account = {"serviceAccountName": "default", "priorityClassName": None}
    metadata = {"name": "operator", "namespace": deployment["metadata"]["namespace"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": template["spec"] | account,
    }
    apply(cluster, [*documents, pod])


def apply(cluster: AnyCluster, documents: list[dict[str, Any]]) -> None:
    """Server-side, so that a field that no schema knows is refused; nothing is kept."""
    for document in documents:
        if document["kind"] == "ConfigMap":  # as helm does with what names none
            document["metadata"].setdefault("namespace", NAMESPACE)
        if document["metadata"]["name"] == SERVED:
            spec = json.dumps(document.pop("spec"))
            if spec not in TAKEN:
                document["spec"] = json.loads(spec)
            TAKEN.add(spec)
    text = "\n---\n".join(
        map(json.dumps, documents)
    )  # what is inside a List, kubectl would judge by itself
    strict = ("--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts")
    # by a name of its own: what the same one leaves out of a definition that it has applied before
    # is taken away
    cluster.kubectl("apply", *strict, "--field-manager=values", "--filename", "-", input=text)


GROUPS = [
    value.path
    for value in chart_page.values((CHART / "values.yaml").read_text())
    if value.default in ("", "{}", "[]")
]
"""Values that templates look into."""


@pytest.mark.parametrize("path", gated(GROUPS, 6))
def test_a_value_that_is_taken_away_is_missed_by_its_name_or_not_at_all(path: str) -> None:
    """Helm takes null for `without the chart's default`; a template must not stumble over what
    isn't there."""
    kinds = ("podMonitor", "serviceMonitor", "prometheusRule", "dashboard")
    on = ",".join(
        f"monitoring.{kind}.enabled=true"
        for kind in kinds
        if not f"monitoring.{kind}.enabled".startswith(path)
    )
    chosen = ("--set", on, "--set", f"{path}=null")
    done = helm("template", RELEASE, str(CHART), *REGISTRY, *chosen)
    if done.returncode:
        assert f"missing property '{path.rpartition('.')[2]}'" in done.stderr
    else:
        assert parsed(done.stdout)
