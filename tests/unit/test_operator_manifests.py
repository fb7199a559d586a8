"""The objects of an attempt: names, labels, the plan's way into the pod, volumes, security,
resources."""

from typing import Any

import pytest

from grpo_api.job import parse_spec
from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_operator.pods.manifests import (
    Attempt,
    attempt_of,
    checkpoint_volume_claim,
    indexed_job,
    training_plan,
)
from grpo_operator.pods.namespace_objects import rendezvous_service
from grpo_operator.records.names import (
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_JOB,
    LABEL_UID,
    MANAGER,
    inheritable_metadata,
)
from tests.unit.operator_world import GPU_PLAN, KEY, PLAN, PODS, SPEC, UID, make_job


def attempt(plan: ExecutionPlan = PLAN, number: int = 3, **spec: Any) -> Attempt:
    return Attempt(key=KEY, uid=UID, spec=parse_spec({**SPEC, **spec}), plan=plan, number=number)


def job(plan: ExecutionPlan = PLAN, **spec: Any) -> Any:
    return indexed_job(attempt(plan, **spec), PODS)


def pod(plan: ExecutionPlan = PLAN, **spec: Any) -> Any:
    return job(plan, **spec)["spec"]["template"]["spec"]


def container(plan: ExecutionPlan = PLAN, **spec: Any) -> Any:
    return pod(plan, **spec)["containers"][0]


def mounts(**spec: Any) -> dict[str, tuple[str, bool]]:
    """Path → volume and whether it is read-only."""
    found = container(**spec)["volumeMounts"]
    return {mount["mountPath"]: (mount["name"], mount.get("readOnly", False)) for mount in found}


def test_the_job_is_an_indexed_gang_without_retries() -> None:
    body = job()
    spec = body["spec"]
    assert body["metadata"]["name"] == "run-3"
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 0
    assert (
        not {"suspend", "podFailurePolicy", "podReplacementPolicy", "activeDeadlineSeconds"}
        & spec.keys()
    )


def test_children_carry_whose_they_are() -> None:
    body = job()
    for labels in (body["metadata"]["labels"], body["spec"]["template"]["metadata"]["labels"]):
        assert (labels[LABEL_JOB], labels[LABEL_UID], labels[LABEL_ATTEMPT]) == ("run", UID, "3")
        assert labels["app.kubernetes.io/managed-by"] == MANAGER
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (UID, True, True)


