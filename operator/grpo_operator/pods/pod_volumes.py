"""The volumes of a gang's pods and where the training container finds them.

Apart from the rest of the pod because they are the half of it that a spec decides. Pure: the same
spec, the same pod.
"""

from pathlib import PurePath
from typing import Any

from grpo_api.job import GRPOJobSpec
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
    plan = {
        "items": [
            {"path": _FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{PLAN_ANNOTATION}']"}}
        ]
    }
    volumes: list[Manifest] = [
        {"name": PLAN_VOLUME, "downwardAPI": plan},
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


def _spec_volumes(
    name: str, spec: GRPOJobSpec, source: ResumeSource | None
) -> list[tuple[Manifest, Manifest]]:
    found = [
        _claim(MODEL_VOLUME, spec.model.volume, MODEL_MOUNT),
        _image(MODEL_VOLUME, spec.model.image, MODEL_MOUNT),
    ]
    found += [_claim(CACHE_VOLUME, spec.model.cache, CACHE_MOUNT, read_only=False)]
    if spec.dataset.files:
        found += [_claim(DATA_VOLUME, spec.dataset.files.volume, DATA_MOUNT)]
        found += [_files(DATA_VOLUME, spec.dataset.files.config_map, DATA_MOUNT)]
    found += [
        _claim(
            CHECKPOINT_VOLUME,
            checkpoint_volume(name, spec.checkpoint),
            CHECKPOINT_MOUNT,
            read_only=False,
        )
    ]
    if source and source.claim_name:
        # also where it is the job's own claim: nothing may be written into another's folder
        theirs = VolumeClaim(claim_name=source.claim_name, sub_path=source.sub_path)
        found += [_claim(RESUME_VOLUME, theirs, RESUME_MOUNT)]
    if spec.export and spec.export.signing_key_secret_ref:
        found.append(_signing_key(spec.export.signing_key_secret_ref))
    for position, reward in enumerate(spec.rewards):
        volume, path = f"{REWARD_VOLUME_PREFIX}{position}", reward_mount(position)
        if reward.model:
            found += [
                _claim(volume, reward.model.volume, path),
                _image(volume, reward.model.image, path),
            ]
        found += [_files(volume, reward.python.config_map if reward.python else None, path)]
    return [pair for pair in found if pair]


def _claim(
    name: str, claim: VolumeClaim | None, path: str, read_only: bool = True
) -> tuple[Manifest, Manifest] | None:
    """A claim and its mount. The volume itself stays writable: a claim mounted twice must agree on
    that."""
    if claim is None:
        return None
    mount: Manifest = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    if claim.sub_path:
        mount["subPath"] = claim.sub_path
    return {"name": name, "persistentVolumeClaim": {"claimName": claim.claim_name}}, mount


def _image(name: str, image: ImageVolume | None, path: str) -> tuple[Manifest, Manifest] | None:
    if image is None:
        return None
    source = image.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"name": name, "image": source}, {"name": name, "mountPath": path, "readOnly": True}


def _files(name: str, files: ConfigMapFiles | None, path: str) -> tuple[Manifest, Manifest] | None:
    if files is None:
        return None
    return {"name": name, "configMap": {"name": files.name}}, {
        "name": name,
        "mountPath": path,
        "readOnly": True,
    }


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
