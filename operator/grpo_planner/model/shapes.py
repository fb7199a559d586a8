"""The shape of a decoder-only transformer and the parameter counts that follow from it.

Every term of the memory model is a function of these few widths.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths and switches of a dense (or mixture-of-experts) decoder; names follow Hugging Face's config.json."""

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
    qk_norm: bool = False
    """Queries and keys pass an RMSNorm per head (Qwen3, Gemma 3)."""
    fused: bool = False
    """One qkv and one gate_up matrix instead of five (Phi 3)."""
    norms: int = 2
    """RMSNorms per layer (4 in Gemma 2 and 3)."""
    wide_norms: bool = False
    """RMSNorms multiply by their weight in float32 (Gemma)."""
    sliding_window: int = 0
    """Window of local attention layers in tokens; 0: every layer attends to everything."""
    full_attention_layers: int = 0
    """Layers that attend to everything; the others use the window. 0: all of them."""
    experts: int = 0
    """Experts per layer; 0: dense."""
    active_experts: int = 0
    """Experts that one token passes."""
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
        return self.attention_matrices + max(1, self.experts) * self.expert_matrices + router

    @cached_property
    def layer_vectors(self) -> int:
        """Parameters of one layer's norms and biases."""
        bias = (self.query + 2 * self.key_value) * self.qkv_bias
        return self.norms * self.hidden + bias + 2 * self.head_dim * self.qk_norm

    @cached_property
    def head(self) -> int:
        """Parameters of the output (or input) embedding."""
        return self.vocab * self.hidden

    @cached_property
    def largest_module(self) -> int:
        """Parameters of the largest module that is gathered at once: an embedding, or all experts of a layer."""
        experts = self.experts * self.expert_matrices
        return max(self.head, experts, *(inputs * outputs for _, inputs, outputs in self.linears))

    @cached_property
    def counted(self) -> int:
        """Parameters that the shape itself has."""
        layers = self.layers * (self.layer_matrices + self.layer_vectors)
        return layers + self.head * (1 if self.tied else 2) + self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model: declared when the shape is only the nearest known one, else counted."""
        return self.declared or self.counted

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token passes: all of them but the experts it isn't routed to."""
        if not self.experts:
            return self.parameters
        return self.parameters - self.layers * (self.experts - self.active_experts) * self.expert_matrices

    @cached_property
    def linears(self) -> tuple[tuple[int, int, int], ...]:
        """(how many, inputs, outputs) of one layer's linear maps as LoRA adapts them.

        Experts are one tensor; PEFT gives its fused gate and up projections twice the rank, and adapts the router too.
        """
        hidden, query, kv, inner = self.hidden, self.query, self.key_value, self.intermediate
        if self.fused:
            return (1, hidden, query + 2 * kv), (1, query, hidden), (1, hidden, 2 * inner), (1, inner, hidden)
        attention = (1, hidden, query), (2, hidden, kv), (1, query, hidden)
        if self.experts:
            gated = (2 * self.experts, hidden, 2 * inner), (self.experts, inner, hidden)
            return *attention, *gated, (1, hidden, self.experts)
        return *attention, (2, hidden, inner), (1, inner, hidden)

    @cached_property
    def vectors(self) -> tuple[tuple[int, int], ...]:
        """(how many, elements) of the whole model's norms and biases."""
        biases = (self.layers * self.qkv_bias, self.query), (2 * self.layers * self.qkv_bias, self.key_value)
        head_norms = (2 * self.layers * self.qk_norm, self.head_dim)
        return (self.layers * self.norms + 1, self.hidden), *biases, head_norms

    @cached_property
    def adapter_widths(self) -> int:
        """Inputs and outputs of every linear layer but the head, summed: what LoRA adds per rank."""
        return self.layers * sum(count * (inputs + outputs) for count, inputs, outputs in self.linears)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA on every linear layer but the head: rank * (inputs + outputs) of each (Hu et al. 2021)."""
        return rank * self.adapter_widths
