"""TrainingPlan: everything a training pod needs, and ExecutionPlan: the planner's answer inside it.

The ExecutionPlan is committed to status.plan before an attempt starts. The TrainingPlan is derived
from it and the spec. It travels in the pod template's annotation, and the trainer reads it. Both
are frozen, and the same bytes for the same inputs.
"""

from typing import Annotated, Literal

from pydantic import Field

from ..report.revisions import Generations, Revisions
from ..spec.checkpoint import CheckpointSpec, ExportSpec, ObjectStoreSpec, SamplesSpec
from ..spec.dataset import DatasetSpec
from ..spec.generation import EngineArguments, EnginePlan, GenerationSpec
from ..spec.model import ModelSpec
from ..spec.rewards import RewardSpec
from ..spec.run_policy import GuardSpec
from ..spec.tracking import TrackingSpec
from ..spec.training import AdapterSpec, ReferenceSpec, TrainingSpec
from ..text.base import Model
from ..text.contract import ENGINE_PORT, RENDEZVOUS_PORT, WEIGHTS_PORT
from ..text.names import Labels
from ..text.quantity import MAX_COUNT, Count

Bytes = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
MAX_TEXT, MAX_TEXTS = 1024, 16
"""Characters of a sentence of a plan, and sentences of one kind."""
Text = Annotated[str, Field(max_length=MAX_TEXT)]
RowId = Annotated[str, Field(max_length=8)]

SLOW_SHARE = 0.5
"""Share of the assumed bandwidth below which a gang's links are slow. Two nodes with eight H20 each
reach 269 GB/s with the 64 MiB that are measured (nccl#1244), where a plan assumes 280."""
SCHEMA_VERSION: Literal[1] = 1
"""Raised when a pod of the old image could misread a plan of the new operator."""


ShapeSource = Literal["Spec", "FormerAttempt", "ConfigFile", "Catalogue", "Size"]
"""Where a model's shape is found, in the order of trust: spec.model.architecture, what a former
attempt of the job loaded or its preflight read, config.json (the CLI's alone), the built-in
catalogue by name, the nearest shape of spec.model.parameters."""

STEP_ESTIMATES = 3.0
"""A step may take this many times its coarse estimate, even if guard.hangTimeoutSeconds is
shorter."""


class MemoryPhases(Model):
    """Peak of allocated bytes on one GPU during each phase of a step."""

    load: Bytes
    """Loading the weights."""
    sync: Bytes = 0
    """Bringing the weights into a colocated engine; 0 without one."""
    generate: Bytes
    """Generating completions."""
    reference: Bytes
    """Log-probabilities of the reference."""
    forward: Bytes
    """The policy's forward pass."""
    backward: Bytes
    """The backward pass."""
    step: Bytes
    """The optimizer step."""


class MemoryPrediction(Model):
    """Predicted memory of one GPU and one host."""

    phases: MemoryPhases
    """Peak per phase."""
    peak_phase: Literal["load", "sync", "generate", "reference", "forward", "backward", "step"]
    """The phase with the highest peak."""
    peak_allocated_bytes: Bytes
    """What torch.cuda.max_memory_allocated would read."""
    device_bytes: Bytes
    """With context, communicators and margin: what the device must have."""
    usable_bytes: Bytes
    """What the device has for torch."""
    host_bytes_per_node: Bytes
    """Host memory of one pod."""
    expandable_segments: bool = False
    """Whether that counts on expandable segments of torch's allocator, so on less fragmentation."""
    checkpoint_bytes: Bytes = 0
    """Disk of one checkpoint."""


