"""Begins with the weights of an exported adapter, once it is sure that they mean the same here.

An adapter is a difference to one base, scaled by rank and alpha and placed in certain modules. PEFT
loads what fits and is silent about the rest, so all of that is compared first, and the tensors by
name and shape.
"""

from dataclasses import fields
from pathlib import Path
from re import fullmatch
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

from ..gang import ranks
from ..runtime.errors import BadInput
from . import parameters
from .checkpoint_files import ADAPTER, ADAPTER_CONFIG, open_weights
from .model_files import Source
from .parameters import TRAINED_ADAPTER, adapter_key, base_name, is_bitwise_equal

_SPEC = {"r": "adapter.rank", "lora_alpha": "adapter.alpha"}
"""PEFT's fields in the words of the spec."""

_FREE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "peft_version",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""PEFT's fields that don't change what the weights mean, or are compared otherwise: the base, and
the modules."""


def load_adapter(model: PeftModel, folder: Path, source: Source) -> None:
    """Replace the model's fresh adapter by the exported one in `folder`. A collective, before the
    model is wrapped.

    Each rank reads its own file; that all hold the same is for the proof to say. PEFT makes
    adapters outside of ZeRO-3's zero.Init, so that until training begins they are whole on every
    rank.

    Raises:
        BadInput: it can't be read, or is one of another base, rank, alpha, other modules or shapes.
    """
    tensors = ranks.run_on_all(lambda: _matching_tensors(model, folder, source))
    set_peft_model_state_dict(model, tensors)


def _matching_tensors(model: PeftModel, folder: Path, source: Source) -> dict[str, torch.Tensor]:
    """The adapter's tensors by PEFT's key."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters.parameters_by_name(model).items():
        key = adapter_key(name)
        if key:
            wanted[key] = parameters.shape(parameter)
    saved, shapes = _config(folder), _adapter_shapes(folder, source)
    differences = _base_differences(saved, source)
    differences += _config_differences(saved, model.peft_config[TRAINED_ADAPTER])
    # Which kinds of modules have an adapter, as PEFT resolved the names to modules.
    theirs, ours = _kinds(shapes), _kinds(wanted)
    if theirs != ours:
        differences.append(_difference("adapter.targetModules", theirs, ours))
    # a wrong rank is in every shape: named once is enough
    if problems := differences or _tensor_differences(shapes, wanted):
        raise BadInput(
            f"spec.resumeFrom: the adapter in {folder} can't be the start of this job: "
            f"{'; '.join(problems)}. Set these fields of the spec as they were there, or remove "
            "spec.resumeFrom"
        )
    tensors = load_peft_weights(str(folder), device="cpu")
    return {key: tensors[key] for key in shapes}


def _config(folder: Path) -> PeftConfig:
    try:
        return PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"spec.resumeFrom: {folder / ADAPTER_CONFIG} is no configuration of an adapter: "
            f"{error!r}"
        ) from error


def _adapter_shapes(folder: Path, source: Source) -> dict[str, tuple[int, ...]]:
    """The file's tensors without copies of the base's own, which PEFT saves along where the head
    has an adapter."""
    with open_weights(folder) as files, open_weights(source.folder) as base:
        shapes, copies = files.shapes, set()
        for key in [key for key in shapes if base_name(key) in base.paths]:
            size = torch.Size(shapes[key]).numel()
            dtype = getattr(torch, source.dtype)
            mine = files.read(key, 0, size).to(dtype)
            theirs = base.read(base_name(key), 0, size).to(dtype)
            if mine.shape == theirs.shape and is_bitwise_equal(mine, theirs):
                copies.add(key)
    return {key: shape for key, shape in shapes.items() if key not in copies}


def _base_differences(saved: PeftConfig, source: Source) -> list[str]:
    """What the adapter says of its base; a revision that is no commit says nothing that could be
    compared."""
    name, revision = saved.base_model_name_or_path, saved.revision
    names_commit = bool(revision) and fullmatch("[0-9a-f]{40}", revision) is not None
    problems = []
    if name and name not in (source.name, str(source.folder)):
        problems.append(_difference("model.name", name, source.name))
    elif names_commit and source.revision and revision != source.revision:
        problems.append(_difference("model.revision", revision, source.revision))
    return problems


def _config_differences(saved: PeftConfig, current: LoraConfig) -> list[str]:
    if saved.peft_type != current.peft_type:
        kind = saved.peft_type and saved.peft_type.value
        return [_difference("peft_type", kind, current.peft_type.value)]
    problems: list[str] = []
    for name in [field.name for field in fields(current) if field.name not in _FREE]:
        theirs, ours = getattr(saved, name), getattr(current, name)
        if theirs != ours:
            problems.append(_difference(_SPEC.get(name, name), theirs, ours))
    return problems


def _kinds(keys: dict[str, tuple[int, ...]]) -> list[str]:
    return sorted(
        {key.partition(".lora_")[0].rpartition(".")[2] for key in keys if ".lora_" in key}
    )


def _tensor_differences(
    shapes: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> list[str]:
    """The first tensor that differs, and how many do."""
    keys = sorted(shapes.keys() | wanted.keys())
    wrong = [key for key in keys if shapes.get(key) != wanted.get(key)]
    if not wrong:
        return []
    key = wrong[0]
    first = _difference(key, shapes.get(key, "absent"), wanted.get(key, "absent"))
    return [f"{len(wrong)} tensors of {ADAPTER}, the first is {first}"]


def _difference(field: str, saved: Any, current: Any) -> str:
    return f"{field}: adapter {saved}, now {current}"
