"""The policy's weights as an engine computes with them: adapters merged into the base.

Weights are sent under the base model's names, gathered one layer at a time. TRL merges a LoRA
adapter into the base before it sends the weights and takes it out again after. In bfloat16 that
leaves a rounding error in the base at every sync, and the base is the reference. Here the merged
tensor is computed beside the policy, in float32, and nothing of the policy is written to. In
merge_check.py one of them is compared with PEFT's own merge.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from ..runtime.errors import BadInput
from ..weights import parameters
from ..weights.parameters import TRAINED_ADAPTER, adapter_key, base_name


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