class ExecutionPlan(Model):
    """How an attempt runs: the planner's choice, published as status.plan."""

    strategy: Literal["Clone", "Adapter", "Sharded", "Offload", "None"]
    """Reference strategy."""
    method: Literal["Full", "LoRA"]
    """What is trained: all parameters, or an adapter."""
    zero_stage: Literal[0, 2, 3] = 0
    """DeepSpeed ZeRO stage; 0 is plain DDP."""
    offload: Literal["None", "CPU"] = "None"
    """Where optimizer state and gradients are kept under ZeRO."""
    accelerator: Literal["GPU", "CPU"] = "GPU"
    """What the processes run on."""
    gpus: Count = 0
    """GPUs of the whole gang."""
    nodes: Positive = 1
    """Pods of the gang, one per node."""
    gpus_per_node: Count = 0
    """GPUs of one pod."""
    processes_per_node: Positive = 1
    """Training processes of one pod."""
    gpu_product: Annotated[str, Field(max_length=128)] = ""
    """GPU product of every node, as its label says; empty for CPU."""
    gpu_hour_price: Annotated[float, Field(ge=0)] | None = None
    """Price of one of them for an hour, in the currency of the declared prices; absent where none
    is declared."""
    gpu_resource: Annotated[str, Field(max_length=128)] = "nvidia.com/gpu"
    """Extended resource that the pods request."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that tie the pods to that product."""
    micro_batch: Positive
    """Completions per process and micro-batch (per_device_train_batch_size)."""
    gradient_accumulation: Positive
    """Micro-batches per optimizer step."""
    steps_per_generation: Positive
    """Micro-batches generated at a time."""
    generation_sub_batch: Count = 0
    """Completions per call of generate on one process; 0: all at once."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed."""
    gather_for_generation: bool = True
    """Whether ZeRO-3 gathers the policy to generate."""
    engine: EnginePlan | None = None
    """The vLLM engine that samples the completions; absent for Transformers, where the policy
    does."""
    optimizer: Literal["AdamW", "AdamW8bit"] = "AdamW"
    """The optimizer."""
    dtype: Literal["bfloat16", "float32"]
    """Dtype of the weights. Under ZeRO with bfloat16 the optimizer keeps float32 masters; with
    float32 the engine runs without bfloat16."""
    autocast: bool = False
    """Whether matrix products run in bfloat16 autocast over float32 weights or adapters."""
    parameters: Annotated[str, Field(max_length=16)] = ""
    """Size of the model, such as `1.24B`."""
    architecture: Literal["Exact", "Catalogue", "Estimated"] = "Estimated"
    """How exact the shape for the memory model is. Exact: of a model type that is held to
    transformers' own classes."""
    shape_source: ShapeSource | None = None
    """Where that shape was found; absent where a former version of the operator made the plan."""
    memory: MemoryPrediction | None = None
    """Predicted memory; absent for CPU."""
    cpu_millicores: Count = 0
    """CPU request of one pod, in thousandths of a core; 0: the default of the accelerator."""
    host_memory_bytes: Bytes = 0
    """Memory request of one pod."""
    ephemeral_storage_bytes: Bytes = 0
    """What one pod requests of its node's disk; 0 for no request, as where no node says how much it
    has."""
    estimated_step_seconds: Annotated[float, Field(ge=0)] | None = None
    """Predicted time of one step."""
    step_basis: Literal["Published", "Measured"] = "Published"
    """What the range of that time is known from: published runs, or measured ones."""
    step_spread: Annotated[float, Field(ge=0)] | None = None
    """Share by which that time may be off where it is measured."""
    step_runs: Annotated[list[RowId], Field(max_length=10)] = []
    """Ids of the measured runs that it rests on."""
    expected_completion_length: Positive | None = None
    """Mean tokens of a completion that times and an engine's cache are for; absent where they are
    for the longest."""
    link_bytes_per_second: Positive | None = None
    """What that time assumes that a process sends and receives in an all-reduce; absent without
    links."""
    export_bytes: Bytes = 0
    """Predicted size of the weights that are exported."""
    save_every_steps: Positive
    """Steps between checkpoints."""
    reason: Text = ""
    """Why this plan, in a sentence."""
    changes: Annotated[list[Text], Field(max_length=MAX_TEXTS)] = []
    """What differs from what the user might expect to be trained."""
    warnings: Annotated[list[Text], Field(max_length=MAX_TEXTS)] = []
    """What the planner could not know or could not check."""

    @property
    def compute_dtype(self) -> Literal["bfloat16", "float32"]:
        """The dtype that the policy computes in; an engine has the same."""
        return "bfloat16" if self.autocast else self.dtype

    @property
    def world_size(self) -> int:
        """Training processes of the whole gang."""
        return self.nodes * self.processes_per_node

    @property
    def all_gpus(self) -> int:
        """GPUs of the gang and of its engines."""
        return self.gpus + (self.engine.gpus if self.engine else 0)

    def has_slow_links(self, bytes_per_second: float) -> bool:
        """Whether an all-reduce of this bus bandwidth is far slower than the plan assumes."""
        assumed = self.link_bytes_per_second
        return assumed is not None and bytes_per_second < SLOW_SHARE * assumed


class JobIdentity(Model):
    """Whose attempt a pod belongs to; checkpoints are fenced by uid and attempt."""

    namespace: str
    """Namespace of the GRPOJob."""
    name: str
    """Name of the GRPOJob."""
    uid: Annotated[str, Field(min_length=1)]
    """Its uid: a job deleted and created again is another job."""
    attempt: Annotated[int, Field(ge=1)]
    """The attempt, from 1."""


class Rendezvous(Model):
    """Where the process group meets."""

    address: Annotated[str, Field(min_length=1)]
    """DNS name of the pod with rank 0."""
    port: Annotated[int, Field(ge=1, le=65535)] = RENDEZVOUS_PORT
    """Its port."""


