"""`spec.generation`: what samples the completions, TRL's own loop over the policy or a vLLM engine.

An engine samples several times as fast, but from a copy of the weights. Before any completion is
used, the trainer proves that the copy is equal. Which engines there are, and what the user may set
of them, is here.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from ..pods.containers import ResourceRequirements
from ..text.base import Model, Rule
from ..text.names import GPUProduct, Labels
from ..text.quantity import MAX_COUNT
from .keyword_arguments import JSONMap, problems_of_kwargs

PROVEN_FAMILIES = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "granite",
        "olmo2",
        "olmo3",
    ),
    *("glm4", "smollm3", "starcoder2", "cohere2"),
)
"""Model types, as config.json names them, whose live weights in an engine can be proven: the
engine's own load_weights writes every element of each from a slice of one tensor of the trainer's
(tests/trainer/test_engine_families.py)."""

TENSOR_PARALLEL = (1, 2, 4, 8, 16)
"""GPUs that may share a colocated engine's weights, where heads can be shared out so."""

MAX_SERVER_JOB_NAME = 45
"""Longest name of a GRPOJob with engines in pods of their own, whose Jobs' names add
`-<attempt>-engine`."""


PASS_TOKENS = 4096
"""Most tokens of one pass of an engine: with vLLM's own default its profile at the start takes more
memory than sampling does (TRL 1.16, trl/generation/vllm_generation.py)."""


class EngineArguments(Model):
    """Settings of vLLM, by its names, that change how fast an engine is and how much memory it
    takes. All others follow from the plan."""

    enforce_eager: bool | None = None
    """Run without CUDA graphs: slower, with less memory. Unset: with them on GPUs."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Most completions that an engine samples at a time. Unset: all that it is given."""
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1048576)] | None = None
    """Most tokens of one pass of an engine. Unset: 4096, as in TRL."""
    enable_prefix_caching: bool | None = None
    """Keep what several completions of a prompt share. Unset: vLLM's own choice."""
    enable_chunked_prefill: bool | None = None
    """Read long prompts in parts, between the tokens of others. Unset: vLLM's own choice."""
    block_size: Literal[16, 32, 64, 128] | None = None
    """Tokens in one block of the cache. Unset: vLLM's own choice."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Type of the cache. With 8 bits twice as many completions fit, and the engine's probabilities
    move away from the trainer's: see guard.maxEngineMismatch. Unset: auto, the weights' own."""

    def pass_tokens(self, length: int) -> int:
        """Most tokens of one pass, where a prompt and its completion have at most `length`."""
        # vLLM does not start where what it may not read in parts has no room in one pass.
        least = length if self.enable_chunked_prefill is False else 0
        return max(self.max_num_batched_tokens or PASS_TOKENS, least)


