"""The short-lived Job through which `grpo export` reads a job's volume or store: its training pod, less the training.

The same image, user, claim, credentials and node selection: what could write the model can read it. Nothing of it
stays: its pod ends when nobody asks for anything, the Job is deleted at the end, and by its TTL if the laptop was gone
before.
"""

from typing import Any

from grpo_api.text.contract import (
    API_VERSION,
    CACHE_VOLUME,
    CHECKPOINT_STORE_ENV,
    CHECKPOINT_VOLUME,
    CONTAINER,
    GROUP,
    KIND,
    MODEL_VOLUME,
    PLAN_VOLUME,
    SCRATCH_VOLUME,
)
from grpo_api.text.quantity import GIB, parameter_count
from grpo_operator.pods.manifests import Attempt, indexed_job
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.names import LABEL_APP, LABEL_COMPONENT, LABEL_INSTANCE

Manifest = dict[str, Any]
DELIVERY = ("python", "-m", "grpo_trainer.delivery")
LIFETIME_SECONDS = 86400
"""Longest life of the pod; a download that takes longer goes on through another one."""
TTL_SECONDS = 60
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_KEPT = (
    *("securityContext", "tolerations", "serviceAccountName", "imagePullSecrets", "runtimeClassName"),
    *("dnsPolicy", "dnsConfig"),
)
_READS: Manifest = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "1", "memory": "512Mi"},
}


def export_job(attempt: Attempt, pods: PodDefaults, *, merge: bool = False, dtype: str | None = None) -> Manifest:
    """The batch/v1 Job that hands out what this job has exported, as it is or converted."""
    template = indexed_job(attempt, pods)["spec"]["template"]
    name = attempt.key.name
    own = {LABEL_APP: "grpo-export", LABEL_INSTANCE: name, LABEL_COMPONENT: "export"}
    labels = {key: value for key, value in template["metadata"]["labels"].items() if _is_given(key)} | own
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": attempt.uid}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": f"{name}-export-", "labels": own, "ownerReferences": [owner]},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": LIFETIME_SECONDS,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": {
                "metadata": {"labels": labels, "annotations": template["metadata"]["annotations"]},
                "spec": _pod(template["spec"], attempt, merge, dtype),
            },
        },
    }


def _is_given(label: str) -> bool:
    """True if a label of a training pod is a user's: by ours it would pass for one."""
    return not label.startswith((f"{GROUP}/", "app.kubernetes.io/"))


def _pod(training: Manifest, attempt: Attempt, merge: bool, dtype: str | None) -> Manifest:
    """Return the spec of the export's pod, made of the training pod's spec."""
    volumes = {PLAN_VOLUME, SCRATCH_VOLUME, CHECKPOINT_VOLUME}
    if merge:
        volumes |= {MODEL_VOLUME, CACHE_VOLUME}
    (trainer,) = (one for one in training["containers"] if one["name"] == CONTAINER)
    converts = merge or dtype is not None
    container: Manifest = {
        "name": "export",
        "image": trainer["image"],
        "imagePullPolicy": trainer["imagePullPolicy"],
        "command": _delivery_command(merge, dtype),
        "env": [variable for variable in trainer["env"] if _is_needed_variable(variable, merge)],
        "resources": _converts(attempt, dtype) if converts else _READS,
        "securityContext": trainer["securityContext"],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_mount(one) for one in trainer["volumeMounts"] if one["name"] in volumes],
    }
    sources = trainer.get("envFrom", ())
    if not merge:
        sources = [source for source in sources if source.get("prefix") == CHECKPOINT_STORE_ENV]
    if sources:
        container["envFrom"] = list(sources)
    pod: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [one for one in training["volumes"] if one["name"] in volumes],
        **{field: training[field] for field in _KEPT if field in training},
    }
    selector = attempt.spec.placement.node_selector
    return {**pod, "nodeSelector": dict(selector)} if selector else pod


def _delivery_command(merge: bool, dtype: str | None) -> list[str]:
    command = [*DELIVERY, "serve"]
    if merge:
        command.append("--merge")
    if dtype:
        command += ["--dtype", dtype]
    return command


def _is_needed_variable(variable: Manifest, merge: bool) -> bool:
    """True for plain values, and for a merge the hub's token: it fetches the base model. Other secrets stay out."""
    if "value" in variable:
        return True
    name: str = variable["name"]
    return merge and name == "HF_TOKEN"


def _mount(mount: Manifest) -> Manifest:
    """Nothing is written but into the pod's own scratch folder, and by a merge into the hub's cache."""
    return mount if mount["name"] in (SCRATCH_VOLUME, CACHE_VOLUME) else {**mount, "readOnly": True}


def _converts(attempt: Attempt, dtype: str | None) -> Manifest:
    """What a conversion needs: the whole model in memory, once more while it is written, and on the node's disk.

    Requests without limits, as of a training pod whose memory is predicted: they may be low.
    """
    parameters = attempt.plan.parameters or attempt.spec.model.parameters
    model = 0
    if parameters:
        model = parameter_count(parameters) * DTYPE_BYTES[dtype or attempt.plan.dtype]
    copies = 2 if attempt.spec.checkpoint.store else 1  # what is on a store is brought before it is converted
    memory, disk = 2 * model + 2 * GIB, copies * model + GIB
    return {"requests": {"cpu": "1", "memory": str(memory), "ephemeral-storage": str(disk)}}
