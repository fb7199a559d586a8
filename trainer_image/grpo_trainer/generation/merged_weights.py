"""The policy's weights as an engine computes with them: adapters merged into the base.

Weights are sent under the base model's names, gathered one layer at a time. TRL merges a LoRA
adapter into the base before it sends the weights and takes it out again after. In bfloat16 that
leaves a rounding error in the base at every sync, and the base is the reference. Here the merged
tensor is computed beside the policy, in float32, and nothing of the policy is written to.

Trainer and engine hash the same merged tensor, so that a wrong merge would pass every proof. Once
per run one layer's base and factors are therefore copied into a model of that one layer, and merged
by PEFT's `merge_and_unload`. It is done at the first sync whose adapter changes the layer. PEFT
begins with an adapter that changes nothing, of which every merge is right.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..runtime.errors import BadInput, EngineWeightsDiffer
from ..weights import parameters
from ..weights.parameters import TRAINED_ADAPTER, adapter_key, base_name

ROUNDINGS = 4
"""Roundings that two ways to compute one product may differ by."""
TF32_EPS = 2.0**-10
"""Of float32 factors on a GPU with training.overrides.tf32; PEFT's merge is made on the CPU."""


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that `policy_weights` gives, by its name and in its order."""
    return {
        base_name(name): parameters.shape(parameter) for name, parameter in _base_parameters(model)
    }


CheckMerge = Callable[[str, LoraLayer, torch.Tensor, torch.Tensor], None]
"""Takes the name of an adapted weight, its layer, the weight of the base and the merged one."""


def policy_weights(
    model: nn.Module,
    dtype: torch.dtype,
    check_merge: CheckMerge | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight of the policy, one at a time. A collective under ZeRO-3: all
    ranks iterate.

    A tensor has the shape that `weight_shapes` says, is contiguous and of `dtype`. It may be the
    policy's own memory, so it is good until the next one. `check_merge` sees each merged weight in
    float32, while base and factors are gathered. A base that is in host memory is copied to
    `device`.
    """
    layers = _adapted_layers(model)
    for name, parameter in _base_parameters(model):
        layer = layers.get(id(parameter))
        factors = adapter_factors(layer).values() if layer else ()
        with ExitStack() as stack, torch.no_grad():
            # One layer at a time: gathering all of them would need the whole model's size on every
            # GPU.
            for gathered_parameter in (parameter, *factors):
                stack.enter_context(parameters.gathered_share(gathered_parameter))
            weight = parameter.detach()
            if device is not None:
                weight = weight.to(device, non_blocking=True)
            if layer is not None:
                merged = _merged_weight(weight, layer)
                if check_merge is not None:
                    check_merge(base_name(name), layer, weight, merged)
                weight = merged
            yield base_name(name), weight.to(dtype).contiguous()


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters but for the adapter's, each once."""
    return (
        (name, parameter)
        for name, parameter in parameters.parameters_by_name(model).items()
        if not adapter_key(name)
    )


def _adapted_layers(model: nn.Module) -> dict[int, LoraLayer]:
    """The layer of every weight that an adapter changes, by the parameter's identity.

    Raises:
        BadInput: an adapter changes one of two layers that share a weight; an engine has that
            weight once.
    """
    if not isinstance(model, PeftModel):
        return {}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = module.get_base_layer().weight
            if uses[id(weight)] > 1:
                raise BadInput(
                    f"spec.adapter.targetModules: {base_name(name)} shares its weight with another "
                    "layer, which the adapter leaves as it is, and an engine can't: leave it out, "
                    "or set spec.generation.engine to Transformers"
                )
            layers[id(weight)] = module
    return layers


def adapter_factors(layer: LoraLayer) -> dict[str, nn.Parameter]:
    """The parameters of the layer's adapter, by their name in the layer."""
    return {name: factor for name, factor in layer.named_parameters() if adapter_key(name)}


def _merged_weight(weight: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    """The weight with the adapter's difference, as PEFT's own merge computes that, added in
    float32."""
    # Beside the parameter: a merge in place leaves a rounding error in the base in bfloat16, and
    # the base is the reference.
    difference: torch.Tensor = layer.get_delta_weight(TRAINED_ADAPTER)
    return weight.float() + difference.detach().float()


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
    eps = max(TF32_EPS, *(torch.finfo(factor.dtype).eps for factor in factors))
    # Adding the change to a weight of 1 rounds in float32 as well.
    rounding_of_sum = torch.finfo(torch.float32).eps * expected.abs().max()
    limit = ROUNDINGS * eps * change + rounding_of_sum
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