class EngineServersSpec(Model):
    """Engines in pods of their own."""

    replicas: Annotated[int, Field(ge=1, le=512)] = 1
    """Engines, one pod each. Unset: 1."""
    gpus_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of one engine, which share its weights (tensor parallelism). On CPUs it means nothing.
    Unset: 1."""
    gpu_product: GPUProduct | None = None
    """Only GPUs with this `nvidia.com/gpu.product` label. A prefix or a short name will do. Unset:
    as placement.gpuProduct."""
    resources: ResourceRequirements = Field(default_factory=ResourceRequirements)
    """Requests and limits of an engine's container, GPUs left out. Unset: requests as the plan
    predicts."""


class GenerationSpec(Model):
    """What samples the completions."""

    RULES = (
        Rule(
            "self.engine in ['Auto', 'Servers'] || !has(self.servers)",
            "servers belongs to engine Servers or Auto; remove it or change engine",
        ),
        Rule(
            "self.engine in ['Auto', 'Colocated'] || !has(self.memoryShare) && "
            "!has(self.sleep) && !has(self.tensorParallel)",
            "memoryShare, sleep and tensorParallel belong to engine Colocated or Auto; Servers "
            "have servers.gpusPerReplica; remove them or change engine",
        ),
        Rule(
            "self.engine != 'Transformers' || !has(self.maxModelLength) && "
            "!has(self.engineArguments)",
            "maxModelLength and engineArguments are an engine's; remove them or change engine",
        ),
        Rule(
            "!has(self.kwargs) || self.engine == 'Transformers' || "
            "(self.engine != 'Auto' && self.fallback == 'Never')",
            "kwargs are arguments of one engine: set engine, and with Colocated or Servers "
            "fallback to Never, since Transformers has others",
        ),
    )

    engine: Literal["Auto", "Transformers", "Colocated", "Servers"] = "Auto"
    """Transformers: TRL's loop over the policy itself. Colocated: a vLLM engine beside every
    training process. Servers: vLLM engines in pods of their own. Auto: the plan
    chooses and says why; Transformers on CPUs and for models whose weights in an engine can't be
    proven. Unset: Auto."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a GPU's memory for a colocated engine: its weights and its cache. Unset: the plan
    chooses."""
    sleep: bool | None = None
    """Whether a colocated engine gives its memory back while the policy is trained. Unset: the plan
    chooses."""
    tensor_parallel: Literal[1, 2, 4, 8, 16] | None = None
    """GPUs of one node that share a colocated engine's weights. Unset: the plan chooses."""
    sequences_at_a_time: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Completions that one engine, or with Transformers one process, samples at a time. Unset: the
    plan chooses."""
    max_model_length: Annotated[int, Field(ge=16, le=MAX_COUNT)] | None = None
    """Most tokens of a prompt and its completion together. Unset: training.maxPromptLength and
    maxCompletionLength."""
    servers: EngineServersSpec | None = None
    """Engines in pods of their own. Unset: with engine Servers, one with one GPU; with Auto the
    plan chooses."""
    engine_arguments: EngineArguments | None = None
    """Further settings of vLLM. Unset: none."""
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=128)]],
            Field(min_length=1, max_length=16),
        ]
        | None
    ) = None
    """Texts that end a completion, which keeps them. Unset: the end-of-sequence tokens alone."""
    kwargs: JSONMap | None = None
    """Further sampling arguments (TRL's generation_kwargs): GenerationConfig's with Transformers,
    SamplingParams' with vLLM (docs/explanation/generation.md). Unset: none."""
    fallback: Literal["Auto", "Never"] = "Auto"
    """What follows when an engine does not start, or when its log-probabilities differ by more than
    guard.maxEngineMismatch. Auto: the next attempt runs vLLM's model runner V1 without CUDA graphs
    and without sleep. If that fails too, Transformers samples, unless a step then costs more than
    twice the GPU-seconds. Never: no other engine is tried. Unset: Auto."""

    @model_validator(mode="after")
    def _check_kwargs(self) -> Self:
        """Reject arguments that the engine doesn't have, or that another field sets."""
        # The rule about kwargs rejects engine Auto, whose arguments nobody knows.
        if self.kwargs is None or self.engine == "Auto":
            return self
        problems = "; ".join(problems_of_kwargs(self.kwargs, self.engine))
        if problems:
            raise PydanticCustomError("rule", "{problems}", {"problems": problems})
        return self

    def settings_of_other_engines(self) -> list[str]:
        """Paths of what is set, and belongs to engines other than this."""
        set_fields = [name for name in ENGINES_OF if getattr(self, name) is not None]
        others = [name for name in set_fields if self.engine not in ENGINES_OF[name]]
        return [f"spec.generation.{to_camel(name)}" for name in others]


ENGINES_OF = {
    "servers": ("Auto", "Servers"),
    "memory_share": ("Auto", "Colocated"),
    "sleep": ("Auto", "Colocated"),
    "tensor_parallel": ("Auto", "Colocated"),
    "max_model_length": ("Auto", "Colocated", "Servers"),
    "engine_arguments": ("Auto", "Colocated", "Servers"),
}
"""The engines that a setting belongs to, by its field of GenerationSpec."""


class EnginePlan(Model):
    """The engine that the planner chose, inside ExecutionPlan."""

    kind: Literal["Colocated", "Servers"]
    """Where the engine is."""
    replicas: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Engine pods; 0 for Colocated, where every training process has one."""
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """GPUs that share an engine's weights."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """GPUs of one engine pod; 0 on CPUs and for Colocated."""
    gpu_product: Annotated[str, Field(max_length=128)] = ""
    """Their product, as its label says; empty for CPU and for Colocated."""
    gpu_hour_price: Annotated[float, Field(ge=0)] | None = None
    """Price of one of them for an hour; absent where none is declared."""
    gpu_resource: Annotated[str, Field(max_length=128)] = "nvidia.com/gpu"
    """Extended resource that engine pods request."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that tie engine pods to that product."""
    memory_share: Annotated[float, Field(gt=0, le=1)]
    """Share of a GPU's memory, or of a CPU node's (vLLM's gpu_memory_utilization)."""
    sleep: bool = False
    """Whether a colocated engine gives its memory back between generations."""
    offload_base: bool = False
    """Whether the base of a LoRA policy is in host memory while the engine is awake."""
    model_runner: Literal["Auto", "V1"] = "Auto"
    """Auto: vLLM's choice. V1: without CUDA graphs, after an engine failed
    (spec.generation.fallback)."""
    max_mismatch: Annotated[float, Field(gt=0)] | None = None
    """Mean difference of log-probabilities, in nats, above which the attempt ends with
    EngineMismatch; absent where it is only printed."""
    max_model_length: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Most tokens of a prompt and its completion."""
    max_sequences: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Most completions at a time in one engine."""
    weights_bytes: Annotated[int, Field(ge=0)] = 0
    """Predicted: an engine's weights on one GPU."""
    cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Cache for keys and values on one GPU, or in one CPU process; 0: what is left of the share."""
    graphs_bytes: Annotated[int, Field(ge=0)] = 0
    """Predicted: CUDA graphs and work space on one GPU. Assumed: no GPU has confirmed it."""
    cpu_millicores: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """CPU request of one engine pod, in thousandths of a core; 0 on CPUs and for Colocated."""
    host_memory_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory request of one engine pod; 0 for Colocated."""
    sync_seconds: Annotated[float, Field(ge=0)] | None = None
    """Predicted time of one weight sync. Assumed: no GPU has confirmed it."""

    @property
    def gpus(self) -> int:
        """GPUs of all engine pods; 0 where engines have none of their own."""
        return self.replicas * self.gpus_per_replica
