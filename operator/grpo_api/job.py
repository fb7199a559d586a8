"""Defines GRPOJob v1alpha1: its spec and the whole object.

Each field, default, limit and description is written once, in these models. The CRD is rendered
from them, objects are parsed with them, and the trainer reads the same sections inside the plan.
"""

from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from .plan.plan import ExecutionPlan
from .pods.containers import (
    EPHEMERAL_STORAGE,
    Arguments,
    EnvironmentSources,
    ResourceRequirements,
    TrainerEnvironment,
    TrainerMount,
)
from .pods.platform import PlatformSpec
from .pods.template import PodTemplate
from .spec.checkpoint import CheckpointSpec, ExportSpec, SamplesSpec
from .spec.dataset import DatasetSpec
from .spec.generation import GenerationSpec
from .spec.keyword_arguments import override_refusal, vllm_refusal
from .spec.model import ModelSpec
from .spec.other_names import other_name_hint
from .spec.rewards import MAX_REWARDS, RewardSpec
from .spec.run_policy import GuardSpec, PlacementSpec, RestartsSpec, ResumeFromSpec
from .spec.tracking import TrackingSpec
from .spec.training import AdapterSpec, ReferenceSpec, TrainingSpec
from .text.base import CREATING, MapList, Model, Rule
from .text.contract import ALLOCATOR_ENV, EXPANDABLE_SEGMENTS
from .text.names import HUB_ID_OR_PATH, Image, Name, PullPolicy
from .text.problems import problem_message
from .text.quantity import ByteQuantity
from .text.schema import Schema, structural_schema

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN_PREFIXED = rf"^{_LABEL}(\.{_LABEL})*/[-A-Za-z0-9/._~%!$&'()*+,;=:]+$"


_ON_VOLUME = "has(self.checkpoint.volume) || has(self.checkpoint.volumeClaimTemplate)"
"""CEL for CheckpointSpec.on_volume."""


