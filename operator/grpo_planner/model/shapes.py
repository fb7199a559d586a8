"""Defines the shape of a decoder-only transformer, its parameter counts, and the model types with
exactly known memory.

Every term of the memory model is a function of a few widths of the shape. The file families.yaml
lists the model types whose memory is known exactly, and what distinguishes each from a plain Llama
layer. Tests compare it with transformers' own classes. For all other types memory is only
estimated.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from ..tables import read_data

ALL_LINEAR = ("all-linear",)
"""PEFT's word for every linear map but the head, as the targets of an adapter."""
EMBEDDING = "model.embed_tokens"
"""Path of the input embedding in the module tree."""


class Linear(NamedTuple):
    """Linear maps of one layer that are alike, as LoRA adapts them."""

    name: str
    """Path within the layer, as PEFT matches it against `target_modules`."""
    copies: int
    """How many of them a layer has."""
    inputs: int
    outputs: int

    @property
    def widths(self) -> int:
        """What adapters of all of them add per rank."""
        return self.copies * (self.inputs + self.outputs)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths and switches of a dense (or mixture-of-experts) decoder; names follow Hugging Face's
    config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    """Input and output embeddings are one matrix."""
    qkv_bias: bool = False
    """Query, key and value projections have a bias (Qwen2)."""
    output_bias: bool = False
    """The attention's output projection has a bias (`attention_bias` of Llama, SmolLM3 and
    GPT-OSS)."""
    mlp_bias: bool = False
    """Gate, up and down projections have a bias (`mlp_bias` of Llama and SmolLM3)."""
    qk_norm: bool = False
    """Queries and keys pass an RMSNorm per head (Qwen3, Gemma 3)."""
    whole_qk_norm: bool = False
    """The RMSNorms of queries and keys are over all heads at once (OLMo 2)."""
    fused_attention: bool = False
    """One qkv matrix instead of three (Phi 3)."""
    fused_gate: bool = False
    """One gate_up matrix instead of two (Phi 3, GLM 4)."""
    norms: int = 2
    """RMSNorms per layer (4 in Gemma 2 and 3)."""
    wide_norms: bool = False
    """RMSNorms multiply by their weight in float32 (Gemma, OLMo 2, GPT-OSS)."""
    scaled_branches: bool = False
    """The embeddings and what a layer adds to them are multiplied by constants (Granite)."""
    sliding_window: int = 0
    """Window of local attention layers in tokens; 0: every layer attends to everything."""
    full_attention_layers: int = 0
    """Layers that attend to everything, where there is a window; the others use it."""
    eager: bool = False
    """Attention has no fused kernel in transformers: every score is a tensor (Gemma 2, GPT-OSS)."""
    sinks: bool = False
    """Every head has a learned sink beside its scores (GPT-OSS)."""
    experts: int = 0
    """Experts per layer; 0: dense."""
    active_experts: int = 0
    """Experts that one token passes."""
    wide_routing: bool = False
    """The router's weights are float32 in any precision, and so are the rows that they weight
    (Mixtral)."""
    expert_bias: bool = False
    """Router and experts have biases, and PEFT's `all-linear` leaves them alone (GPT-OSS)."""
    declared: int = 0
    """Parameters as declared, when the shape is only the nearest known one; 0: count them."""

    @cached_property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @cached_property
    def key_value(self) -> int:
        """Width of all key heads together; the same for values."""
        return self.kv_heads * self.head_dim

    @cached_property
    def attention_matrices(self) -> int:
        """Parameters of one layer's query, key, value and output projections."""
        return self.hidden * (2 * self.query + 2 * self.key_value)

    @cached_property
    def expert_matrices(self) -> int:
        """Parameters of one gated feed-forward network: gate, up and down projections."""
        return 3 * self.hidden * self.intermediate

    @cached_property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices, all experts and their router included."""
        router = self.experts * self.hidden
        feed_forward = max(1, self.experts) * self.expert_matrices
        return self.attention_matrices + feed_forward + router

    @cached_property
    def layer_vectors(self) -> int:
        """Parameters of one layer's norms, biases and sinks."""
        norms = self.norms * self.hidden
        qkv_width = self.query + 2 * self.key_value
        attention_biases = qkv_width * self.qkv_bias + self.hidden * self.output_bias
        # gate and up, and down
        mlp_width = 2 * self.intermediate + self.hidden
        mlp_biases = mlp_width * self.mlp_bias
        # GPT-OSS: biases of gate and up, of down, and one of the router for each expert.
        expert_biases = self.experts * (mlp_width + 1) * self.expert_bias
        sinks = self.heads * self.sinks
        biases = attention_biases + mlp_biases + expert_biases
        return norms + self.head_norms + biases + sinks

    @cached_property
    def head_norms(self) -> int:
        """Parameters of one layer's norms of queries and keys."""
        over_all_heads = (self.query + self.key_value) * self.whole_qk_norm
        per_head = 2 * self.head_dim * self.qk_norm
        return over_all_heads + per_head

    @cached_property
    def head(self) -> int:
        """Parameters of the output (or input) embedding."""
        return self.vocab * self.hidden

    @cached_property
    def largest_module(self) -> int:
        """Parameters of the largest module that is gathered at once: an embedding, or all experts
        of a layer."""
        experts = self.experts * self.expert_matrices
        matrices = [linear.inputs * linear.outputs for linear in self.linears]
        return max(self.head, experts, *matrices)

    @cached_property
    def counted_parameters(self) -> int:
        """Parameters that the shape itself has."""
        layers = self.layers * (self.layer_matrices + self.layer_vectors)
        embeddings = self.head * (1 if self.tied else 2)
        final_norm = self.hidden
        return layers + embeddings + final_norm

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model: declared when the shape is only the nearest known one, else
        counted."""
        return self.declared or self.counted_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token passes: all of them but the experts it isn't routed to."""
        if not self.experts:
            return self.parameters
        idle_experts = self.layers * (self.experts - self.active_experts)
        # A declared size below the counted one is rounded, and may be less than the idle experts.
        whole = max(self.parameters, self.counted_parameters)
        return whole - idle_experts * self.expert_matrices

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """One layer's linear maps as LoRA adapts them.

        Experts are one tensor; PEFT gives its fused gate and up projections twice the rank, and
        adapts the router too.
        """
        hidden = self.hidden
        query = self.query
        kv = self.key_value
        inner = self.intermediate
        inputs: tuple[Linear, ...] = (
            Linear("self_attn.q_proj", 1, hidden, query),
            Linear("self_attn.k_proj", 1, hidden, kv),
            Linear("self_attn.v_proj", 1, hidden, kv),
        )
        if self.fused_attention:
            inputs = (Linear("self_attn.qkv_proj", 1, hidden, query + 2 * kv),)
        attention = (*inputs, Linear("self_attn.o_proj", 1, query, hidden))
        if self.expert_bias:
            return attention
        if self.experts:
            experts = self.experts
            expert_gates = Linear("mlp.experts.gate_proj", experts, hidden, 2 * inner)
            expert_ups = Linear("mlp.experts.up_proj", experts, hidden, 2 * inner)
            expert_downs = Linear("mlp.experts.down_proj", experts, inner, hidden)
            router = Linear("mlp.gate", 1, hidden, experts)
            return (*attention, expert_gates, expert_ups, expert_downs, router)
        gate: tuple[Linear, ...] = (
            Linear("mlp.gate_proj", 1, hidden, inner),
            Linear("mlp.up_proj", 1, hidden, inner),
        )
        if self.fused_gate:
            gate = (Linear("mlp.gate_up_proj", 1, hidden, 2 * inner),)
        return (*attention, *gate, Linear("mlp.down_proj", 1, inner, hidden))

    @cached_property
    def vectors(self) -> tuple[tuple[int, int], ...]:
        """(how many, elements) of the whole model's norms and biases; those of experts are
        matrices."""
        layers = self.layers
        norms = layers * self.norms + 1  # each layer's norms, and the final one
        query_biases = layers * self.qkv_bias
        output_biases = layers * self.output_bias
        down_biases = layers * self.mlp_bias
        query_norms = layers * self.qk_norm
        whole_query_norms = layers * self.whole_qk_norm
        return (
            (norms, self.hidden),
            (query_biases, self.query),
            (2 * query_biases, self.key_value),
            (output_biases, self.hidden),
            (down_biases, self.hidden),
            (2 * down_biases, self.intermediate),
            (2 * query_norms, self.head_dim),
            (whole_query_norms, self.query),
            (whole_query_norms, self.key_value),
        )

    def adapted_linears_by_layer(
        self, targets: tuple[str, ...] = ALL_LINEAR
    ) -> tuple[tuple[Linear, ...], ...]:
        """The linear maps that an adapter with these targets is on: the input embedding's, then
        those of each layer."""
        return _adapted_by_layer(self, targets)

    def adapted_linears(self, targets: tuple[str, ...] = ALL_LINEAR) -> tuple[Linear, ...]:
        """The linear maps that an adapter with these targets is on, those of one name in all layers
        together."""
        return _merged_linears(self, targets)

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> int:
        """Parameters of LoRA: rank * (inputs + outputs) of each adapted linear map (Hu et al.
        2021)."""
        return rank * _adapted_widths(self, targets)

    def __hash__(self) -> int:
        # The models of one plan differ in these, and a search asks thousands of times.
        return hash((self.hidden, self.layers, self.intermediate, self.vocab))


