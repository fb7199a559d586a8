"""What a pod writes to its node's disk, and what it therefore requests of the node's ephemeral
storage.

A pod that requests nothing is put where there is no room for what it fetches, and is the first to
be evicted there. Only /tmp counts: claims, image volumes and /dev/shm are no ephemeral storage.
What is fetched stays there; checkpoints and exports are there on their way to an object store or
the hub. Where the sizes come from is in docs/how-to/models/model-cache.md.
"""

from collections.abc import Sequence
from functools import lru_cache

from grpo_api.job import GRPOJobSpec
from grpo_api.pods.containers import EPHEMERAL_STORAGE
from grpo_api.spec.model import ModelSpec
from grpo_api.spec.rewards import ModelReward
from grpo_api.text.quantity import quantity_bytes
from grpo_api.text.units import GIB, MIB

from ..model.architecture import by_name_and_size, resolve_model
from ..model.shapes import Shape
from ..result.formatting import distinct_gib
from ..result.result import SpecRejected
from .phases import checkpoint_bytes, export_bytes, whole_mib
from .setup import Precision, Setup, ZeroStage

WIDE = 4
NARROW = 2
"""Bytes of a parameter as hubs store it: models below SMALL are often float32, larger ones bfloat16
(assumed)."""
SMALL = 1_000_000_000
"""Parameters from which on they are."""
WORKING = 256 * MIB
"""Logs, which the kubelet rotates at 50 MiB, and compiled kernels (assumed; a rank on CPUs writes
0.1 MB, measured)."""
DATASET = 2 * GIB
"""A dataset of the hub, whose size is unknown: its files, and its rows twice while they are
converted (assumed)."""


def scratch_bytes(spec: GRPOJobSpec, policy: Shape | None = None) -> int:
    """Bytes that one pod writes to /tmp at most; a spec that gives no size needs the policy's."""
    return WORKING + _fetched_bytes(spec, policy) + staged_bytes(spec, policy)


def _fetched_bytes(spec: GRPOJobSpec, policy: Shape | None) -> int:
    # The variables by which a user keeps what is fetched somewhere else.
    variables = {variable.name for variable in spec.env}
    if spec.model.cache or "HF_HOME" in variables:
        return 0
    dataset = DATASET if spec.dataset.name else 0
    if "HF_HUB_CACHE" in variables:
        # The converted rows stay in HF_HOME.
        return dataset
    judges = tuple(reward.model for reward in spec.rewards if reward.model)
    return dataset + _weights(spec.model, judges, policy)


def staged_bytes(spec: GRPOJobSpec, policy: Shape | None = None) -> int:
    """Bytes of checkpoints on their way to an object store, and of an export on its way there or to
    the hub, at most.

    The plan decides what is trained and how it is split, and a node's disk is judged before there
    is one: so it is all parameters unless an adapter is asked for, with ZeRO's float32 copy, and
    the pod of rank 0 writes it all.
    """
    if spec.checkpoint.is_on_volume:
        return 0
    shape = _shape(spec.model) or policy
    if shape is None:
        return 0
    setups = [_setup(spec, 0), _setup(spec, 3)]
    drifts = spec.reference.sync is not None
    export = 0
    if spec.is_model_kept:
        merged = spec.adapter.merge_on_export
        export = max(export_bytes(shape, setup, merged) for setup in setups)
    if spec.checkpoint.store is None:
        return export
    checkpoint = max(checkpoint_bytes(shape, setup, drifts) for setup in setups)
    # The checkpoint that was resumed from is there until the next has been sent.
    return checkpoint + max(checkpoint, export)


def _setup(spec: GRPOJobSpec, zero: ZeroStage) -> Setup:
    """What of the settings decides the size of a checkpoint, with weights as wide as the spec
    allows."""
    precision: Precision = "bfloat16" if spec.training.dtype == "bfloat16" else "float32"
    lora_rank = spec.adapter.rank if spec.is_adapter_requested else 0
    lora_targets = tuple(spec.adapter.target_modules)
    return Setup(
        precision=precision,
        prompt=1,
        completion=1,
        micro_batch=1,
        zero=zero,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
    )


@lru_cache(maxsize=4096)
def _weights(model: ModelSpec, judges: Sequence[ModelReward], policy: Shape | None) -> int:
    """Bytes of what is fetched of the hub, as far as sizes are known; a folder is there already."""
    shape = None
    if not model.name.startswith("/"):
        shape = _shape(model) or policy
    policy_bytes = _stored_bytes(shape.parameters) if shape else 0
    fetched_judges = [judge for judge in judges if not judge.name.startswith("/")]
    judge_bytes = sum(_stored_bytes(_judge(judge)) for judge in fetched_judges)
    return policy_bytes + judge_bytes


def _stored_bytes(parameters: int) -> int:
    return parameters * (WIDE if parameters < SMALL else NARROW)


@lru_cache(maxsize=4096)
def _shape(model: ModelSpec) -> Shape | None:
    try:
        return resolve_model(model).shape
    except SpecRejected:
        return None


def _judge(judge: ModelReward) -> int:
    try:
        return by_name_and_size(judge.name, judge.parameters, "").shape.parameters
    except SpecRejected:
        return 0


def disk_request(spec: GRPOJobSpec, *, reported: bool, policy: Shape | None = None) -> int:
    """Bytes of ephemeral storage that one pod requests; 0 for no request. The spec's own request
    takes precedence.

    `reported`: whether the nodes say how much they have. One that doesn't, as some rootless ones,
    takes no pod that asks.
    """
    requested = spec.resources.completed_requests.get(EPHEMERAL_STORAGE)
    if requested is not None:
        return quantity_bytes(requested)
    place = spec.placement
    # An autoscaler may not know the disks of new nodes, and Kueue admits no job that requests a
    # resource which no queue lists.
    counted = place.provisioning == "WhenFree" and place.queue_name is None
    if not (reported and counted):
        return 0
    return whole_mib(scratch_bytes(spec, policy))


def disk_note(spec: GRPOJobSpec, policy: Shape | None = None) -> str:
    """The note for a spec that requests less disk than the pods will write; else empty."""
    requested = spec.resources.completed_requests.get(EPHEMERAL_STORAGE)
    needed = scratch_bytes(spec, policy)
    if requested is None or quantity_bytes(requested) >= needed:
        return ""
    expected, _ = distinct_gib(needed, quantity_bytes(requested))
    limit = spec.resources.limits.get(EPHEMERAL_STORAGE)
    # The kubelet evicts a pod that is above its limit at once; one above its request only when the
    # disk runs full.
    exceeds_limit = limit is not None and quantity_bytes(limit) < needed
    fate = "will be" if exceeds_limit else "may be"
    less_disk = less_disk_message(spec)
    return (
        f"spec.resources lets a pod have {requested} of {EPHEMERAL_STORAGE}, and it is expected "
        f"to write {expected} to /tmp: it {fate} evicted; raise that{less_disk}"
    )


def less_disk_message(spec: GRPOJobSpec) -> str:
    """The end of a sentence: how pods would write less to their nodes' disks; empty where nothing
    helps."""
    ways = [] if spec.model.cache else ["give spec.model.cache a claim for what is fetched"]
    if spec.checkpoint.store:
        ways.append("set spec.checkpoint.volume instead of store")
    elif spec.is_model_kept and not spec.checkpoint.is_on_volume:
        ways.append("set spec.checkpoint.volume for the export")
    return "".join(f", or {way}" for way in ways)
