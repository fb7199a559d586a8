"""Puts the demo's model and problems on the job's volume, by a Job in the cluster that runs grpo_trainer.quickstart.

The volume is the cluster's: only a pod can write to it everywhere.
"""

from typing import Any

from harness.access import Access
from harness.stack import apply

NAME = "prepare-first-job"
PROBLEMS = 2048
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def pod(image: str, claim: str) -> dict[str, Any]:
    """The pod that writes to the claim, as a user without privileges."""
    mounts: dict[str, dict[str, Any]] = {
        "/out": {"persistentVolumeClaim": {"claimName": claim}},
        "/tmp": {"emptyDir": {}},
    }
    names = {path: path.strip("/") for path in mounts}
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "prepare",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["python", "-m", "grpo_trainer.quickstart", "/out", "--problems", str(PROBLEMS)],
                "env": [{"name": "HOME", "value": "/tmp"}],
                "securityContext": RESTRICTED,
                "volumeMounts": [{"name": name, "mountPath": path} for path, name in names.items()],
            }
        ],
        "volumes": [{"name": names[path], **source} for path, source in mounts.items()],
    }


def prepare(access: Access, namespace: str, image: str, claim: str) -> None:
    """Runs the Job to its end.

    Raises:
        CommandError: it did not complete within five minutes.
    """
    place = {"name": NAME, "namespace": namespace}
    access.kubectl("delete", "job", NAME, "--namespace", namespace, "--ignore-not-found")
    apply(
        access,
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": place,
            "spec": {"backoffLimit": 1, "template": {"spec": pod(image, claim)}},
        },
    )
    access.kubectl(
        *("wait", "--for=condition=Complete", f"job/{NAME}", "--namespace", namespace, "--timeout", "300s"),
    )
