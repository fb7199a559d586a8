"""The volumes of a gang's pods and where the training container finds them.

Apart from the rest of the pod because they are the half of it that a spec decides. Pure: the same
spec, the same pod.
"""

from pathlib import PurePath
from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.pods.platform import VOLUME_PREFIX, PlatformSpec
from grpo_api.status.status import ResumeSource
from grpo_api.text.contract import (
    CACHE_MOUNT,
    CACHE_VOLUME,
    CHECKPOINT_MOUNT,
    CHECKPOINT_VOLUME,
    DATA_MOUNT,
    DATA_VOLUME,
    MODEL_MOUNT,
    MODEL_VOLUME,
    PLAN_ANNOTATION,
    PLAN_PATH,
    PLAN_VOLUME,
    RESUME_MOUNT,
    RESUME_VOLUME,
    REWARD_VOLUME_PREFIX,
    SCRATCH,
    SCRATCH_VOLUME,
    SHARED_MEMORY_VOLUME,
    SIGNING_KEY,
    SIGNING_VOLUME,
    reward_mount,
)
from grpo_api.text.names import ConfigMapFiles, ImageVolume, SecretKeySelector, VolumeClaim

from ..records.names import checkpoint_volume

Manifest = dict[str, Any]
_FOLDER, _, _FILE = PLAN_PATH.rpartition("/")


def pod_volumes(
    name: str, spec: GRPOJobSpec, source: ResumeSource | None
) -> tuple[list[Manifest], list[Manifest]]:
    """The pod's volumes and the container's mounts of them."""
    shared: Manifest = {"medium": "Memory"}
    if spec.shared_memory:
        shared["sizeLimit"] = spec.shared_memory
    annotation = f"metadata.annotations['{PLAN_ANNOTATION}']"
    plan_file = {"path": _FILE, "fieldRef": {"fieldPath": annotation}}
    volumes: list[Manifest] = [
        {"name": PLAN_VOLUME, "downwardAPI": {"items": [plan_file]}},
        {"name": SCRATCH_VOLUME, "emptyDir": {}},
        {"name": SHARED_MEMORY_VOLUME, "emptyDir": shared},
    ]
    mounts: list[Manifest] = [
        {"name": PLAN_VOLUME, "mountPath": _FOLDER, "readOnly": True},
        {"name": SCRATCH_VOLUME, "mountPath": SCRATCH},
        {"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"},
    ]
    for volume, mount in _spec_volumes(name, spec, source):
        volumes.append(volume)
        mounts.append(mount)
    return volumes, mounts


def platform_volumes(platform: PlatformSpec) -> tuple[list[Manifest], list[Manifest]]:
    """The volumes that a class gives the pod, and the container's mounts of them."""
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    for volume in platform.volumes:
        name = f"{VOLUME_PREFIX}{volume.name}"
        if volume.host_path:
            # a node without the folder would get an empty one, and the plugin would be missing
            source: Manifest = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
        else:
            source = {"configMap": {"name": volume.config_map}}
        mount: Manifest = {"name": name, "mountPath": volume.mount_path}
        mount["readOnly"] = volume.read_only is not False
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        volumes.append({"name": name, **source})
        mounts.append(mount)
    return volumes, mounts


def claims_of_pod(pod: Manifest) -> list[str]:
    """The names of the claims that a pod with this spec mounts."""
    sources = (volume.get("persistentVolumeClaim") for volume in pod.get("volumes") or ())
    return [source["claimName"] for source in sources if source]


def _spec_volumes(
    name: str, spec: GRPOJobSpec, source: ResumeSource | None
) -> list[tuple[Manifest, Manifest]]:
    checkpoint_claim = checkpoint_volume(name, spec.checkpoint)
    optional = [
        _claim(MODEL_VOLUME, spec.model.volume, MODEL_MOUNT),
        _image(MODEL_VOLUME, spec.model.image, MODEL_MOUNT),
        _claim(CACHE_VOLUME, spec.model.cache, CACHE_MOUNT, read_only=False),
    ]
    files = spec.dataset.files
    if files:
        optional.append(_claim(DATA_VOLUME, files.volume, DATA_MOUNT))
        optional.append(_files(DATA_VOLUME, files.config_map, DATA_MOUNT))
    optional.append(_claim(CHECKPOINT_VOLUME, checkpoint_claim, CHECKPOINT_MOUNT, read_only=False))
    if source and source.claim_name:
        # also where it is the job's own claim: nothing may be written into another's folder
        resume_claim = VolumeClaim(claim_name=source.claim_name, sub_path=source.sub_path)
        optional.append(_claim(RESUME_VOLUME, resume_claim, RESUME_MOUNT))
    if spec.export and spec.export.signing_key_secret_ref:
        optional.append(_signing_key(spec.export.signing_key_secret_ref))
    for position, reward in enumerate(spec.rewards):
        volume = f"{REWARD_VOLUME_PREFIX}{position}"
        path = reward_mount(position)
        if reward.model:
            optional.append(_claim(volume, reward.model.volume, path))
            optional.append(_image(volume, reward.model.image, path))
        if reward.python:
            optional.append(_files(volume, reward.python.config_map, path))
    return [volume_and_mount for volume_and_mount in optional if volume_and_mount]


def _claim(
    name: str, claim: VolumeClaim | None, path: str, read_only: bool = True
) -> tuple[Manifest, Manifest] | None:
    """A claim and its mount. The volume stays writable: one mounted twice must agree on that."""
    if claim is None:
        return None
    mount: Manifest = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    if claim.sub_path:
        mount["subPath"] = claim.sub_path
    volume = {"name": name, "persistentVolumeClaim": {"claimName": claim.claim_name}}
    return volume, mount


def _image(name: str, image: ImageVolume | None, path: str) -> tuple[Manifest, Manifest] | None:
    if image is None:
        return None
    source = image.model_dump(mode="json", by_alias=True, exclude_none=True)
    mount = {"name": name, "mountPath": path, "readOnly": True}
    return {"name": name, "image": source}, mount


def _files(name: str, files: ConfigMapFiles | None, path: str) -> tuple[Manifest, Manifest] | None:
    if files is None:
        return None
    volume = {"name": name, "configMap": {"name": files.name}}
    mount = {"name": name, "mountPath": path, "readOnly": True}
    return volume, mount


def _signing_key(secret: SecretKeySelector) -> tuple[Manifest, Manifest]:
    """A file and no variable: variables are inherited by every program that a user's reward starts.

    As a subPath the file stays what it was when the container started, and was found to be a key.
    """
    name = PurePath(SIGNING_KEY).name
    source = {
        "secretName": secret.name,
        "items": [{"key": secret.key, "path": name}],
        "defaultMode": 0o440,
    }
    if secret.optional is not None:
        source["optional"] = secret.optional
    mount = {"name": SIGNING_VOLUME, "mountPath": SIGNING_KEY, "subPath": name, "readOnly": True}
    return {"name": SIGNING_VOLUME, "secret": source}, mount
