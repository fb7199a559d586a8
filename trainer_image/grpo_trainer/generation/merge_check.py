"""Holds the weight that an engine is sent for an adapted layer against PEFT's own merge.

Trainer and engine hash the same merged tensor, so that a wrong merge would pass every proof. Once
per run one layer's base and factors are therefore copied into a model of that one layer, and merged
by PEFT's `merge_and_unload`. It is done at the first sync whose adapter changes the layer. PEFT
begins with an adapter that changes nothing, of which every merge is right.
"""

from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..runtime.errors import EngineWeightsDiffer
from ..weights.parameters import TRAINED_ADAPTER
from .merged_weights import adapter_factors

LEAST_TOLERANCE = 1e-4
"""Of the adapter's largest change: float32 products that are summed in another order."""
ROUNDINGS = 4
"""Roundings of the adapter's own dtype that two ways to compute one product may differ by."""


def has_changed_weight(layer: LoraLayer) -> bool:
    """Return True if the adapter changes the layer's weight by now."""
    # By PEFT's own product: which of the two factors begins as zeros depends on the kind of layer.
    return bool(layer.get_delta_weight(TRAINED_ADAPTER).any())


def require_pefts_merge(
    name: str, layer: LoraLayer, config: LoraConfig, weight: torch.Tensor, merged: torch.Tensor
) -> None:
    """Compare a merged weight, in float32, with PEFT's own merge of the same layer, whose factors
    are gathered. `weight` is the whole one of the base, and `config` the adapter's.

    Raises:
        EngineWeightsDiffer: they are further apart than rounding explains.
    """
    expected = _merge_by_peft(layer, config, weight)
    change = (expected - weight.detach().float().cpu()).abs().max()
    difference = (expected - merged.detach().float().cpu()).abs().max()
    factors = adapter_factors(layer).values()
    roundings = max(torch.finfo(factor.dtype).eps for factor in factors) * ROUNDINGS
    # Adding the change to a weight of 1 rounds in float32 as well.
    rounding_of_sum = torch.finfo(torch.float32).eps * expected.abs().max()
    limit = max(LEAST_TOLERANCE, roundings) * change + rounding_of_sum
    # Every comparison with NaN is false, so that NaN counts as a difference.
    if not difference <= limit:
        raise EngineWeightsDiffer(
            f"{name}: the adapter changes it by up to {change:.3g}, and what was merged for the "
            f"engine is {difference:.3g} away from what PEFT's merge_and_unload makes of it; no "
            "completion was sampled with it. Set spec.generation.engine to Transformers"
        )


def _merge_by_peft(layer: LoraLayer, config: LoraConfig, weight: torch.Tensor) -> torch.Tensor:
    """The merged weight in float32 on the CPU, made of copies: PEFT merges in place, and the base
    is the reference."""
    # A new adapter draws its factors, and training must not miss those random numbers.
    with torch.random.fork_rng(devices=[]):
        holder = nn.ModuleDict({"layer": _base_layer(layer, weight)})
        own_config = replace(
            config,
            target_modules=["layer"],
            exclude_modules=None,
            layers_to_transform=None,
            layers_pattern=None,
            base_model_name_or_path=None,
            task_type=None,
        )
        model = get_peft_model(holder, own_config, adapter_name=TRAINED_ADAPTER)
    copies = dict(model.base_model.model["layer"].named_parameters())
    with torch.no_grad():
        for name, factor in adapter_factors(layer).items():
            copies[name].copy_(factor)
    merged: torch.Tensor = model.merge_and_unload()["layer"].weight
    return merged.detach()


def _base_layer(layer: LoraLayer, weight: torch.Tensor) -> nn.Module:
    """A layer of the live one's kind around a float32 copy of its weight."""
    live = layer.get_base_layer()
    base: nn.Module
    if isinstance(live, nn.Embedding):
        base = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    elif isinstance(live, Conv1D):
        base = Conv1D(weight.shape[1], weight.shape[0])
    else:
        base = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    copy = weight.detach().to("cpu", torch.float32, copy=True)
    base.weight = nn.Parameter(copy, requires_grad=False)
    return base
