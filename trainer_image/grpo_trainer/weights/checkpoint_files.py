"""The safetensors files of a checkpoint, read slice by slice.

A rank compares its own part of a model with its own copy of the file, and never needs memory for
more than that. Only safetensors: a pickle runs code when it is read, and can't be read in slices.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open

from ..runtime.durable_files import POINTER_REMEDY, is_lfs_pointer, name_unreadable
from ..runtime.errors import BadInput, DiskFailed, is_volume_away

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MAX_NAMES = 4
"""Files that are named where there are no weights."""


@dataclass
class WeightFiles:
    """Tensors of one or more safetensors files by their key. A context manager: files are open only
    inside it."""

    paths: dict[str, Path]
    """Key of every tensor, and the file that has it."""
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its key, from the files' headers."""
        return {
            key: tuple(self._file(path).get_slice(key).get_shape())
            for key, path in self.paths.items()
        }

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, in the file's dtype, on the CPU; shape
        (stop - start,).

        Reads whole rows of the first dimension, since that is what the format can slice without a
        copy of the rest.
        """
        part = self._file(self.paths[key]).get_slice(key)
        shape = part.get_shape()
        if not shape:
            scalar: torch.Tensor = self._file(self.paths[key]).get_tensor(key)
            return scalar.reshape(-1)[start:stop]
        row = math.prod(shape[1:])
        first, last = start // row, -(-stop // row)
        rows: torch.Tensor = part[first:last]
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path]


@name_unreadable()
def open_weights(folder: Path) -> WeightFiles:
    """The weights of a model folder, and of an adapter in it; every file's header is read and its
    length checked.

    Raises:
        BadInput: no safetensors, a shard of the index is missing, or a file can't be read, is
            truncated or no safetensors.
    """
    files = _weight_files(folder)
    if not files:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        raise BadInput(f"model folder {folder} {no_weights_message(names)}")
    return WeightFiles({key: path for path in files for key in _keys(path)})


def no_weights_message(names: Iterable[str]) -> str:
    """What a model lacks, and the `names` of the files that it has instead."""
    # Weights in another format are worth more to the reader than configuration.
    ordered = sorted(names, key=lambda name: (name.endswith((".json", ".txt")), name))
    present = ", ".join(ordered[:MAX_NAMES]) or "nothing"
    return (
        f"has neither {WHOLE} nor {INDEX} nor {ADAPTER}, but {present}; save the model with "
        "save_pretrained (pickles are never read)"
    )


def _weight_files(folder: Path) -> list[Path]:
    """The weight files that a folder should have; a whole file comes before an index, as in
    from_pretrained."""
    whole, adapter = folder / WHOLE, folder / ADAPTER
    files = [whole]
    if not whole.exists():
        files = [folder / name for name in shards(folder)]
    return files + ([adapter] if adapter.exists() else [])


def shards(folder: Path) -> list[str]:
    """Names of the files that the folder's index says the weights are in, sorted; empty without an
    index.

    Raises:
        BadInput: as indexed_files.
    """
    return sorted(set(indexed_files(folder).values()))


@name_unreadable()
def indexed_files(folder: Path) -> dict[str, str]:
    """Names of all tensors, and of the files that the folder's index says they are in; empty
    without an index.

    Raises:
        BadInput: the index is damaged or can't be read.
    """
    index = folder / INDEX
    if not index.exists():
        return {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: os.fspath(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"{index} is no index of weights ({type(error).__name__}); copy the model again"
        ) from error


def _keys(path: Path) -> list[str]:
    try:
        # The header alone is read, for which a preflight needs no torch.
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except FileNotFoundError as error:
        if path.exists():  # safetensors says the same of both
            raise BadInput(
                f"{path} can't be read by user {os.geteuid()}; `chmod -R a+rX` its folder"
            ) from error
        raise BadInput(
            f"{path} is listed in {INDEX} but missing; copy the whole model again"
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        if is_volume_away(error):
            raise DiskFailed(f"{path}: {error}") from error
        if is_lfs_pointer(path):
            raise BadInput(f"{path} {POINTER_REMEDY}") from error
        raise BadInput(
            f"{path} can't be read ({error}); it is truncated or damaged, copy the model again"
        ) from error
