"""Defines GRPOJobClass v1alpha1: what a platform team gives and allows the jobs that name it.

Its fields stand where a job's stand, with the same types. A job may override `default`; it may not
contradict `fixed` or exceed `limits`; `platform` has what no job can ask for itself. No field of a
class changes what is trained.
"""

from typing import Annotated, Literal

from pydantic import Field

from .pods.containers import EnvironmentSources, TrainerEnvironment
from .pods.platform import PlatformSpec
from .pods.template import PodMetadata, PullSecrets
from .spec.generation import EngineArguments
from .spec.run_policy import Toleration
from .text.base import Model
from .text.names import Image, LabelKey, Labels, Name, PullPolicy


class PodSpecSettings(Model):
    """Settings of the pods."""

    service_account_name: Name | None = None
    """Service account, which each namespace must have. Unset: the job's."""
    image_pull_secrets: PullSecrets = []
    """Pull secrets, of the job's namespace. Unset: the job's."""
    runtime_class_name: Name | None = None
    """RuntimeClass, such as `nvidia`. Unset: the job's."""
    scheduler_name: Name | None = None
    """Scheduler. Unset: the job's."""


class PodTemplateSettings(Model):
    """Labels, annotations and settings of the pods."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    """Labels and annotations, such as `k8s.v1.cni.cncf.io/networks`. Unset: the job's."""
    spec: PodSpecSettings = Field(default_factory=PodSpecSettings)
    """Settings. Unset: the job's."""


class PlacementSettings(Model):
    """Where the pods may run."""

    node_selector: Labels = Field(default_factory=dict)
    """Labels that nodes must have, beside the job's. Unset: the job's."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Tolerations, beside the job's. Unset: the job's."""
    priority_class_name: Name | None = None
    """PriorityClass. Unset: the job's."""


class ClaimTemplateSettings(Model):
    """The claim of the checkpoints, of a job that has one made."""

    storage_class_name: Name | None = None
    """StorageClass. Unset: the job's."""


class CheckpointSettings(Model):
    """Where checkpoints are kept."""

    volume_claim_template: ClaimTemplateSettings = Field(default_factory=ClaimTemplateSettings)
    """The claim. Unset: the job's."""


class GenerationSettings(Model):
    """What samples the completions."""

    engine: Literal["Transformers", "Colocated", "Servers"] | None = None
    """The engine of jobs whose own is Auto. Unset: the job's."""
    engine_arguments: EngineArguments | None = None
    """Settings of vLLM, beside the job's. Unset: the job's."""


class JobSettings(Model):
    """Fields of a GRPOJob's spec. Maps and lists join those of the job."""

    image: Image | None = None
    """Training image. Unset: the job's."""
    image_pull_policy: PullPolicy | None = None
    """When the image is pulled. Unset: the job's."""
    env: TrainerEnvironment = []
    """Environment variables, such as HTTPS_PROXY. Unset: the job's."""
    env_from: EnvironmentSources = []
    """Secrets and ConfigMaps, of the job's namespace, as variables. Unset: the job's."""
    pod_template: PodTemplateSettings = Field(default_factory=PodTemplateSettings)
    """Labels, annotations and settings of the pods. Unset: the job's."""
    placement: PlacementSettings = Field(default_factory=PlacementSettings)
    """Where the pods may run. Unset: the job's."""
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    """Where checkpoints are kept. Unset: the job's."""
    generation: GenerationSettings = Field(default_factory=GenerationSettings)
    """What samples the completions. Unset: the job's."""


class ClassLimits(Model):
    """What a job may ask for at most."""

    gpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    """GPUs of a job, engines' included; the plan takes no more. Unset: no limit."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=31536000)] | None = None
    """Longest activeDeadlineSeconds, which is also that of jobs without one. Unset: no limit."""
    priority_class_names: Annotated[list[Name], Field(max_length=32)] = []
    """PriorityClasses that a job may name. Unset: all."""
    required_labels: Annotated[list[LabelKey], Field(max_length=16)] = []
    """Labels that a GRPOJob must have, such as cost-center. Unset: none."""


class GRPOJobClassSpec(Model):
    """What jobs of the class get, and what they may ask for."""

    default: JobSettings = Field(default_factory=JobSettings)
    """What a job has where it sets nothing else. Unset: nothing."""
    fixed: JobSettings = Field(default_factory=JobSettings)
    """What every job has; one that sets something else is refused. Unset: nothing."""
    limits: ClassLimits = Field(default_factory=ClassLimits)
    """A job beyond them is refused. Unset: no limits."""
    platform: PlatformSpec = Field(default_factory=PlatformSpec)
    """What no job can ask for itself. Where pods need more than the `restricted` standard, the
    namespace's label pod-security.kubernetes.io/enforce must allow it. Unset: nothing."""


class GRPOJobClass(Model):
    """What a platform team gives and allows the jobs that name this class."""

    model_config = {"extra": "ignore"}

    spec: GRPOJobClassSpec
    """The class."""