def test_a_users_labels_and_annotations_reach_the_pods_beside_ours() -> None:
    body = job(podTemplate={"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}})
    template = body["spec"]["template"]["metadata"]
    assert (template["labels"]["app.kubernetes.io/managed-by"], template["labels"]["team"]) == (
        MANAGER,
        "a",
    )
    assert template["annotations"].keys() == {"note", "grpo.dev/plan"}


def test_no_annotation_lifts_a_pod_above_the_restricted_standard() -> None:
    profile = "container.apparmor.security.beta.kubernetes.io/trainer"
    body = job(podTemplate={"metadata": {"annotations": {profile: "unconfined"}}})
    assert body["spec"]["template"]["metadata"]["annotations"].keys() == {"grpo.dev/plan"}


def test_metadata_of_the_grpojob_reaches_its_job_and_pods() -> None:
    given = {"team": "a", "app.kubernetes.io/managed-by": "Helm"}
    found = make_job(labels=given, annotations={"example.com/cost": "42", "note": "job"})
    spec = parse_spec({**SPEC, "podTemplate": {"metadata": {"annotations": {"note": "pod"}}}})
    body = indexed_job(attempt_of(found, spec, PLAN, 1), PODS)
    for metadata in (body["metadata"], body["spec"]["template"]["metadata"]):
        assert (metadata["labels"]["team"], metadata["labels"]["app.kubernetes.io/managed-by"]) == (
            "a",
            MANAGER,
        )
        assert metadata["annotations"]["example.com/cost"] == "42"
    assert body["metadata"]["annotations"]["note"] == "job"
    assert body["spec"]["template"]["metadata"]["annotations"]["note"] == "pod", "podTemplate wins"


def test_metadata_that_means_something_else_on_a_child_stays_on_the_grpojob() -> None:
    kept = {"example.com/a": "1", "mygrpo.dev/b": "2", "x-k8s.io/priority-class": "high"}
    dropped = ("kubectl.kubernetes.io/last-applied-configuration", "grpo.dev/attempt",
    "kueue.x-k8s.io/queue-name",
               "kueue.x-k8s.io/priority-class", "kueue.x-k8s.io/prebuilt-workload-name",
               "container.apparmor.security.beta.kubernetes.io/trainer",
               "batch.kubernetes.io/job-name", "job-name",
               "controller-uid")  # fmt: skip
    assert inheritable_metadata(kept | dict.fromkeys(dropped, "x")) == kept
    assert inheritable_metadata(None) == {}


def test_the_plan_reaches_the_pod_as_a_file_and_reads_back_the_same() -> None:
    body = job()
    text = body["spec"]["template"]["metadata"]["annotations"]["grpo.dev/plan"]
    assert TrainingPlan.model_validate_json(text) == training_plan(attempt())
    volume = next(one for one in pod()["volumes"] if one["name"] == "plan")
    item = volume["downwardAPI"]["items"][0]
    assert (item["path"], item["fieldRef"]["fieldPath"]) == (
        "plan.json",
        "metadata.annotations['grpo.dev/plan']",
    )
    assert mounts()["/etc/grpo"] == ("plan", True)
    assert {"name": "GRPO_PLAN", "value": "/etc/grpo/plan.json"} in container()["env"]


def test_rank_0_has_its_name_under_the_namespaces_service() -> None:
    plan = training_plan(attempt())
    assert plan.rendezvous.address == "run-3-0.grpo-rendezvous.team-a.svc"
    assert pod()["subdomain"] == "grpo-rendezvous"
    service = rendezvous_service("team-a")
    assert service["metadata"]["name"] == "grpo-rendezvous"
    labels = job()["spec"]["template"]["metadata"]["labels"] | {
        "batch.kubernetes.io/job-completion-index": "0"
    }
    assert service["spec"]["selector"].items() <= labels.items()


def test_a_job_made_again_has_a_checkpoint_folder_of_its_own() -> None:
    lasting = {"volume": {"claimName": "shared", "subPath": "runs"}}
    assert (
        training_plan(attempt(checkpoint=lasting)).checkpoint_directory == f"/checkpoints/run-{UID}"
    )
    assert training_plan(attempt()).checkpoint_directory is None


def test_the_pod_passes_the_restricted_standard_and_has_no_credentials() -> None:
    spec = pod()
    assert spec["automountServiceAccountToken"] is False
    security = spec["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["seccompProfile"]) == (
        True,
        1000,
        {"type": "RuntimeDefault"},
    )
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["restartPolicy"] == "Never"


def test_scratch_and_shared_memory_are_writable() -> None:
    found = mounts()
    assert (found["/tmp"], found["/dev/shm"]) == (("scratch", False), ("shared-memory", False))
    volume = next(
        one for one in pod(sharedMemory="8Gi")["volumes"] if one["name"] == "shared-memory"
    )
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    values = {variable["name"]: variable.get("value") for variable in container()["env"]}
    assert (values["HOME"], values["HF_HOME"]) == ("/tmp", "/tmp/huggingface")


def test_every_volume_of_the_spec_is_mounted_where_the_trainer_looks() -> None:
    spec: dict[str, Any] = {
        "model": {
            "name": "/models/tiny",
            "parameters": "77K",
            "volume": {"claimName": "models", "subPath": "tiny"},
        },
        "dataset": {"files": {"volume": {"claimName": "data"}, "paths": ["train.jsonl"]}},
        "checkpoint": {"volume": {"claimName": "checkpoints"}},
        "rewards": [
            {"python": {"function": "rewards:score", "configMap": {"name": "code"}}},
            {
                "model": {
                    "name": "/rewards/1",
                    "parameters": "1B",
                    "volume": {"claimName": "reward-model"},
                }
            },
        ],
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}]
            }
        },
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    found = mounts(**spec)
    assert found["/models"] == ("model", True)
    assert found["/data"] == ("data", True)
    assert found["/checkpoints"] == ("checkpoints", False)
    assert found["/rewards/0"] == ("reward-0", True)
    assert found["/rewards/1"] == ("reward-1", True)
    assert found["/cache"] == ("cache", False)
    assert {volume["name"] for volume in pod(**spec)["volumes"]} >= {
        name for name, _ in found.values()
    }
    model = next(mount for mount in container(**spec)["volumeMounts"] if mount["name"] == "model")
    assert model["subPath"] == "tiny"


