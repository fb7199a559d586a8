"""Learns where an engine keeps what the trainer sends it: which elements of which live tensor each
name writes.

vLLM fuses and splits tensors (query, key and value into one, rows over GPUs), each model in its own
way. No table of names says how. Instead the engine's own `load_weights` is watched while it loads,
one name at a time, and what it copies where is written down. So a proof covers what the engine
computes with, whatever the model. A model is refused whose parameters are not all filled so, or
which keeps other tensors that it derives from them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Elements of a storage: offset, size and stride, as torch.as_strided has them."""
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""The engine's load_weights: takes names with tensors."""


@dataclass(frozen=True, slots=True)
class Write:
    """A copy of a part of a sent tensor into a live parameter."""

    parameter: str
    """The live parameter."""
    target: Strided
    """Which of its storage's elements."""
    source: Strided | None
    """Which elements of the tensor that was sent; None: zeros, which fill the vocabulary up."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The live elements that each name fills, and the problems that rule out a proof."""

    writes: Mapping[str, list[Write]] = field(default_factory=dict)
    """By the name that was sent."""
    problems: list[str] = field(default_factory=list)
    """Why this engine's weights can't be proven; empty where they can."""


def learn_layout(
    model: nn.Module, load: Load, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Layout:
    """Load every name once, with meaningless values, and see what is written. The model needs its
    weights after it. `shapes` are those of the tensors that will be sent, by name."""
    owners = _owners(model)
    device = next(model.parameters()).device
    writes: dict[str, list[Write]] = {}
    problems = _deriving_modules(model)
    # One name at a time, so that every write is known to come from that name. The values are not
    # checked.
    for name, shape in shapes.items():
        source = torch.empty(shape, dtype=dtype, device=device)
        watch = _Watch(owners, source)
        with watch:
            refusal = _refusal(load, name, source)
        writes[name] = watch.writes
        tensor_problems = watch.problems or refusal
        if not tensor_problems and not watch.writes:
            tensor_problems = ["the engine has no place for it"]
        problems += [f"{name}: {problem}" for problem in tensor_problems]
    problems += _uncovered_parameters(model, owners, writes) + _random_buffers(model)
    return Layout(writes, problems)


_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


def _refusal(load: Load, name: str, tensor: torch.Tensor) -> list[str]:
    """Load one tensor; what the engine has against it, which each of its models says in another
    way."""
    try:
        load([(name, tensor)])
    # RuntimeErrors, too, but of the GPU: another process may learn this model.
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except _REFUSALS as error:
        return [f"the engine refuses it: {str(error)[:200] or type(error).__name__}"]
    return []


def live_part(model: nn.Module, write: Write) -> torch.Tensor:
    """The elements that a write fills: a view of the live parameter in its dtype, of the shape of
    `write.target`."""
    offset, size, stride = write.target
    return torch.as_strided(model.get_parameter(write.parameter).detach(), size, stride, offset)


def source_part(tensor: torch.Tensor, source: Strided) -> torch.Tensor:
    """The elements of a contiguous tensor that a write takes: a view in its dtype, of the shape of
    `source`."""
    offset, size, stride = source
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _owners(model: nn.Module) -> dict[int, str]:
    """A parameter's name by the address of its storage; a tied one has its first name."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        # Weights that are packed away leave an empty parameter, whose storage has no address of its
        # own.
        if parameter.numel():
            owners.setdefault(_address(parameter), name)
    return owners


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def parameter_views(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """By each of a parameter's names: its dtype, the address of its storage, and the elements of it
    that the parameter is. A proof hashes storages, in which another view of the same bits and an
    untied copy don't show; and a CUDA graph goes on with the memory that it was captured with."""
    return {
        name: (parameter.dtype, _address(parameter), *_strided_region(parameter))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


class _Watch(TorchDispatchMode):
    """Sees every operation that writes into the storage of a parameter or of the sent tensor."""

    def __init__(self, owners: Mapping[int, str], source: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners
        self._source = _address(source)
        self.writes: list[Write] = []
        self.problems: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info and argument.alias_info.is_write
            if is_written and isinstance(value, torch.Tensor):
                self._record_write(func._schema.name, value, args)
        return func(*args, **kwargs)

    def _record_write(self, operation: str, target: torch.Tensor, args: Any) -> None:
        owner = self._owners.get(_address(target)) if target.numel() else None
        # A colocated engine is sent the policy's own memory, and what lies there is hashed later.
        if target.numel() and _address(target) == self._source:
            self.problems.append(f"the engine changes it by {operation}")
        if owner is None:
            return
        # vLLM pads the vocabulary with rows of zeros, which no sent tensor has.
        is_fill = operation == "aten::fill_" and not isinstance(args[1], torch.Tensor)
        fills_zero = is_fill and args[1] == 0
        # A copy of another size is broadcast, and one to another type is cast: the engine would
        # derive the parameter from the sent tensor.
        is_copy = operation == "aten::copy_" and _address(args[1]) == self._source
        is_same = is_copy and (args[1].size(), args[1].dtype) == (target.size(), target.dtype)
        if fills_zero or operation == "aten::zero_":
            self.writes.append(Write(owner, _strided_region(target), None))
        elif is_same:
            self.writes.append(Write(owner, _strided_region(target), _strided_region(args[1])))
        else:
            self.problems.append(f"{operation} derives {owner} from it")


def _strided_region(tensor: torch.Tensor) -> Strided:
    return int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride())


def _uncovered_parameters(
    model: nn.Module, owners: Mapping[int, str], writes: Mapping[str, list[Write]]
) -> list[str]:
    """The live parameters with elements that no name writes; tied ones are written through one of
    them."""
    targets: dict[str, list[Strided]] = {}
    for group in writes.values():
        for write in group:
            targets.setdefault(write.parameter, []).append(write.target)
    problems: list[str] = []
    for name, parameter in model.named_parameters():
        owner = owners.get(_address(parameter), name)
        problem = _hole(name, parameter, targets.get(owner, []))
        if problem:
            problems.append(problem)
    return problems


def _hole(name: str, parameter: nn.Parameter, targets: list[Strided]) -> str | None:
    if not parameter.numel():
        return f"{name}: its values are packed away, where nothing can read them"
    # Elements of the storage are marked, since tied parameters and views share one.
    elements = parameter.untyped_storage().nbytes() // parameter.element_size()
    written_mask = torch.zeros(elements, dtype=torch.bool, device=parameter.device)
    for offset, size, stride in targets:
        torch.as_strided(written_mask, size, stride, offset).fill_(True)
    offset, size, stride = _strided_region(parameter)
    missing = parameter.numel() - int(torch.as_strided(written_mask, size, stride, offset).sum())
    if not missing:
        return None
    return f"{name}: {missing} of {parameter.numel()} elements are filled by nothing that is sent"


_RESET = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
"""Buffers that vLLM sets to 1 after loading (attention.py, set_default_quant_scales)."""


def _random_buffers(model: nn.Module) -> list[str]:
    """The buffers that dummy weights fill with random numbers, such as Gemma 4's layer_scalar."""
    saved = model.state_dict(keep_vars=True)
    return [
        f"{name}: a buffer of the checkpoint, which is filled by nothing that is sent"
        for name, buffer in model.named_buffers()
        if name in saved and buffer.is_floating_point() and not name.endswith(_RESET)
    ]


_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's methods for layers that compute with the parameters as they were loaded."""
_DERIVING = ("FusedMoE", "MLAAttention", "MultiHeadLatentAttention")
"""Beginnings of the names of vLLM's modules that compute with other tensors, made of the parameters
after loading."""


def _deriving_modules(model: nn.Module) -> list[str]:
    """The modules that don't compute with their parameters as they are."""
    problems = []
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if type(module).__name__.startswith(_DERIVING):
            problems.append(
                f"{name}: a {type(module).__name__} computes with tensors that it derives from "
                "its weights"
            )
        elif hasattr(module, "quant_method") and method not in _PLAIN:
            problems.append(f"{name}: {method} computes with weights in another form")
    return problems
