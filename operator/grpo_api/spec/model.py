"""`spec.model`: which model is trained, where its weights come from, and its shape for planning
memory."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ..text.base import Model
from ..text.names import (
    ONE_VOLUME,
    ImageVolume,
    Repository,
    Revision,
    SecretKeySelector,
    VolumeClaim,
)
from ..text.quantity import ParameterCount
from .keyword_arguments import JSONMap


class Architecture(Model):
    """The shape of a decoder-only transformer, for planning memory as from the model's config.json,
    which the operator doesn't read; `grpo plan --config` prints it."""

    model_type: (
        Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9_.-]+$")] | None
    ) = None
    """`model_type` of the model's config.json, such as `qwen3`. Memory is known exactly for llama,
    qwen2, qwen3, qwen3_moe, mistral, mixtral, gemma2, gemma3_text, phi3, gpt_oss, smollm3 and
    olmo2. Unset or another: estimated as that of a Llama with these widths, with a wider margin."""
    layers: Annotated[int, Field(ge=1, le=1024)]
    """Number of transformer layers (`num_hidden_layers`)."""
    hidden_size: Annotated[int, Field(ge=1, le=1048576)]
    """Width of the residual stream (`hidden_size`)."""
    intermediate_size: Annotated[int, Field(ge=1, le=4194304)]
    """Width of the feed-forward layer (`intermediate_size`), or of one expert
    (`moe_intermediate_size`)."""
    attention_heads: Annotated[int, Field(ge=1, le=4096)]
    """Number of query heads (`num_attention_heads`)."""
    key_value_heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of key and value heads (`num_key_value_heads`). Unset: as many as query heads."""
    head_dim: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Width of one head. Unset: `hiddenSize / attentionHeads`."""
    vocab_size: Annotated[int, Field(ge=1, le=16777216)]
    """Number of tokens (`vocab_size`)."""
    tie_word_embeddings: bool = False
    """Whether input and output embeddings share one matrix. Unset: false."""
    attention_bias: bool = False
    """Whether all four projections of attention have a bias (`attention_bias`); Qwen 2's, which are
    part of its type, are not meant. Unset: false."""
    mlp_bias: bool = False
    """Whether the projections of the feed-forward layer have a bias (`mlp_bias`). Unset: false."""
    max_position_embeddings: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Tokens of the longest sequence that the model was made for. Unset: the catalogue's."""
    sliding_window: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """Tokens that a layer of local attention looks back on (`sliding_window`). Unset: every layer
    attends to all."""
    full_attention_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Layers that attend to all tokens although there is a sliding window. Unset: 0."""
    experts: Annotated[int, Field(ge=0, le=4096)] = 0
    """Experts of a layer (`num_experts`, `num_local_experts`). Unset: 0, no mixture of experts."""
    experts_per_token: Annotated[int, Field(ge=0, le=4096)] = 0
    """Experts that one token passes (`num_experts_per_tok`). Unset: 0."""


MAX_TEMPLATE = 32768
"""Characters of a chat template: a plan has all of it, and goes into an annotation."""
TRLS_OWN_ARGUMENTS = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
})  # fmt: skip
"""Arguments of transformers' apply_chat_template (5.23) that TRL passes, or that would change what
it returns to TRL."""


def _of_the_template(arguments: dict[str, Any]) -> dict[str, Any]:
    """Reject arguments that are not the template's."""
    reserved_names = sorted(TRLS_OWN_ARGUMENTS & arguments.keys())
    if reserved_names:
        raise ValueError(
            f"{', '.join(reserved_names)}: TRL's own, no variable of a template; remove it"
        )
    return arguments


class ModelSpec(Model):
    """The model that is trained; its first weights are also the reference."""

    RULES = (ONE_VOLUME,)

    name: Repository
    """A hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, or the absolute path of a folder in the pods,
    such as one of `volume` or `image`."""
    revision: Revision | None = None
    """Commit, tag or branch on the hub. Unset: the hub's default branch. Ignored for a folder."""
    parameters: ParameterCount | None = None
    """Number of parameters, such as `1.24B`; with it the job is planned without reading the model.
    Unset: taken from the built-in catalogue by name, or from `architecture`; a model known by
    neither is rejected."""
    architecture: Architecture | None = None
    """Shape for the memory model, before all that is known otherwise. Unset: the catalogue's, or
    the nearest dense shape of `parameters`."""
    token_secret_ref: SecretKeySelector | None = None
    """Hub token for gated models. Unset: anonymous."""
    volume: VolumeClaim | None = None
    """Volume with the model, mounted read-only at /models in every pod. Unset: no volume."""
    image: ImageVolume | None = None
    """Image with the model, mounted read-only at /models in every pod. Unset: no image."""
    cache: VolumeClaim | None = None
    """Volume in which pods, attempts and jobs share what they fetch of the hub, each once: this
    model, reward models and the dataset; mounted read-write at /hub-cache. Unset: every pod fetches
    for itself, in each attempt."""
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    """Jinja template that makes a prompt of chat messages; the exported model has it, too. Unset:
    the tokenizer's."""
    chat_template_kwargs: Annotated[JSONMap, AfterValidator(_of_the_template)] | None = None
    """Variables of the template, such as `enable_thinking: false` (TRL's chat_template_kwargs).
    Unset: none."""
    trust_remote_code: bool = False
    """Run code that the model's repository ships. Unset: false."""
