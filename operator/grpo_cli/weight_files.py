"""Counts the parameters in the safetensors files beside a config.json, without reading any weights.

A header names every tensor with its shape. Where only the index is there, it says how many bytes they have together.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config_file import ConfigUnreadable

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def stored_parameters(folder: Path, config: Mapping[str, Any]) -> int:
    """Parameters in a model folder's safetensors files; 0 where there are none, or nothing tells.

    Raises:
        ConfigUnreadable: a file is there and is damaged.
    """
    folder = folder if folder.is_dir() else folder.parent
    try:
        if (folder / INDEX).is_file():
            return _by_index(folder, json.loads((folder / INDEX).read_bytes()), config)
        return _by_header(folder / WHOLE) if (folder / WHOLE).is_file() else 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigUnreadable(f"{folder}: its safetensors files can't be understood: {error}") from error


def _by_index(folder: Path, index: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """By the headers of the files that the index names, where all are there; else by what it says of their size."""
    shards = {folder / name for name in index["weight_map"].values()}
    if all(shard.is_file() for shard in shards):
        return sum(map(_by_header, shards))
    about = index.get("metadata") or {}
    if about.get("total_parameters"):
        return int(about["total_parameters"])
    width = DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 0)
    return int(about.get("total_size", 0)) // width if width else 0


def _by_header(file: Path) -> int:
    """Elements of all tensors of one file: 8 bytes with the length of a JSON object of dtypes and shapes come first."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"the header of {file.name} has {length} bytes")
        header = json.loads(stream.read(length))
    return sum(math.prod(map(int, about["shape"])) for name, about in header.items() if name != "__metadata__")
