"""Reads a Hugging Face config.json: into the Architecture that spec.model.architecture would say,
or why not.

What a file leaves out is filled in as transformers fills it in. What can't be trained here is
refused with the reason.
"""

from collections.abc import Mapping
from typing import Any

from grpo_api.spec.model import Architecture
from grpo_api.spec.model_config import position_count, untrainable_message

from ..result.result import PlanReason, SpecRejected
from .shapes import Family, families

WIDTHS = {
    "hidden_size": "hidden_size", "layers": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}  # fmt: skip
"""Fields of Architecture that every config.json has under the same key."""

UNKNOWN = Family(expert_width="moe_intermediate_size")
"""Of a type that has no formula."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture in a config.json; the language model's, where the file nests it in
    `text_config`.

    Raises:
        SpecRejected: a width is missing or no number.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    kind = text.get("model_type")
    family = families().get(str(kind), UNKNOWN)
    text = family.defaults | dict(text)
    try:
        widths = {field: int(text[key]) for field, key in WIDTHS.items()}
        attention = _attention(text, family)
        feed_forward = _feed_forward(text, family)
        is_tied = bool(text.get("tie_word_embeddings", False))
        return Architecture(
            model_type=kind, **widths, **attention, **feed_forward, tie_word_embeddings=is_tied,
            max_position_embeddings=position_count(text),
        )  # fmt: skip
    except KeyError as missing:
        why = f"has no {missing}: it is not the config of a decoder-only language model"
        raise _unreadable_config_error(why) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _unreadable_config_error(f"can't be understood: {error}") from error


def refuse_untrainable(config: Mapping[str, Any]) -> None:
    """Refuses what has the widths of a decoder and can't be trained as one.

    Raises:
        SpecRejected: the model is an encoder, or an encoder and a decoder, or its weights are
            quantised.
    """
    message = untrainable_message(config)
    if message:
        raise SpecRejected(PlanReason.UNSUPPORTED_MODEL, message)


def _unreadable_config_error(why: str) -> SpecRejected:
    message = f"config.json {why}; give the right file, or set spec.model.architecture"
    return SpecRejected(PlanReason.UNKNOWN_MODEL, message)


def _attention(text: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Heads, biases and windows."""
    heads = int(text["num_attention_heads"])
    key_value_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or int(text["hidden_size"]) // heads
    attention_bias = "attention" in family.biases and bool(text.get("attention_bias"))
    mlp_bias = "mlp" in family.biases and bool(text.get("mlp_bias"))
    return {
        "key_value_heads": int(key_value_heads),
        "head_dim": int(head_dim),
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        **_window(text, family),
    }


def _feed_forward(text: Mapping[str, Any], family: Family) -> dict[str, int]:
    """Width and experts; of a type that isn't known, under the names that Mixtral, Qwen and
    DeepSeek configs use."""
    experts = int(
        text.get("num_local_experts")
        or text.get("num_experts")
        or text.get("n_routed_experts")
        or 0
    )
    if not experts or not family.expert_width:
        return {"intermediate_size": int(text["intermediate_size"])}
    has_dense_layers = text.get("mlp_only_layers") or int(text.get("decoder_sparse_step") or 1) != 1
    if has_dense_layers:
        raise _unreadable_config_error(
            "mixes dense layers and layers of experts (mlp_only_layers, decoder_sparse_step)"
        )
    width = text.get(family.expert_width) or text["intermediate_size"]
    per_token = text.get("num_experts_per_tok") or 0
    return {
        "intermediate_size": int(width),
        "experts": experts,
        "experts_per_token": int(per_token),
    }


def _window(text: Mapping[str, Any], family: Family) -> dict[str, int]:
    """The window of local attention and how many layers have none; empty when all layers attend to
    everything."""
    window = text.get("sliding_window")
    layers = int(text["num_hidden_layers"])
    has_switch = family.window in ("switched", "late")
    is_off = has_switch and text.get("use_sliding_window") is not True
    if not window or family.window == "none" or is_off:
        return {}
    full_layers = _full_layers(text, family, layers)
    if full_layers == layers:
        return {}
    return {"sliding_window": int(window), "full_attention_layers": full_layers}


def _full_layers(text: Mapping[str, Any], family: Family, layers: int) -> int:
    """Layers that attend to everything, by `layer_types`, else by the type's own rule."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and family.window in ("every", "late"):
        return sum(kind == "full_attention" for kind in kinds[:layers])
    if family.window == "every":
        period = text.get("sliding_window_pattern") or family.period
        return layers // int(period)
    if family.window == "late":
        return min(layers, int(text["max_window_layers"]))
    return 0
