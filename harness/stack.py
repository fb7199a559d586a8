"""The product on a cluster: namespaces, volumes and the Helm release, as a platform team would set
them up.

The demo and the end-to-end tests install the same thing in the same way.
"""

import json
from pathlib import Path
from typing import Any

from .access import Access
from .images.recipes import Image

CHART = Path(__file__).resolve().parents[1] / "charts" / "grpo-operator"
SYSTEM_NAMESPACE = "grpo-system"
RELEASE = "grpo-operator"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def apply(access: Access, *objects: dict[str, Any]) -> None:
    """Applies the objects as an administrator."""
    access.kubectl(
        "apply",
        "--filename",
        "-",
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    )


def create_namespace(access: Access, name: str) -> None:
    """Makes a namespace that only takes pods of the `restricted` pod security standard."""
    apply(
        access,
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}},
    )


def host_volume(
    access: Access, namespace: str, claim: str, folder: Path, size: str = "10Gi"
) -> None:
    """Makes a claim that all nodes share, on a folder of this machine: its nodes are all on it.

    The folder is writable for everyone, since training pods run without privileges under a uid of
    their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{claim}"},
        "spec": shape
        | {
            "capacity": {"storage": size},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": namespace, "name": claim},
        },
    }
    apply(access, volume, volume_claim(namespace, claim, size, shape))


def volume_claim(namespace: str, claim: str, size: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A PersistentVolumeClaim; `shape` holds its access modes and, where not the default, its
    storage class."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": shape | {"resources": {"requests": {"storage": size}}},
    }


def install_operator(access: Access, operator: Image, trainer: Image, *settings: str) -> None:
    """Installs or upgrades the chart and waits until the operator is ready; `settings` are further
    `--set` pairs."""
    create_namespace(access, SYSTEM_NAMESPACE)
    arguments = [part for value in settings for part in ("--set", value)]
    for key, image in (("image", operator), ("trainerImage", trainer)):
        arguments += ["--set", f"{key}.repository={image.repository}"]
        # A tag may have digits only; --set would make a number of it, which the schema refuses.
        arguments += ["--set-string", f"{key}.tag={image.tag}"]
    access.helm(
        *("upgrade", RELEASE, str(CHART), "--install", "--namespace", SYSTEM_NAMESPACE),
        *("--wait", "--timeout", "180s", *arguments),
    )


def configure_operator(access: Access, *settings: str) -> None:
    """Upgrades the installed release with further `--set` pairs, and waits until the operator is
    ready again."""
    arguments = [part for setting in settings for part in ("--set", setting)]
    access.helm(
        *("upgrade", RELEASE, str(CHART), "--namespace", SYSTEM_NAMESPACE, "--reuse-values"),
        *("--wait", "--timeout", "180s", *arguments),
    )