class EngineAddresses(Model):
    """Where rank 0 finds the engines of the attempt, and they it."""

    hosts: Annotated[list[str], Field(min_length=1, max_length=512)]
    """DNS names of the engine pods, by index."""
    port: Annotated[int, Field(ge=1, le=65535)] = ENGINE_PORT
    """Where each of them serves."""
    weights_port: Annotated[int, Field(ge=1, le=65535)] = WEIGHTS_PORT
    """Where rank 0 accepts them for the transfer of weights."""


class EarlierEnd(Model):
    """How an earlier attempt ended, as the operator saw it."""

    attempt: Annotated[int, Field(ge=1)]
    """Its number."""
    reason: Annotated[str, Field(max_length=128)]
    """The result of its outcome, or why the gang was released."""


class TrainingPlan(Model):
    """The whole input of a training pod: JSON in an annotation of the pod, which mounts it as a
    file."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this schema; a trainer rejects one that it doesn't know."""
    job: JobIdentity
    """Whose attempt this is."""
    rendezvous: Rendezvous
    """Where the ranks meet."""
    engines: EngineAddresses | None = None
    """Where the engines are; absent without engines in pods of their own."""
    model: ModelSpec
    """spec.model."""
    dataset: DatasetSpec
    """spec.dataset."""
    rewards: list[RewardSpec]
    """spec.rewards."""
    training: TrainingSpec
    """spec.training."""
    generation: GenerationSpec = Field(default_factory=GenerationSpec)
    """spec.generation; `execution.engine` says what became of engine Auto."""
    reference: ReferenceSpec
    """spec.reference; `execution.strategy` says what became of strategy Auto."""
    adapter: AdapterSpec
    """spec.adapter; in use when `execution.method` is LoRA."""
    checkpoint: CheckpointSpec
    """spec.checkpoint."""
    guard: GuardSpec
    """spec.guard."""
    export: ExportSpec | None = None
    """spec.export."""
    tracking: TrackingSpec | None = None
    """spec.tracking."""
    samples: SamplesSpec = Field(default_factory=SamplesSpec)
    """spec.samples."""
    checkpoint_directory: str | None = None
    """Folder of all attempts' checkpoints; absent without a volume that all nodes share."""
    resume_from: str | None = None
    """Folder of another run, a checkpoint or an exported adapter to begin with while this run has
    no checkpoint."""
    resume_store: ObjectStoreSpec | None = None
    """Object store with that run; its folder is then on each pod's own disk, for what is
    brought."""
    revisions: Revisions = Field(default_factory=dict)
    """What earlier attempts found: these commits are asked for, wherever branches and tags point to
    by now."""
    skipped: list[Generations] = []
    """What the run diverged on in earlier attempts (spec.guard.onDivergence): left out of the order
    of the data."""
    rdma_devices: (
        Annotated[list[Annotated[str, Field(max_length=317)]], Field(max_length=32)] | None
    ) = None
    """Extended resources that the pods request, taken as network cards; absent for none."""
    ends: list[EarlierEnd] | None = None
    """How the newest of the earlier attempts ended; absent for none."""
    grace_period_seconds: Annotated[int, Field(ge=0)] = 60
    """Time between SIGTERM and SIGKILL."""
    execution: ExecutionPlan
    """The planner's choice."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of what the planner chose to train."""
        is_adapter = self.execution.method == "LoRA"
        if is_adapter and self.adapter.learning_rate is not None:
            return self.adapter.learning_rate
        return self.training.learning_rate


ComputeDtype = Literal["bfloat16", "float32"]

MISMATCH_LIMITS: dict[ComputeDtype, float] = {"float32": 0.01, "bfloat16": 0.1}
"""Nats in the mean, by the dtype that policy and engine compute in. Right engines differ by 1e-6 in
float32 on CPUs (measured); kernels that round to TF32 make a thousand times more of it. In bfloat16
a logit of 16 to 32 is rounded by up to 0.06, mostly less."""


def mismatch_limit(
    guard: GuardSpec, generation: GenerationSpec, dtype: ComputeDtype
) -> float | None:
    """Nats above which an attempt ends; None where a larger difference is only printed.

    An 8-bit cache of keys and values moves the engine's numbers by design, so it ends no attempt by
    a limit that nobody has set.
    """
    if guard.max_engine_mismatch is not None:
        return guard.max_engine_mismatch
    arguments = generation.engine_arguments or EngineArguments()
    has_full_cache = arguments.kv_cache_dtype in (None, "auto")
    return MISMATCH_LIMITS[dtype] if has_full_cache else None
