"""The default storage class of the node level: Rancher's local path provisioner, as k3s and kind
have it.

It runs beside the control plane and makes each volume as a folder on the node of the claim's first
pod, by a helper pod there; a deleted claim's folder goes the same way. Volumes are ReadWriteOnce,
and no size is enforced.
"""

import json
from typing import Any

from ..controlplane import ControlPlane
from ..programs.build import toolchain
from ..programs.processes import Processes, flags
from .files import PAUSE

HELPER = "folder"
"""The program in the sandbox image that makes and removes folders."""
ROLE = "local-path-provisioner"
CLASS = "local-path"
NAMESPACE = "local-path-storage"
PROVISIONER = "rancher.io/local-path"
FOLDER = "/var/lib/local-path"
"""Where volumes lie on a node: in an overlay that goes with the cluster."""


def start(processes: Processes, plane: ControlPlane) -> None:
    """Make the class and start its provisioner."""
    client = plane.client()
    client.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    account = {
        "metadata": {"name": ROLE}
    }  # the helper pods'; made here, for the controllers' default one may be late
    client.request("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)
    client.request("POST", "/apis/storage.k8s.io/v1/storageclasses", _storage_class())
    config, helper = (processes.directory / f"{ROLE}-{part}.json" for part in ("config", "helper"))
    config.write_text(json.dumps(_config()))
    helper.write_text(json.dumps(_helper_pod()))
    options = {
        "--kubeconfig": plane.admin,
        "--config": config,
        "--helper-pod-file": helper,
        "--helper-image": PAUSE,
        "--namespace": NAMESPACE,
        "--service-account-name": ROLE,
        "--provisioner-name": PROVISIONER,
    }
    processes.start(ROLE, [toolchain((ROLE,)).program(ROLE), "start", *flags(options)])


def _storage_class() -> dict[str, Any]:
    return {
        "metadata": {
            "name": CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def _config() -> dict[str, Any]:
    command = f"/{HELPER}"
    everywhere = {"node": "DEFAULT_PATH_FOR_NON_LISTED_NODES", "paths": [FOLDER]}
    return {"nodePathMap": [everywhere], "setupCommand": command, "teardownCommand": command}


def _helper_pod() -> dict[str, Any]:
    container = {"name": "helper-pod", "image": PAUSE, "imagePullPolicy": "Never"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "helper-pod"},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }
