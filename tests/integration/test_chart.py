"""The Helm chart without a cluster: what it renders for every switch, and which values it rejects.

Helm by itself tells of a mistake only when the release is made. An installed release is in
test_chart_installed.py.
"""

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.report import metrics, training_metrics
from grpo_codegen import recording_rules
from grpo_operator.process import settings
from grpo_operator.records import names
from harness.programs.build import toolchain

CHART, DEFINITIONS = Path("charts/grpo-operator"), Path("crds")
NAMESPACE, RELEASE = "grpo-chart-test", "chart"
REGISTRY = ("--set", "imageRegistry=registry.example")
AS_POD = {settings.IDENTITY_ENV: "pod"}
EVERYTHING = (
    "monitoring.podMonitor.enabled=true",
    "monitoring.serviceMonitor.enabled=true",
    "monitoring.prometheusRule.enabled=true",
    "monitoring.dashboard.enabled=true",
    "image.pullSecrets[0].name=registry",
    "priorityClassName=system-cluster-critical",
    "nodeSelector.pool=system",
    "tolerations[0].operator=Exists",
    "podLabels.team=ml",
    "podAnnotations.note=here",
    "serviceAccount.annotations.role=arn",
    "metrics.service.annotations.scrape=yes",
    "monitoring.dashboard.annotations.folder=GRPO",
    "monitoring.podMonitor.labels.release=prometheus",
    "gpuHourPrices.NVIDIA-H100-80GB-HBM3=2.49",
    "tracing.endpoint=http://collector:4318",
    "extraArgs[0]=--workers=4",
    "extraEnv[0].name=TZ",
)
MONITORED = EVERYTHING[:4]
VALUES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "everything": EVERYTHING,
    "two namespaces": ("watchNamespaces={team-a,team-b}",),
    "nothing optional": (
        "crds.enabled=false",
        "rbac.create=false",
        "rbac.aggregate=false",
        "serviceAccount.create=false",
        "serviceAccount.name=mine",
        "metrics.service.enabled=false",
    ),
    "crd that goes with the release": ("crds.keep=false",),
    "one operator that leads by itself": ("replicaCount=1", "leaderElection.enabled=false"),
    "own pods only": ("rbac.foreignPods=false", "fullnameOverride=trainer"),
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(toolchain(("helm",)).program("helm"))
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def flags(values: tuple[str, ...]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


@functools.cache
def rendered_text(*values: str) -> str:
    place = ("--namespace", NAMESPACE, *REGISTRY)
    done = helm("template", RELEASE, str(CHART), *place, *flags(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


class HelmLoader(yaml.CSafeLoader):
    """The loader in C, which reads the definitions in a tenth of the time; `1e-06` is a number to
    it, as it is to Helm."""


HelmLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[0-9]+e[-+][0-9]+$"), [*"0123456789"]
)


def parsed(text: str) -> list[dict[str, Any]]:
    """The objects of what Helm rendered."""
    return [document for document in yaml.load_all(text, HelmLoader) if document]


def rendered(*values: str) -> list[dict[str, Any]]:
    """All objects, without the definitions unless a value is about them: they take most time."""
    if not any(value.startswith("crds.") for value in values):
        values = (*values, "crds.enabled=false")
    return parsed(rendered_text(*values))


def only(documents: list[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    (found,) = [
        d for d in documents if d["kind"] == kind and d["metadata"]["name"].endswith(suffix)
    ]
    return found


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_lint_has_nothing_to_say(values: tuple[str, ...]) -> None:
    done = helm("lint", "--strict", str(CHART), *REGISTRY, *flags(values))
    assert done.returncode == 0, done.stdout
    assert not re.search(r"\[(ERROR|WARNING)\]", done.stdout)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_roles_name_every_right(values: tuple[str, ...]) -> None:
    for document in rendered(*values):
        for rule in (
            document.get("rules", []) if document["kind"] in ("Role", "ClusterRole") else []
        ):
            assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            if "secrets" in rule["resources"]:
                assert (
                    rule["verbs"] == ["create"]
                    or len(rule["resourceNames"]) == len(rule["verbs"]) == 1
                )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("imagee.tag=1", "additional properties 'imagee' not allowed"),
        ("image.tagg=1", "additional properties 'tagg' not allowed"),
        ("metrics.port=80", "minimum"),
        ("logFormat=xml", "must be one of"),
        ("gpuHourPrices.H100=-1", "minimum"),
        ("gpuHourPrices.H100=-2.5", "does not match pattern"),
        ("watchNamespaces={Bad_Name}", "does not match pattern"),
        ("crds.keep=maybe", "boolean"),
        ("tracing.endpoint=collector:4317", "does not match pattern"),
        ("tracing.everyNthStep=0", "minimum"),
        ("image.repository=a b", "does not match pattern"),
        ("imageRegistry=https://example.test", "does not match pattern"),
        ("trainerImage.digest=sha256:12", "does not match pattern"),
        ("fullnameOverride=bad name", "does not match pattern"),
        ("namespaceOverride=Bad", "does not match pattern"),
        ("trainerPods.user=0", "minimum"),
        ("trainerPods.user=2147483648", "maximum"),
        ("trainerPods=null", "missing property 'trainerPods'"),
        ("image.pullSecrets[0].name=A", "does not match pattern"),
        ("image.pullSecrets[0].names=a", "missing property 'name'"),
        ("trainerImage.pullSecrets[0].name=A", "does not match pattern"),
        ("networkPolicy.from[0].labels.team=ml", "additional properties 'labels' not allowed"),
        ("monitoring=null", "missing property 'monitoring'"),
        ("monitoring.podMonitor.interval=1s1m", "does not match pattern"),
        ("livenessProbe.exec=x", "additional properties 'exec' not allowed"),
        ("extraVolumes[0].emptyDir.medium=Memory", "missing property 'name'"),
    ],
)
def test_wrong_values_are_refused(value: str, says: str) -> None:
    done = helm("template", RELEASE, str(CHART), "--set", value)
    assert done.returncode != 0
    assert says in done.stderr


def test_every_value_has_a_comment_and_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema.keys() - {"global"}
    uncommented = re.findall(r"\n\n(?!#)(\w+):", (CHART / "values.yaml").read_text())
    assert uncommented == ["serviceAccount", "rbac", "crds", "metrics"], (
        "their fields are commented"
    )


@pytest.mark.parametrize(
    ("name", "plural"),
    [
        ("grpojob", "grpojobs"),
        ("grpojobclass", "grpojobclasses"),
        ("operatorleader", "operatorleaders"),
    ],
)
def test_a_crd_is_the_committed_one_and_is_kept(name: str, plural: str) -> None:
    suffix = f"{plural}.grpo.dev"
    crd = only(parsed(rendered_text()), "CustomResourceDefinition", suffix)
    assert crd["spec"] == parsed((DEFINITIONS / f"{name}.yaml").read_text())[0]["spec"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert (
        "annotations"
        not in only(rendered("crds.keep=false"), "CustomResourceDefinition", suffix)["metadata"]
    )
    assert not [
        d for d in rendered("crds.enabled=false") if d["kind"] == "CustomResourceDefinition"
    ]


def test_a_namespaced_operator_gets_roles_in_its_namespaces_only() -> None:
    documents = rendered("watchNamespaces={team-a,team-b}", "rbac.foreignPods=false")
    assert {
        d["metadata"]["namespace"] for d in documents if d["kind"] in ("Role", "RoleBinding")
    } == {
        "team-a",
        "team-b",
        NAMESPACE,  # of the Lease
    }
    inventory = only(documents, "ClusterRole", "-inventory")
    assert [(rule["resources"], rule["verbs"]) for rule in inventory["rules"]] == [
        (["nodes"], ["list", "watch"]),
        (["priorityclasses"], ["list", "watch"]),
        (["storageclasses"], ["list", "watch"]),
        (["grpojobclasses"], ["list", "watch"]),
        (["namespaces"], ["list", "watch"]),
        (["resourceflavors", "workloadpriorityclasses"], ["get"]),
    ]
    names_ = {d["metadata"]["name"] for d in documents if d["kind"] == "ClusterRole"}
    assert names_ == {f"{RELEASE}-grpo-operator-{part}" for part in ("inventory", "view", "edit")}
    arguments = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[-2:] == ["--namespace=team-a", "--namespace=team-b"]


@pytest.mark.parametrize("values", [(), ("image.repository=example.test/grpo-operator",)])
def test_an_image_without_a_registry_is_refused_with_what_to_set(values: tuple[str, ...]) -> None:
    done = helm("template", RELEASE, str(CHART), *flags(values))
    assert done.returncode != 0
    assert "set imageRegistry=<registry>/<project>" in done.stderr


def test_both_images_may_name_registries_of_their_own() -> None:
    own = ("image.repository=a.test/operator", "trainerImage.repository=b.test/trainer")
    done = helm("template", RELEASE, str(CHART), *flags(own))
    assert "image: a.test/operator:" in done.stdout
    assert "--trainer-image=b.test/trainer:" in done.stdout


@pytest.mark.parametrize("registry", ["example.test:5000/team", "example.test:5000/team/"])
def test_one_value_says_where_both_images_are(registry: str) -> None:
    digest = f"sha256:{'0' * 64}"
    container = only(
        rendered(f"imageRegistry={registry}", f"trainerImage.digest={digest}"), "Deployment"
    )["spec"]["template"]["spec"]["containers"][0]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container["image"] == f"example.test:5000/team/grpo-operator:{version}"
    assert settings.parse(container["args"], AS_POD).pods.image == (
        f"example.test:5000/team/grpo-trainer:{version}@{digest}"
    )


def test_tracing_becomes_flags_that_the_operator_reads_and_is_off_by_default() -> None:
    def chosen(*values: str) -> settings.Tracing | None:
        deployment = only(rendered(*values), "Deployment")
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        return settings.parse(arguments, AS_POD).tracing

    assert chosen() is None
    endpoint = "http://collector.observability:4318"
    found = chosen(f"tracing.endpoint={endpoint}", "tracing.everyNthStep=3")
    assert found == settings.Tracing(endpoint=endpoint, every=3)


def test_large_numbers_become_flags_that_the_operator_reads() -> None:
    """In JSON, as in a file of values, a number is a float, and a million 1e+06."""
    chosen = (
        'tracing={"endpoint": "http://collector:4318", "everyNthStep": 1000000}',
        'gpuHourPrices={"A10": 1000000}',
        'trainerPods={"user": 2147483647}',
    )
    values = [part for value in chosen for part in ("--set-json", value)]
    done = helm("template", RELEASE, str(CHART), *REGISTRY, "--set", "crds.enabled=false", *values)
    deployment = only(parsed(done.stdout), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    found = settings.parse(arguments, AS_POD)
    assert found.tracing
    assert (found.tracing.every, found.pods.user) == (1000000, 2147483647)
    assert found.gpu_hour_prices == {"A10": 1e6}


def test_architectures_of_the_image_become_flags_that_the_operator_reads() -> None:
    def chosen(*values: str) -> tuple[str, ...]:
        deployment = only(rendered(*values), "Deployment")
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        return settings.parse(arguments, AS_POD).pods.architectures

    assert chosen() == ("amd64",)
    assert chosen("trainerImage.architectures={amd64,arm64}") == ("amd64", "arm64")


def test_prices_become_flags_that_the_operator_reads() -> None:
    """To --set, what has a decimal point is a text."""
    documents = rendered("gpuHourPrices.NVIDIA-H100-80GB-HBM3=2.49", "gpuHourPrices.A10=1")
    arguments = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    given = [argument for argument in arguments if argument.startswith("--gpu-hour-price")]
    assert settings.parse(given).gpu_hour_prices == {"NVIDIA-H100-80GB-HBM3": 2.49, "A10": 1.0}


def test_no_monitor_scrapes_what_another_one_does() -> None:
    on = ("monitoring.podMonitor.enabled=true", "monitoring.serviceMonitor.enabled=true")

    def monitors(*values: str) -> list[str]:
        found = [d for d in rendered(*values) if d["kind"].endswith("Monitor")]
        return sorted(f"{d['kind']} {d['metadata']['name']}" for d in found)

    own, training = f"{RELEASE}-grpo-operator", f"PodMonitor {RELEASE}-grpo-operator-training"
    assert monitors(on[0]) == [f"PodMonitor {own}", training]
    assert monitors(on[1]) == [f"ServiceMonitor {own}"]
    assert monitors(*on) == [training, f"ServiceMonitor {own}"]


@pytest.mark.parametrize(
    ("component", "index", "engine"),
    [
        (names.COMPONENT_TRAINER, "0", ""),
        ("", "0", ""),  # of an earlier version of the operator
        (names.COMPONENT_ENGINE, "0", "0"),
        (names.COMPONENT_ENGINE, "12", "12"),
        (names.COMPONENT_TRAINER, "1", None),
        ("", "10", None),
    ],
)
def test_rank_0_and_every_engine_are_scraped_and_nobody_else(
    component: str, index: str, engine: str | None
) -> None:
    (endpoint,) = only(rendered(*EVERYTHING), "PodMonitor", "-training")["spec"][
        "podMetricsEndpoints"
    ]
    keep, name_engine = endpoint["relabelings"][:2]
    value = f"{component};{index}"
    is_kept = re.fullmatch(keep["regex"], value) is not None
    found = re.fullmatch(name_engine["regex"], value)
    assert (keep["action"], keep["sourceLabels"]) == ("keep", name_engine["sourceLabels"])
    assert is_kept == (engine is not None)
    if is_kept:
        assert (found[1] if found else "") == engine


def test_monitors_select_what_the_operator_labels() -> None:
    documents = rendered(*EVERYTHING)
    training = only(documents, "PodMonitor", "-training")["spec"]
    assert training["selector"]["matchLabels"] == {names.LABEL_MANAGED_BY: names.MANAGER}
    (endpoint,) = training["podMetricsEndpoints"]
    sources = {source for relabel in endpoint["relabelings"] for source in relabel["sourceLabels"]}
    labels = (names.LABEL_COMPONENT, names.LABEL_INDEX, names.LABEL_JOB, names.LABEL_ATTEMPT)
    assert sources == {
        f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', label)}" for label in labels
    }
    pod = only(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selector = only(documents, "Service")["spec"]["selector"]
    assert selector.items() <= pod.items()
    assert only(documents, "ServiceMonitor")["spec"]["selector"]["matchLabels"] == selector


def test_alerts_name_only_metrics_that_exist() -> None:
    documents = rendered(*EVERYTHING)
    first, gpus = only(documents, "PrometheusRule")["spec"]["groups"]
    alerts = first["rules"]
    assert [rule["record"] for rule in gpus["rules"]] == [
        rule.name for rule in recording_rules.RULES
    ]
    known = {metric.name for metric in (*training_metrics.TRAINER, *metrics.OPERATOR)}
    for alert in alerts:
        names = re.findall(r"\bgrpo_\w+?(?=_(?:bucket|sum)\b|\b)", alert["expr"])
        assert set(names) <= known
    assert len(alerts) == len({alert["alert"] for alert in alerts}) > 0


def test_each_dashboard_is_a_config_map_for_the_sidecar() -> None:
    found = [d for d in rendered(*EVERYTHING) if d["kind"] == "ConfigMap"]
    shipped = {
        f"grpo-{path.name}": path.read_text() for path in (CHART / "files" / "dashboards").iterdir()
    }
    assert len(found) == len(shipped) == 3
    assert {name: text for one in found for name, text in one["data"].items()} == shipped
    assert len({one["metadata"]["name"] for one in found}) == 3
    for one in found:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"folder": "GRPO"}
    assert [d for d in rendered() if d["kind"] == "ConfigMap"] == []


def test_several_operators_lead_by_a_lease_behind_a_fence_and_share_no_host() -> None:
    documents = rendered()
    deployment = only(documents, "Deployment")["spec"]
    pod = deployment["template"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (2, "RollingUpdate")
    assert f"--leader-elect={NAMESPACE}/{RELEASE}-grpo-operator" in pod["containers"][0]["args"]
    assert {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in pod[
        "containers"
    ][0]["env"]
    assert [one["tolerationSeconds"] for one in pod["tolerations"]] == [30, 30]
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert only(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert only(documents, "Role", "-lease")["rules"][0]["resourceNames"] == [
        f"{RELEASE}-grpo-operator"
    ]
    policies = [d["spec"] for d in documents if d["kind"] == "ValidatingAdmissionPolicy"]
    assert [policy["validations"][0]["message"] for policy in policies] == [names.FENCE] * 2
    bindings = [
        d["spec"]["paramRef"] for d in documents if d["kind"] == "ValidatingAdmissionPolicyBinding"
    ]
    assert [(b["namespace"], b["name"]) for b in bindings] == [
        (NAMESPACE, f"{RELEASE}-grpo-operator")
    ] * 2


def test_the_fence_stands_before_all_that_the_operator_may_write() -> None:
    documents = rendered()
    rules = only(documents, "ClusterRole", f"{RELEASE}-grpo-operator")["rules"]
    writing = [rule for rule in rules if not {*rule["verbs"]} <= {"get", "list", "watch"}]
    written = {resource for rule in writing for resource in rule["resources"]} - {
        "events",
        "grpojobs/finalizers",
    }
    policies = [d["spec"] for d in documents if d["kind"] == "ValidatingAdmissionPolicy"]
    fenced = [rule for policy in policies for rule in policy["matchConstraints"]["resourceRules"]]
    assert {resource for rule in fenced for resource in rule["resources"]} == written


def test_without_a_lease_one_operator_leads_and_an_update_ends_it_first() -> None:
    documents = rendered("replicaCount=1", "leaderElection.enabled=false")
    assert only(documents, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert not {"PodDisruptionBudget", "ValidatingAdmissionPolicy"} & {d["kind"] for d in documents}
    assert not [
        d for d in documents if d["kind"] == "Role" and d["metadata"]["name"].endswith("-lease")
    ]
    done = helm("template", RELEASE, str(CHART), *REGISTRY, "--set", "leaderElection.enabled=false")
    assert "several operators need leaderElection.enabled" in done.stderr


def test_an_older_kubernetes_gets_no_fence() -> None:
    done = helm("template", RELEASE, str(CHART), *REGISTRY, "--kube-version", "1.29.0")
    assert "ValidatingAdmissionPolicy" not in done.stdout
    assert "kind: Deployment" in done.stdout


def _named(name: str) -> str:
    """What is rendered where all that a name is chosen for has this one, as JSON."""
    chosen = ("nameOverride", "fullnameOverride", "serviceAccount.name", "priorityClassName")
    texts = ",".join(f"{value}={name}" for value in (*chosen, "watchNamespaces[0]"))
    values = (*REGISTRY, "--set-string", texts, *flags((*MONITORED, "crds.enabled=false")))
    done = helm("template", name, str(CHART), "--namespace", name, *values)
    assert done.returncode == 0, done.stderr
    return json.dumps(parsed(done.stdout))


@pytest.mark.parametrize("name", ["no", "null", "off"])
def test_a_name_that_yaml_reads_as_no_text_stays_a_text(name: str) -> None:
    assert _named(name) == _named("common").replace("common", name)


@pytest.mark.parametrize(
    ("release", "full_name"),
    [
        ("grpo-0.1", ""),
        ("a.grpo-operator", ""),
        ("1e5", ""),
        ("1-grpo-operator", ""),
        ("chart", "0x1f"),
        ("chart", "7" * 50),
        (f"{'a' * 48}--bc", ""),
    ],
)
def test_a_service_s_name_begins_with_a_letter_and_has_no_dots(
    release: str, full_name: str
) -> None:
    values = ("--set", "crds.enabled=false", "--set-string", f"fullnameOverride={full_name}")
    done = helm("template", release, str(CHART), *REGISTRY, *values)
    documents = parsed(done.stdout)
    for kind in ("Service", "Deployment"):
        name = only(documents, kind)["metadata"]["name"]
        assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)


def test_helms_test_runs_where_the_operator_may() -> None:
    documents = rendered("nodeSelector.pool=system", "tolerations[0].operator=Exists")
    tester = only(documents, "Pod")["spec"]
    operator = only(documents, "Deployment")["spec"]["template"]["spec"]
    assert tester["nodeSelector"] == operator["nodeSelector"] == {"pool": "system"}
    assert tester["tolerations"][0] in operator["tolerations"]
