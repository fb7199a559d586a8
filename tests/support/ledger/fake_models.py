"""Cases of the memory truth and their models: real transformers classes and PEFT layers with fake
weights."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from grpo_planner.memory.setup import Precision
from grpo_planner.model.shapes import ALL_LINEAR, Shape, families


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to account for."""

    model: str
    family: str
    shape: Shape
    precision: Precision = "bfloat16"
    micro_batch: int = 2
    prompt: int = 256
    completion: int = 256
    checkpointing: bool = True
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ALL_LINEAR
    eight_bit: bool = False
    generation_batch: int = 4
    top_p: float = 1.0
    entropy_bonus: bool = False

    @property
    def name(self) -> str:
        """A readable identity for test reports."""
        chosen = "" if self.lora_targets == ALL_LINEAR else f"({'+'.join(self.lora_targets)})"
        method = (
            f"lora{self.lora_rank}{chosen}"
            if self.lora_rank
            else "full8bit"
            if self.eight_bit
            else "full"
        )
        saved = "ckpt" if self.checkpointing else "all"
        tokens = f"{self.micro_batch}x({self.prompt}+{self.completion})"
        drawn = f"-top{self.top_p:g}" if self.top_p < 1 else ""
        of_model = f"{self.model}-{self.precision}-{method}-{saved}"
        return f"{of_model}-{tokens}-g{self.generation_batch}{drawn}"


def configuration(family: str, shape: Shape) -> Any:
    """The transformers configuration of a catalogued shape, with the kernels that it has on a
    GPU."""
    extra: dict[str, Any] = {"sliding_window": shape.sliding_window or None}
    if period := families()[family].period:
        extra["layer_types"] = [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention"
            for i in range(shape.layers)
        ]
    if shape.experts:
        extra |= {
            "num_local_experts": shape.experts, "num_experts": shape.experts,
            "num_experts_per_tok": shape.active_experts,
            "moe_intermediate_size": shape.intermediate,
        }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        family, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab, tie_word_embeddings=shape.tied, max_position_embeddings=32768,
        pad_token_id=0, **extra,
    )  # fmt: skip
    config._attn_implementation = "eager" if shape.eager else "sdpa"
    # What transformers chooses on a GPU, and the only one whose shapes don't depend on the routing.
    if shape.experts:
        config._experts_implementation = "grouped_mm"
    config.use_cache = False
    return config


def build(case: Case, dtype: torch.dtype) -> Any:
    """The model with fake weights, with float32 adapters when asked for (PEFT's own default)."""
    config = configuration(case.family, case.shape)
    with no_init_weights(), torch.device("cpu"):
        torch.set_default_dtype(dtype)
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    model.tie_weights()
    if case.lora_rank:
        model = _adapt(model, case.lora_rank, case.lora_targets)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _adapt(model: Any, rank: int, targets: tuple[str, ...]) -> Any:
    """LoRA on the targets. Fake parameters can't be moved, so PEFT's moves are left out; dtypes
    stay its own."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = "all-linear" if targets == ALL_LINEAR else list(targets)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, lora_dropout=0.0)
    keep = mock.patch.object(nn.Module, "to", lambda module, *_, **__: module)
    with ExitStack() as stay:
        for layer in (BaseTunerLayer, ParamWrapper):
            move = mock.patch.object(
                layer, "_move_adapter_to_device_of_base_layer", return_value=None
            )
            stay.enter_context(move)
        stay.enter_context(keep)
        adapted = get_peft_model(model, settings, autocast_adapter_dtype=False)
    adapted.enable_input_require_grads()
    return adapted
