"""Finds the shape of the job's model: from its config.json, the spec, the catalogue or its declared size.

That is also the order of trust: the nearest source wins, and the plan says which one it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo_api.model import Architecture, ModelSpec
from grpo_api.quantity import format_parameters, parameter_count

from ..result import PlanReason, SpecRejected
from . import catalogue
from .shapes import Shape

Source = Literal["Exact", "Catalogue", "Estimated"]
TOLERANCE = 0.1
"""A catalogued model whose size differs by more than this from the declared one is another model."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A shape, where it came from, and what the user should know about that."""

    shape: Shape
    source: Source
    note: str = ""

    @property
    def label(self) -> str:
        """The size for plan.parameters, such as `1.24B`."""
        return format_parameters(self.shape.parameters)


def resolve(model: ModelSpec, config: Mapping[str, Any] | None = None) -> ResolvedModel:
    """The shape of spec.model; `config` is its config.json where the caller could read it.

    Raises:
        SpecRejected: the model is unknown and no size is declared.
    """
    if config is not None:
        return ResolvedModel(from_config(config), "Exact")
    if model.architecture is not None:
        return ResolvedModel(from_architecture(model.architecture), "Exact")
    return by_name_and_size(model.name, model.parameters, "spec.model")


def by_name_and_size(name: str, parameters: str | None, path: str) -> ResolvedModel:
    """The catalogue's shape of a name, unless a size is declared that contradicts it; else the nearest to that size.

    Raises:
        SpecRejected: the catalogue has no such name and no size is declared; `path` names the field to set.
    """
    known, count = catalogue.lookup(name), parameter_count(parameters) if parameters else 0
    if known and (not count or abs(known.parameters / count - 1) <= TOLERANCE):
        return ResolvedModel(known, "Catalogue")
    if not count:
        raise SpecRejected(
            PlanReason.UNKNOWN_MODEL,
            f"{path}.name {name!r} is not in the built-in catalogue and its config.json is not at hand: "
            f"set {path}.parameters, such as 494M or 1.24B",
        )
    near, shape = catalogue.nearest_dense(count)
    return ResolvedModel(shape, "Estimated", f"{name}: shape estimated from {parameters} parameters as that of {near}")


def from_architecture(given: Architecture) -> Shape:
    """The shape of spec.model.architecture."""
    return Shape(
        hidden=given.hidden_size,
        layers=given.layers,
        heads=given.attention_heads,
        kv_heads=given.key_value_heads or given.attention_heads,
        head_dim=given.head_dim or given.hidden_size // given.attention_heads,
        intermediate=given.intermediate_size,
        vocab=given.vocab_size,
        tied=given.tie_word_embeddings,
    )


def from_config(config: Mapping[str, Any]) -> Shape:
    """The shape in a Hugging Face config.json; the language model's, where the file nests it in `text_config`.

    Raises:
        SpecRejected: a width is missing, so it is not the config of a decoder.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    kind = text.get("model_type", "")
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        experts = _experts(text)
        return Shape(
            hidden=hidden,
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=int((experts and text.get("moe_intermediate_size")) or text["intermediate_size"]),
            vocab=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
            qkv_bias=kind == "qwen2" or bool(text.get("attention_bias")),
            qk_norm=kind in QK_NORM,
            fused=kind in FUSED,
            norms=4 if kind in FOUR_NORMS else 2,
            wide_norms=kind in WIDE_NORMS,
            experts=experts,
            active_experts=int(text.get("num_experts_per_tok") or 0),
            **_window(text),
        )
    except KeyError as missing:
        raise SpecRejected(
            PlanReason.UNKNOWN_MODEL,
            f"config.json has no {missing}: it is not the config of a decoder-only language model",
        ) from None


TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")
FUSED = ("phi3",)
FOUR_NORMS = ("gemma2", "gemma3_text")
WIDE_NORMS = ("gemma", "gemma2", "gemma3_text")


def _experts(text: Mapping[str, Any]) -> int:
    """Experts per layer under the names that Mixtral, Qwen and DeepSeek configs use; 0 for a dense model."""
    return int(text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0)


def _window(text: Mapping[str, Any]) -> dict[str, int]:
    """The window of local attention and how many layers have none; empty when all layers attend to everything."""
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return {}
    kinds, layers = text.get("layer_types"), int(text["num_hidden_layers"])
    period = text.get("sliding_window_pattern")
    every = layers // int(period) if period else 0
    full = sum(kind == "full_attention" for kind in kinds) if kinds else every
    return {} if full == layers else {"sliding_window": int(window), "full_attention_layers": full}