def test_data_may_come_from_a_config_map() -> None:
    spec: dict[str, Any] = {
        "dataset": {"files": {"configMap": {"name": "rows"}, "paths": ["train.csv"]}}
    }
    assert mounts(**spec)["/data"] == ("data", True)
    volume = next(one for one in pod(**spec)["volumes"] if one["name"] == "data")
    assert volume["configMap"] == {"name": "rows"}


def test_tokens_come_from_secrets_and_the_users_variables_win() -> None:
    spec: dict[str, Any] = {
        "model": {
            "name": "org/model",
            "parameters": "1B",
            "tokenSecretRef": {"name": "hub", "key": "token"},
        },
        "dataset": {"name": "org/data", "tokenSecretRef": {"name": "hub", "key": "data"}},
        "rewards": [
            {"http": {"url": "http://judge", "tokenSecretRef": {"name": "judge", "key": "token"}}}
        ],
        "export": {
            "to": "Hub",
            "hub": {"repository": "org/out", "tokenSecretRef": {"name": "hub", "key": "push"}},
        },
        "env": [
            {"name": "HOME", "value": "/home"},
            {
                "name": "KEY",
                "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}},
            },
            {"name": "E"},
        ],
        "envFrom": [{"prefix": "NCCL_", "configMapRef": {"name": "nccl"}}],
    }
    env = {variable["name"]: variable for variable in container(**spec)["env"]}
    for variable, key in (
        ("HF_TOKEN", "token"),
        ("GRPO_DATASET_TOKEN", "data"),
        ("GRPO_EXPORT_TOKEN", "push"),
    ):
        assert env[variable]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": key}
    assert env["GRPO_REWARD_TOKEN_0"]["valueFrom"]["secretKeyRef"] == {
        "name": "judge",
        "key": "token",
    }
    assert env["HOME"]["value"] == "/home"
    assert env["KEY"]["valueFrom"]["secretKeyRef"] == {"name": "s", "key": "k", "optional": True}
    assert env["E"] == {"name": "E"}
    assert container(**spec)["envFrom"] == [{"prefix": "NCCL_", "configMapRef": {"name": "nccl"}}]
    assert len(env) == len(container(**spec)["env"]), "each name once"


def test_each_pod_of_a_gang_gets_a_node_of_its_own() -> None:
    (term,) = pod()["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"] == {
        "matchLabels": {LABEL_UID: UID, LABEL_ATTEMPT: "3", LABEL_COMPONENT: "trainer"}
    }
    assert "affinity" not in pod(PLAN.model_copy(update={"nodes": 1}))


def test_a_users_affinity_is_kept_beside_ours() -> None:
    theirs = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "noisy"}}}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = {
        "nodeAffinity": {required: {"nodeSelectorTerms": [{}]}},
        "podAntiAffinity": {required: [theirs]},
    }
    found = pod(podTemplate={"spec": {"affinity": affinity}})["affinity"]
    assert found["nodeAffinity"] == affinity["nodeAffinity"]
    assert found["podAntiAffinity"][required][0] == theirs
    assert found["podAntiAffinity"][required][1]["topologyKey"] == "kubernetes.io/hostname"
    alone = pod(PLAN.model_copy(update={"nodes": 1}), podTemplate={"spec": {"affinity": affinity}})
    assert alone["affinity"] == affinity


def test_init_containers_get_the_trainers_rights_and_image_where_they_name_none() -> None:
    one: dict[str, Any] = {"name": "fetch", "image": "fetch:1", "resources": {"limits": {"cpu": 1}}}
    rights = {
        "runAsUser": 65532,
        "readOnlyRootFilesystem": False,
        "capabilities": {"add": ["NET_BIND_SERVICE"]},
    }
    containers = [one, {"name": "beside", "restartPolicy": "Always", "securityContext": rights}]
    fetch, beside = pod(podTemplate={"spec": {"initContainers": containers}})["initContainers"]
    assert fetch["securityContext"] == container()["securityContext"]
    assert [fetch["image"], beside["image"]] == ["fetch:1", container()["image"]]
    assert fetch["resources"] == {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}
    assert beside["restartPolicy"] == "Always"
    assert beside["securityContext"] == {
        "runAsUser": 65532,
        "readOnlyRootFilesystem": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
    }