class GRPOJobSpec(Model):
    """What to train; the operator works out how."""

    RULES = (
        Rule(
            "self.training.beta > 0.0 || self.reference.strategy in ['Auto', 'None']",
            "training.beta is 0, which uses no reference: set reference.strategy to None or "
            "Auto, or raise beta",
        ),
        Rule(
            "self.training.beta == 0.0 || self.reference.strategy != 'None'",
            "reference.strategy None needs training.beta 0; a KL term needs a reference",
        ),
        Rule(
            "self.training.beta > 0.0 || !has(self.reference.sync)",
            "reference.sync needs training.beta above 0",
        ),
        Rule(
            "self.training.beta > 0.0 || !has(self.guard.maxKL)",
            "guard.maxKL needs training.beta above 0: without a reference there is no KL",
        ),
        Rule(
            "self.adapter.use != 'Never' || self.reference.strategy != 'Adapter'",
            "reference.strategy Adapter needs adapter.use IfNeeded or Always",
        ),
        Rule(
            "self.adapter.use != 'Always' || self.reference.strategy in "
            "['Auto', 'Adapter', 'None']",
            "the reference of an adapter is its own frozen base: with adapter.use Always set "
            "reference.strategy to Auto, Adapter or None",
        ),
        Rule(
            "self.adapter.use != 'Always' || !has(self.reference.sync)",
            "reference.sync can't move the reference of an adapter: it is the frozen base; "
            "remove sync or set adapter.use to Never",
        ),
        Rule(
            "!has(self.placement.nodes) || self.placement.nodes == 1 || "
            "!has(self.checkpoint.volumeClaimTemplate) || "
            "self.checkpoint.volumeClaimTemplate.accessMode != 'ReadWriteOnce'",
            "placement.nodes above 1 needs a claim that several nodes can mount: set "
            "checkpoint.volumeClaimTemplate.accessMode to ReadWriteMany, or placement.nodes to 1",
        ),
        Rule(
            f"!has(self.resumeFrom) || !has(self.resumeFrom.path) || {_ON_VOLUME}",
            "resumeFrom.path is a folder on the job's own checkpoint volume: set checkpoint.volume",
        ),
        Rule(
            f"has(self.export) || {_ON_VOLUME} || has(self.checkpoint.store)",
            "the trained model would be lost with its pods: set checkpoint.volume, "
            "volumeClaimTemplate or store, where "
            "it is kept beside the checkpoints; if it isn't wanted, say so by export.to None",
            at_creation=True,
        ),
        Rule(
            f"!has(self.export) || self.export.to != 'Volume' || {_ON_VOLUME}",
            (
                "export.to Volume is a folder on the checkpoint volume: set checkpoint.volume or "
                "volumeClaimTemplate"
            ),
        ),
        Rule(
            "!has(self.export) || self.export.to != 'ObjectStore' || has(self.checkpoint.store)",
            "export.to ObjectStore is a folder beside the checkpoints: set checkpoint.store",
        ),
        Rule(
            (
                "!has(self.export) || !has(self.export.hub) || self.export.hub.repository != "
                "self.model.name"
            ),
            (
                "export.hub.repository is the model that is trained, whose weights would be "
                "replaced: name another one"
            ),
        ),
        Rule(
            "!has(self.tracking) || !has(self.tracking.tensorboard) || "
            f"has(self.tracking.tensorboard.directory) || {_ON_VOLUME}",
            "tracking.tensorboard writes beside the checkpoints: set checkpoint.volume or "
            "volumeClaimTemplate, or tracking.tensorboard.directory",
        ),
        Rule(
            (
                "self.volumeMounts.all(mount, self.podTemplate.spec.volumes.exists(volume, "
                "volume.name == mount.name))"
            ),
            "volumeMounts can show only what podTemplate.spec.volumes names: add the volume there",
        ),
        Rule(
            (
                "self.rewards.all(a, !has(a.name) || self.rewards.filter(b, has(b.name) && b.name "
                "== a.name).size() == 1)"
            ),
            "rewards must have different names",
        ),
        Rule(
            "([self.model.name] + [self.dataset].filter(d, has(d.name)).map(d, d.name) + "
            "self.rewards.filter(r, has(r.model)).map(r, r.model.name))"
            f".all(n, n.matches('{HUB_ID_OR_PATH}'))",
            "model.name, dataset.name and rewards[].model.name: write a hub id such as "
            "openai/gsm8k, without https://, revision and last /, or an absolute path in the pods",
            at_creation=True,
        ),
    )

    model: ModelSpec
    """The model to train."""
    dataset: DatasetSpec
    """The training prompts."""
    rewards: Annotated[list[RewardSpec], Field(min_length=1, max_length=MAX_REWARDS)]
    """Reward functions; their weighted sum is the reward."""
    training: TrainingSpec = Field(default_factory=TrainingSpec)
    """GRPO and optimizer settings. Unset: the defaults below."""
    generation: GenerationSpec = Field(default_factory=GenerationSpec)
    """What samples the completions. Unset: chosen by the plan."""
    reference: ReferenceSpec = Field(default_factory=ReferenceSpec)
    """The reference model. Unset: chosen by the plan."""
    adapter: AdapterSpec = Field(default_factory=AdapterSpec)
    """LoRA. Unset: only if nothing else fits."""
    placement: PlacementSpec = Field(default_factory=PlacementSpec)
    """Where the job may run. Unset: any GPUs."""
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """Checkpoints. Unset: none that outlive a pod."""
    export: ExportSpec | None = None
    """Where the trained model is put. Unset: where the checkpoints are; a new job that keeps none
    is refused."""
    tracking: TrackingSpec | None = None
    """Experiment trackers, which the run never waits for; a change takes effect with the next
    attempt. Unset: none."""
    samples: SamplesSpec = Field(default_factory=SamplesSpec)
    """Prompts and completions that are kept for people to read (`grpo samples`). Unset: of two
    prompts, every ten steps."""
    resume_from: ResumeFromSpec | None = None
    """Another run whose newest checkpoint this one begins with, exactly as that would have gone on.
    Unset: step 0."""
    guard: GuardSpec = Field(default_factory=GuardSpec)
    """When a run is stopped. Unset: the defaults below."""
    restarts: RestartsSpec = Field(default_factory=RestartsSpec)
    """Restarts after failures. Unset: 3."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=31536000)] | None = None
    """The job fails when it has been running for this long, all attempts together and suspension
    left out. Unset: no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31536000)] | None = None
    """The finished job is deleted after this time. Unset: kept."""
    suspend: bool = False
    """Ends the pods and keeps the job; false starts it again from its last checkpoint. Unset:
    false."""
    retry: Annotated[int, Field(ge=0, le=1000000)] = 0
    """Raised above status.retry while the job has failed, it starts the job again from its last
    checkpoint, with all restarts before it; it can't be lowered. Raised at any other time it does
    nothing. Unset: 0."""
    preflight: Literal["Auto", "Required", "Off"] = "Auto"
    """Whether a pod without GPUs checks a job on GPUs before its first attempt. Auto: yes, unless
    the operator was installed without preflights or `command` is another program; a check that
    can't run holds the job for five minutes. Required: the job waits for it. Off, which YAML takes
    only in quotes: no; rank 0 checks the same. Unset: Auto."""
    image: Image | None = None
    """Training image. Unset: the one that the operator was installed with."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled. Unset: IfNotPresent."""
    command: Arguments = []
    """Program and arguments of the training container. Another one than the trainer must say its
    end as the trainer does, as an Outcome in the termination message, such as grpo_acceptance.
    Unset: the trainer."""
    env: TrainerEnvironment = []
    """Further environment variables of the training container. Unset: none."""
    env_from: EnvironmentSources = []
    """Secrets and ConfigMaps whose keys become variables of the training container. Unset: none."""
    resources: ResourceRequirements = Field(default_factory=ResourceRequirements)
    """Requests and limits of the training container on each node, GPUs left out. Unset: requests of
    two cores per GPU, or the GPU's share of its node's cores where that is less (accelerator CPU: a
    core per process), of the host memory that the plan predicts and of the ephemeral storage that
    /tmp will take, and no limits."""
    volume_mounts: Annotated[list[TrainerMount], Field(max_length=32), MapList("mountPath")] = []
    """Volumes of podTemplate.spec.volumes in the training container. Unset: none."""
    shared_memory: ByteQuantity | None = None
    """Size of /dev/shm. Unset: half of the pod's memory at most."""
    pod_template: PodTemplate = Field(default_factory=PodTemplate)
    """Labels, annotations and settings of the pods. Unset: the operator's."""

    job_class_name: Name | None = None
    """GRPOJobClass; a change is for the next attempt. Unset: the default."""
    managed_by: (
        Annotated[str, Field(min_length=3, max_length=63, pattern=_DOMAIN_PREFIXED)] | None
    ) = None
    """Controller that runs the job, as a domain-prefixed path such as `example.com/dispatcher`; it
    can't change. This operator leaves alone what it does not manage. Unset: grpo.dev/operator,
    which is this operator."""

    @model_validator(mode="after")
    def _check_vllm_kwargs(self) -> Self:
        """Reject what vLLM refuses of generation.kwargs, which CEL can't look into."""
        kwargs, training = self.generation.kwargs, self.training
        if not kwargs or self.generation.engine == "Transformers":
            return self
        refusal = vllm_refusal(kwargs, training.temperature, training.max_completion_length)
        if refusal:
            raise PydanticCustomError("rule", "{refusal}", {"refusal": refusal})
        return self

    @model_validator(mode="after")
    def _check_adapter_rate(self) -> Self:
        """Reject a schedule that an adapter's rate would rise by. Not a rule of the CRD, which has
        no room for one more."""
        rate = self.adapter.learning_rate
        if rate is not None and not self.training.has_polynomial_end_below(rate):
            message = (
                "adapter.learningRate must be above training.lrSchedulerKwargs.lr_end, which is "
                "1e-7 unless set: lower lr_end"
            )
            raise PydanticCustomError("rule", "{message}", {"message": message})
        return self

    _platform: PlatformSpec = PrivateAttr(default_factory=PlatformSpec)

    @property
    def platform(self) -> PlatformSpec:
        """What the job's class gives its pods. No field: a user's spec can't set it."""
        return self._platform

    _most_gpus: int | None = PrivateAttr(default=None)

    @property
    def most_gpus(self) -> int | None:
        """GPUs that the job's class allows at most; None without a limit."""
        return self._most_gpus

    def on_platform(self, platform: PlatformSpec, most_gpus: int | None = None) -> Self:
        """The same spec with what a class gives its pods, and the GPUs that it allows."""
        spec = self.model_copy()
        spec._platform = platform
        spec._most_gpus = most_gpus
        return spec

    @property
    def nodes(self) -> int | None:
        """Exact number of nodes: placement.nodes, or the one that can mount the checkpoints' claim;
        None when open."""
        if self.placement.nodes:
            return self.placement.nodes
        return 1 if self.checkpoint.is_on_one_node else None

    @property
    def is_model_kept(self) -> bool:
        """Whether the trained model outlives the pods."""
        return self.export.is_model_kept if self.export else self.checkpoint.is_lasting

    @property
    def has_expandable_segments(self) -> bool:
        """Whether torch's allocator on GPUs has expandable segments: unless `env` gives it other
        settings."""
        for variable in self.env:
            if variable.name not in ALLOCATOR_ENV:
                continue
            settings = (variable.value or "").replace(" ", "").split(",")
            if EXPANDABLE_SEGMENTS not in settings:
                return False
        return True

    @property
    def is_adapter_requested(self) -> bool:
        """Whether the user asked for LoRA: by adapter.use, or by its reference, the base without
        its adapter."""
        return self.adapter.use == "Always" or self.reference.strategy == "Adapter"

    def container_resources(self, plan: ExecutionPlan) -> dict[str, dict[str, str]]:
        """Requests and limits of the training container of one pod, as resource.Quantities and
        without GPUs.

        What the plan only predicts is a request without a limit: it may be low.
        """
        cpu = f"{plan.cpu_millicores}m" if plan.cpu_millicores else ""
        defaults = {"cpu": cpu or self.placement.default_cpu(plan.processes_per_node)}
        predicted = {
            "memory": plan.host_memory_bytes,
            EPHEMERAL_STORAGE: plan.ephemeral_storage_bytes,
        }
        defaults |= {name: str(amount) for name, amount in predicted.items() if amount}
        return self.resources.manifest(defaults)


