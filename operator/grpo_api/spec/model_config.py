"""Says of a model's config.json why it can't be trained as a decoder, to the planner and to the
trainer alike."""

from collections.abc import Mapping
from typing import Any

MAX_POSITIONS = 2**24
"""Most positions that spec.model.architecture may name."""
GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the classes in `architectures` that generate text from left to right."""
ENCODERS = frozenset({
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "eurobert", "modernbert",
    "mpnet", "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip
"""Types of encoders, whose config.json reads like a decoder's, for files that don't name their
`architectures`."""

SIZES = (
    "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads",
    "n_head",
)  # fmt: skip


def untrainable_message(config: Mapping[str, Any]) -> str:
    """Why what has the widths of a decoder can't be trained as one: it is an encoder, or an encoder
    and a decoder, its weights are quantised, or it has no size. Empty if nothing speaks against
    it."""
    return _encoder_message(config) or _quantised_message(config) or _size_message(config)


def quantised_message(evidence: str, path: str, usable: str = "the bfloat16 original") -> str:
    """The refusal of a quantised model, which the field at `path` names.

    `usable`: what can be trained instead.
    """
    return (
        f"{evidence}: its weights are quantised, and these can neither be trained nor proven to be "
        f"what was loaded. Set {path}.name to {usable}; adapters on 4-bit bases are "
        "not supported yet"
    )


def position_count(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that a language model was made for, by its config.json, with
    the scaling that vLLM and transformers apply; None where nothing says it."""
    count = config.get("max_position_embeddings")
    if not isinstance(count, int) or count < 1:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return count
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if kind != "yarn" or not isinstance(factor, int | float) or factor < 1:
        return count
    # Of YaRN's files some name the positions before scaling, others those after it.
    original = scaling.get("original_max_position_embeddings")
    scaled = factor * (original if isinstance(original, int) and original > 0 else count)
    return max(count, int(min(scaled, MAX_POSITIONS)))


def _encoder_message(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    kind = config.get("model_type")
    classes: list[str] = []
    if isinstance(architectures, list):
        classes = [str(name) for name in architectures]
    is_decoder = config.get("is_encoder_decoder") is not True
    # By its type where config.json names no class.
    generates = any(name.endswith(GENERATORS) for name in classes)
    if is_decoder and (generates if classes else str(kind) not in ENCODERS):
        return ""
    model = ", ".join(classes) or kind
    return (
        f"config.json is that of {model}, model_type {kind}, which doesn't generate text from "
        "left to right: set spec.model.name to a causal language model (…ForCausalLM)"
    )


def _size_message(config: Mapping[str, Any]) -> str:
    """Of a number of which a model has at least one. transformers makes a model without layers, and
    says nothing of the weights that are left over."""
    for name in SIZES:
        size = config.get(name)
        if isinstance(size, int) and size < 1:
            return f"config.json has {name} {size}, and a model has at least 1: copy it again"
    return ""


def _quantised_message(config: Mapping[str, Any]) -> str:
    """Of weights that are stored in fewer bits than they would be trained in."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return ""
    method = quantization
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "unknown")
    evidence = f"config.json has a quantization_config (quant_method {method})"
    return quantised_message(evidence, "spec.model")