def test_gpus_are_requested_by_the_plans_resource_and_their_taints_tolerated() -> None:
    plan = GPU_PLAN.model_copy(update={"gpu_resource": "amd.com/gpu"})
    resources = container(plan, placement={"accelerator": "GPU"})["resources"]
    assert resources["limits"] == {"amd.com/gpu": "4"}
    assert resources["requests"] == {"amd.com/gpu": "4", "cpu": "1000m", "memory": str(2**30)}
    spec = pod(
        plan,
        placement={
            "nodeSelector": {"zone": "b"},
            "tolerations": [{"key": "team", "operator": "Exists"}],
        },
    )
    assert [one["key"] for one in spec["tolerations"]] == ["team", "nvidia.com/gpu", "amd.com/gpu"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "zone": "b"}


def test_a_limit_alone_is_also_the_request() -> None:
    declared = {"requests": {"cpu": 2}, "limits": {"memory": "3Gi", "rdma/hca": 1}}
    assert container(resources=declared)["resources"] == {
        "requests": {"cpu": "2", "memory": "3Gi", "rdma/hca": "1"},
        "limits": {"memory": "3Gi", "rdma/hca": "1"},
    }
    assert container()["resources"] == {"requests": {"cpu": "1"}}
    assert pod()["tolerations"] == []


def test_extra_resources_stand_beside_gpus() -> None:
    resources = container(
        GPU_PLAN, placement={"accelerator": "GPU"}, resources={"limits": {"rdma/hca": 1}}
    )["resources"]
    assert resources["limits"] == {"rdma/hca": "1", "nvidia.com/gpu": "4"}
    assert resources["requests"].keys() == {"cpu", "memory", "rdma/hca", "nvidia.com/gpu"}


def test_the_trainer_is_told_which_resources_are_network_cards() -> None:
    limits = {"rdma/hca": 1, "nvidia.com/hostdev": 2, "cpu": 4, "hugepages-2Mi": "64Mi"}
    resources = {"limits": limits, "requests": {"nvidia.com/hostdev": 2, "cpu": 2}}
    told = training_plan(attempt(resources=resources))
    assert told.rdma_devices == ["nvidia.com/hostdev", "rdma/hca"]
    assert training_plan(attempt()).rdma_devices is None


def test_settings_of_the_pod() -> None:
    settings = {
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "terminationGracePeriodSeconds": 7,
    }
    spec = pod(
        podTemplate={"spec": settings},
        placement={"accelerator": "CPU", "priorityClassName": "high"},
    )
    assert (spec["serviceAccountName"], spec["runtimeClassName"]) == ("trainer", "nvidia")
    assert (spec["imagePullSecrets"], spec["schedulerName"]) == ([{"name": "registry"}], "volcano")
    assert (spec["terminationGracePeriodSeconds"], spec["priorityClassName"]) == (7, "high")
    assert spec["dnsConfig"] == {"options": [{"name": "ndots", "value": "2"}]}
    assert training_plan(attempt(podTemplate={"spec": settings})).grace_period_seconds == 7


@pytest.mark.parametrize("retain", [True, False])
def test_a_claim_from_the_template_is_owned_only_when_it_may_go(retain: bool) -> None:
    template = {
        "size": "10Gi",
        "retain": retain,
        "storageClassName": "fast",
        "accessMode": "ReadWriteOnce",
    }
    spec: Any = {
        "checkpoint": {"volumeClaimTemplate": template},
        "placement": {"accelerator": "CPU"},
    }
    claim = checkpoint_volume_claim(KEY, UID, attempt(**spec).spec)
    assert claim is not None
    assert ("ownerReferences" in claim["metadata"]) is not retain
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }
    assert mounts(**spec)["/checkpoints"] == ("checkpoints", False)