class SpecInvalid(ValueError):
    """A GRPOJob that its types reject; `problems` holds one sentence per wrong field, each with its
    path."""

    def __init__(self, problems: list[str]) -> None:
        """Keeps the problems and joins them into the message."""
        super().__init__("; ".join(problems))
        self.problems = problems


def parse_spec(spec: dict[str, Any], *, creating: bool = False) -> GRPOJobSpec:
    """The typed spec of a GRPOJob object. As strict as the API server: `"4"` is not an integer.

    `creating`: the object is new, and so has to keep the rules that stored ones may break.

    Raises:
        SpecInvalid: with every wrong field at once, by its path.
    """
    try:
        context = CREATING if creating else None
        return GRPOJobSpec.model_validate(
            spec, strict=True, by_alias=True, by_name=False, context=context
        )
    except ValidationError as error:
        raise SpecInvalid([_problem_message(problem) for problem in error.errors()]) from error


def _problem_message(problem: ErrorDetails) -> str:
    """One wrong field; of an override that is not allowed, the field to use instead."""
    match problem:
        case {"type": "extra_forbidden", "loc": ("training", "overrides", str(name))}:
            return override_refusal(name, problem["input"])
    return problem_message(problem, _spec_schema(), other_name_hint)


@cache
def _spec_schema() -> Schema:
    """Where the right names of misspelt fields are found."""
    return structural_schema(GRPOJobSpec, defaults=False)