def _is_targeted(path: str, targets: tuple[str, ...]) -> bool:
    """True if PEFT adapts the module at a path for these targets
    (tuners_utils.check_target_module_exists)."""
    return any(path == target or path.endswith(f".{target}") for target in targets)


@lru_cache(maxsize=64)
def _adapted_by_layer(shape: Shape, targets: tuple[str, ...]) -> tuple[tuple[Linear, ...], ...]:
    """Which maps the targets name; one may name a layer by its number."""
    if targets == ALL_LINEAR:
        return (shape.linears,) * shape.layers
    embedding = Linear(EMBEDDING, 1, shape.vocab, shape.hidden)
    at_input = (embedding,) if _is_targeted(EMBEDDING, targets) else ()
    layers = []
    for layer in range(shape.layers):
        path = f"model.layers.{layer}"
        linears = [
            linear for linear in shape.linears if _is_targeted(f"{path}.{linear.name}", targets)
        ]
        layers.append(tuple(linears))
    return (at_input, *layers)


@lru_cache(maxsize=64)
def _merged_linears(shape: Shape, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """The adapted maps, those of one name together."""
    by_name: dict[str, Linear] = {}
    for linear in chain(*_adapted_by_layer(shape, targets)):
        before = by_name.get(linear.name)
        copies = linear.copies + before.copies if before else linear.copies
        by_name[linear.name] = linear._replace(copies=copies)
    return tuple(by_name.values())


@lru_cache(maxsize=64)
def _adapted_widths(shape: Shape, targets: tuple[str, ...]) -> int:
    """What adapters of all these maps add per rank."""
    return sum(linear.widths for linear in _merged_linears(shape, targets))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type."""

    traits: dict[str, Any] = field(default_factory=dict)
    """What the layers have beyond a plain Llama layer, as fields of Shape."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What transformers takes where a config.json leaves a key out."""
    biases: tuple[str, ...] = ()
    """Which of attention_bias and mlp_bias it follows: `attention`, `mlp`."""
    expert_width: str = ""
    """Key of the width of an expert, where layers are mixtures of experts."""
    window: Literal["none", "all", "every", "switched", "late"] = "none"
    """Which layers have the sliding window where layer_types doesn't say."""
    period: int = 0
    """For window `every`: one layer in `period` attends to everything."""


@cache
def families() -> dict[str, Family]:
    """All model types that are known exactly, in the order of families.yaml."""
    by_type = {}
    for kind, about in read_data(__package__, "families.yaml").items():
        biases = tuple(about.get("biases", ()))
        fields = about | {"biases": biases}
        by_type[kind] = Family(**fields)
    return by_type


def traits(model_type: str | None) -> dict[str, Any]:
    """The traits of a type; none for one that is not known, which is taken for a Llama."""
    family = families().get(model_type or "")
    return family.traits if family else {}
