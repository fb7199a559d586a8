"""The shape of a model by its configuration, as transformers reads it; needs no torch."""

from typing import Any

from pydantic import ValidationError

from grpo_api.spec.model import Architecture
from grpo_api.spec.model_config import position_count


def architecture_of_config(config: Any) -> Architecture | None:
    """The shape that spec.model.architecture would say; None for what that has no words for.

    transformers has filled in what the file left out.
    """
    if getattr(config, "text_config", None) is not None or not _alike(config):
        return None
    try:
        experts = int(_own(config, "num_local_experts") or _own(config, "num_experts") or 0)
        heads = config.num_attention_heads
        intermediate_size = _own(config, "moe_intermediate_size") or config.intermediate_size
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        experts_per_token = config.num_experts_per_tok if experts else 0
        return Architecture(
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size,
            attention_heads=heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            attention_bias=bool(_own(config, "attention_bias")),
            mlp_bias=bool(_own(config, "mlp_bias")),
            max_position_embeddings=position_count(config.to_dict()),
            experts=experts,
            experts_per_token=experts_per_token,
            **_window(config),
        )
    except (AttributeError, TypeError, ValidationError):
        return None


def _alike(config: Any) -> bool:
    """Whether all layers have the same feed-forward part."""
    return (
        not getattr(config, "mlp_only_layers", None)
        and getattr(config, "decoder_sparse_step", 1) == 1
    )


def _own(config: Any, name: str) -> Any:
    """A setting that the model's type has; a file may carry others' along. None where it has it
    not."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


def _window(config: Any) -> dict[str, int]:
    """The window of local attention and how many layers have none; empty when all layers attend to
    everything."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    full = list(kinds).count("full_attention") if kinds else 0
    if not window or full == config.num_hidden_layers:
        return {}
    return {"sliding_window": window, "full_attention_layers": full}
