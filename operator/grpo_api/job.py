"""GRPOJob v1alpha1: the spec and the object, as the one source of the CRD.

Exists so that a field, its default, its limits and its description are written once. codegen renders the CRD from it,
the operator parses objects with it, the trainer reads the same sections inside the plan.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from .base import ATOMIC_LIST, Model, dotted, map_list, rules
from .contract import MAX_JOB_NAME
from .dataset import DatasetSpec
from .model import ModelSpec
from .rewards import RewardSpec
from .running import CheckpointSpec, EnvVar, GuardSpec, PlacementSpec, PodOverrides, RestartsSpec
from .status import GRPOJobStatus
from .training import AdapterSpec, ReferenceSpec, TrainingSpec

MUTABLE_AFTER_START = ("suspend", "restarts", "activeDeadlineSeconds", "ttlSecondsAfterFinished")
"""Fields of the spec that may change once an attempt has started; they don't change what is trained."""


class GRPOJobSpec(Model):
    """What to train; the operator works out how."""

    model_config = {
        "json_schema_extra": rules(
            (
                "self.training.beta > 0.0 || self.reference.strategy in ['Auto', 'None']",
                "training.beta is 0, which uses no reference: set reference.strategy to None or Auto, or raise beta",
            ),
            (
                "self.training.beta == 0.0 || self.reference.strategy != 'None'",
                "reference.strategy None needs training.beta 0; a KL term needs a reference",
            ),
            (
                "self.training.beta > 0.0 || !has(self.reference.sync)",
                "reference.sync needs training.beta above 0",
            ),
            (
                "self.adapter.use != 'Never' || self.reference.strategy != 'Adapter'",
                "reference.strategy Adapter needs adapter.use IfNeeded or Always",
            ),
            (
                "self.adapter.use != 'Always' || !has(self.reference.sync)",
                "reference.sync can't move the reference of an adapter: it is the frozen base; "
                "remove sync or set adapter.use to Never",
            ),
        )
    }

    model: ModelSpec
    """The model to train."""
    dataset: DatasetSpec
    """The training prompts."""
    rewards: Annotated[list[RewardSpec], Field(min_length=1, max_length=32, json_schema_extra=ATOMIC_LIST)]
    """Reward functions; their weighted sum is the reward."""
    training: TrainingSpec = Field(default_factory=TrainingSpec)
    """GRPO and optimizer settings. Unset: the defaults below."""
    reference: ReferenceSpec = Field(default_factory=ReferenceSpec)
    """The reference model. Unset: chosen by the plan."""
    adapter: AdapterSpec = Field(default_factory=AdapterSpec)
    """LoRA. Unset: only if nothing else fits."""
    placement: PlacementSpec = Field(default_factory=PlacementSpec)
    """Where the job may run. Unset: any GPUs."""
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """Checkpoints. Unset: none that outlive a pod."""
    guard: GuardSpec = Field(default_factory=GuardSpec)
    """When a run is stopped. Unset: only when it hangs."""
    restarts: RestartsSpec = Field(default_factory=RestartsSpec)
    """Restarts after failures. Unset: 3."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=31536000)] | None = None
    """The job fails when it has been running for this long, all attempts together and suspension left out. Unset: no
    limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31536000)] | None = None
    """The finished job is deleted after this time. Unset: kept."""
    suspend: bool = False
    """Ends the pods and keeps the job; false starts it again from its last checkpoint. Unset: false."""
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")] | None = None
    """Training image. Unset: the one that the operator was installed with."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled. Unset: IfNotPresent."""
    env: Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=map_list("name"))] = []
    """Further environment variables of the training containers. Unset: none."""
    pod_overrides: PodOverrides = Field(default_factory=PodOverrides)
    """Further settings of the pods. Unset: none."""


_COUNTED = "has(oldSelf.status) && has(oldSelf.status.attempt) && oldSelf.status.attempt > 0"
"""CEL: an attempt has been committed. The API server restores the status before it judges a change of the spec, so
`status: null` doesn't get round it; a new object has no oldSelf and is not judged."""

_ATTEMPT_GROWS = (
    f"!({_COUNTED}) || (has(self.status) && has(self.status.attempt) && self.status.attempt >= oldSelf.status.attempt)",
    "status.attempt may only grow: it names the attempts' Jobs and fences their checkpoints",
)


def _immutable_after_start() -> tuple[str, str]:
    """The CEL rule that freezes what is trained and where, once status.attempt counts 1."""
    terms = []
    for name, field in GRPOJobSpec.model_fields.items():
        alias = field.alias or name
        if alias in MUTABLE_AFTER_START:
            continue
        same = f"self.spec.{alias} == oldSelf.spec.{alias}"
        if field.is_required() or field.default_factory or field.default is not None:
            terms.append(same)
        else:
            terms.append(f"has(self.spec.{alias}) == has(oldSelf.spec.{alias}) && (!has(self.spec.{alias}) || {same})")
    message = f"the job has started: only {', '.join(MUTABLE_AFTER_START)} may change; delete it and create a new one"
    return f"!({_COUNTED}) || ({' && '.join(terms)})", message


class GRPOJob(Model):
    """One GRPO training job."""

    model_config = {
        "extra": "ignore",
        "json_schema_extra": rules(
            (
                f"size(self.metadata.name) <= {MAX_JOB_NAME} && !self.metadata.name.contains('.')",
                f"metadata.name must have at most {MAX_JOB_NAME} characters and no dot: "
                "its pods' names add the attempt and the index",
            ),
            _immutable_after_start(),
            _ATTEMPT_GROWS,
        ),
    }

    spec: GRPOJobSpec
    """What to train."""
    status: GRPOJobStatus = Field(default_factory=GRPOJobStatus)
    """What the operator has seen and done."""


class SpecInvalid(ValueError):
    """A GRPOJob that its types refuse; `problems` holds one sentence per wrong field, each with its path."""

    def __init__(self, problems: list[str]) -> None:
        """Keeps the problems and joins them into the message."""
        super().__init__("; ".join(problems))
        self.problems = problems


def parse_spec(spec: dict[str, Any]) -> GRPOJobSpec:
    """The typed spec of a GRPOJob object.

    Raises:
        SpecInvalid: with every wrong field at once, by its path.
    """
    try:
        return GRPOJobSpec.model_validate(spec)
    except ValidationError as error:
        raise SpecInvalid(
            [f"{dotted(['spec', *e['loc']])}: {e['msg']} (got {e['input']!r:.80})" for e in error.errors()]
        ) from error
