"""What a pod writes to its node's disk, and what it therefore requests of the node's ephemeral storage.

A pod that requests nothing is put where there is no room for what it fetches, and is the first to be evicted there.
Only /tmp counts: claims, image volumes and /dev/shm are no ephemeral storage. Where the sizes come from is in
docs/model-cache.md.
"""

from collections.abc import Sequence
from functools import lru_cache

from grpo_api.job import GRPOJobSpec
from grpo_api.model import ModelSpec
from grpo_api.pods.resources import EPHEMERAL_STORAGE
from grpo_api.quantity import GIB, MIB, quantity_bytes
from grpo_api.rewards import ModelReward

from ..model.architecture import by_name_and_size, resolve
from ..result import SpecRejected
from ..words import gib
from .device import whole_mib

WIDE, NARROW = 4, 2
"""Bytes of a parameter as hubs store it: models below SMALL are often float32, larger ones bfloat16 (assumed)."""
SMALL = 1_000_000_000
"""Parameters from which on they are."""
WORKING = 256 * MIB
"""Logs, which the kubelet rotates at 50 MiB, and compiled kernels (assumed; a rank on CPUs writes 0.1 MB, measured)."""
DATASET = 2 * GIB
"""A dataset of the hub, whose size nobody says: its files, and its rows twice while they are converted (assumed)."""
_OWN_PLACE = frozenset({"HF_HOME", "HF_HUB_CACHE"})
"""Variables by which a user keeps what is fetched somewhere else."""


def scratch_bytes(spec: GRPOJobSpec, policy: int = 0) -> int:
    """Bytes that one pod writes to /tmp at most.

    Args:
        spec: the job.
        policy: parameters of its model, for a spec that doesn't tell; 0 where nobody knows.
    """
    if spec.model.cache or any(variable.name in _OWN_PLACE for variable in spec.env):
        return WORKING
    judges = tuple(reward.model for reward in spec.rewards if reward.model)
    return WORKING + (DATASET if spec.dataset.name else 0) + _weights(spec.model, judges, policy)


@lru_cache(maxsize=4096)
def _weights(model: ModelSpec, judges: Sequence[ModelReward], policy: int) -> int:
    """Bytes of what is fetched of the hub, as far as sizes are known; a folder is there already."""
    found = 0 if model.name.startswith("/") else _stored(_policy(model) or policy)
    return found + sum(_stored(_judge(judge)) for judge in judges if not judge.name.startswith("/"))


def _stored(parameters: int) -> int:
    return parameters * (WIDE if parameters < SMALL else NARROW)


def _policy(model: ModelSpec) -> int:
    try:
        return resolve(model).shape.parameters
    except SpecRejected:
        return 0


def _judge(judge: ModelReward) -> int:
    try:
        return by_name_and_size(judge.name, judge.parameters, "").shape.parameters
    except SpecRejected:
        return 0


def disk_request(spec: GRPOJobSpec, *, reported: bool, policy: int = 0) -> int:
    """Bytes of ephemeral storage that one pod requests; 0 for no request. The spec's own request wins.

    Args:
        spec: the job.
        reported: whether its nodes say how much they have. One that doesn't, as some rootless ones, takes no pod that
            asks.
        policy: as of scratch_bytes.
    """
    asked = spec.resources.requested.get(EPHEMERAL_STORAGE)
    if asked is not None:
        return quantity_bytes(asked)
    place = spec.placement
    # an autoscaler may not know what new nodes will have, and Kueue admits nobody who asks for what no queue lists
    counted = place.provisioning == "WhenFree" and place.queue_name is None
    return whole_mib(scratch_bytes(spec, policy)) if reported and counted else 0


def disk_note(spec: GRPOJobSpec, policy: int = 0) -> str:
    """The sentence to a user who asks for less than the pods will write; empty to others."""
    asked, needed = spec.resources.requested.get(EPHEMERAL_STORAGE), scratch_bytes(spec, policy)
    if asked is None or quantity_bytes(asked) >= needed:
        return ""
    limit = spec.resources.limits.get(EPHEMERAL_STORAGE)
    fate = "may be" if limit is None or quantity_bytes(limit) >= needed else "will be"
    return (
        f"spec.resources lets a pod have {asked} of {EPHEMERAL_STORAGE}, and it is expected to write {gib(needed)} to "
        f"/tmp: it {fate} evicted; raise that, or give spec.model.cache a claim"
    )
