"""The policy's weights as an engine has them: under the base model's names, adapters merged, gathered one at a time.

TRL merges a LoRA adapter into the base before it sends the weights and takes it out again after. In bfloat16 that
leaves a rounding error in the base at every sync, and the base is the reference. Here nothing of the policy is written
to: what is sent is computed beside it, in float32. Under ZeRO-3 the parameters of one layer are gathered at a time,
where a merge in place takes all of them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from ..errors import BadInput
from ..weights import partition
from ..weights.keys import TRAINED_ADAPTER, adapter_key, base_name


def weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that `policy_weights` gives, by its name and in its order."""
    return {base_name(name): partition.shape(parameter) for name, parameter in _own(model)}


def policy_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight of the policy, one at a time. A collective under ZeRO-3: all ranks iterate.

    A tensor is contiguous and of `dtype`, and may be the policy's own memory: it is good until the next one.
    """
    layers = _adapted(model)
    for name, parameter in _own(model):
        layer = layers.get(id(parameter))
        with ExitStack() as stack, torch.no_grad():
            # One layer at a time: gathering all of them would need the whole model's size on every GPU.
            for held in (parameter, *_factors(layer)):
                stack.enter_context(partition.gathered(held))
            merged = parameter.detach() if layer is None else _merged(parameter, layer)
            yield base_name(name), merged.to(dtype).contiguous()


def _own(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters but for the adapter's, each once."""
    return ((name, one) for name, one in partition.parameters_by_name(model).items() if not adapter_key(name))


def _adapted(model: nn.Module) -> dict[int, LoraLayer]:
    """The layer of every weight that an adapter changes, by the parameter's identity.

    Raises:
        BadInput: an adapter changes one of two layers that share a weight; an engine has that weight once.
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
                    f"spec.adapter.targetModules: {base_name(name)} shares its weight with another layer, which the "
                    "adapter leaves as it is, and an engine can't: leave it out, or set spec.generation.engine to "
                    "Transformers"
                )
            layers[id(weight)] = module
    return layers


def _factors(layer: LoraLayer | None) -> list[nn.Parameter]:
    if layer is None:
        return []
    return [one for name, one in layer.named_parameters() if adapter_key(name)]


def _merged(parameter: nn.Parameter, layer: LoraLayer) -> torch.Tensor:
    """The weight with the adapter's difference, as PEFT's own merge computes that, added in float32."""
    # Beside the parameter: a merge in place leaves a rounding error in the base in bfloat16, and the base is the
    # reference.
    difference: torch.Tensor = layer.get_delta_weight(TRAINED_ADAPTER)
    return parameter.detach().float() + difference.detach().float()
