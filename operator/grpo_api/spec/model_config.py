"""Says of a model's config.json why it can't be trained as a decoder, to the planner and to the
trainer alike."""

from collections.abc import Mapping
from typing import Any

GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the classes in `architectures` that generate text from left to right."""
ENCODERS = frozenset({
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "eurobert", "modernbert",
    "mpnet", "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip
"""Types of encoders, whose config.json reads like a decoder's, for files that don't name their
`architectures`."""


def untrainable_message(config: Mapping[str, Any]) -> str:
    """Why what has the widths of a decoder can't be trained as one: it is an encoder, or an encoder
    and a decoder, or its weights are quantised. Empty if nothing speaks against it."""
    return _encoder_message(config) or _quantised_message(config)


def quantised_message(evidence: str, path: str) -> str:
    """The refusal of a quantised model; `evidence` says where it shows, `path` is the field that
    names the model."""
    return (
        f"{evidence}: its weights are quantised, and these can neither be trained nor proven to be "
        f"what was loaded. Set {path}.name to the bfloat16 original; adapters on 4-bit bases are "
        "not supported yet"
    )


def _encoder_message(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    kind = config.get("model_type")
    classes: list[str] = []
    if isinstance(architectures, list):
        classes = [str(name) for name in architectures]
    is_decoder = config.get("is_encoder_decoder") is not True
    if is_decoder and _generates_text(classes, str(kind)):
        return ""
    model = ", ".join(classes) or kind
    return (
        f"config.json is that of {model}, model_type {kind}, which doesn't generate text from "
        "left to right: set spec.model.name to a causal language model (…ForCausalLM)"
    )


def _generates_text(classes: list[str], kind: str) -> bool:
    """By the names of the model's classes, or by its type where config.json names no class."""
    if classes:
        return any(name.endswith(GENERATORS) for name in classes)
    return kind not in ENCODERS


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
