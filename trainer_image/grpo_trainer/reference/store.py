"""A moved reference in a checkpoint: each rank's own elements as safetensors.

Exists because a synchronised reference is state: TRL rebuilds it from the model on resume, and the KL jumps. One file
without ZeRO-3, written by rank 0; under ZeRO-3 one per rank with its partitions, so that nothing is gathered.
Called by reference/base.py.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .. import partition, ranks
from ..errors import BadInput, WeightsDiffer
from ..fingerprint import fingerprint

FOLDER = "reference"


def save(reference: nn.Module, folder: Path, strategy: str) -> None:
    """Writes `reference/` below a checkpoint folder; the caller commits the checkpoint as a whole."""
    parameters = partition.parameters_by_name(reference)
    sharded = any(map(partition.is_partitioned, parameters.values()))
    if not sharded and ranks.rank() != 0:
        return
    tensors = {}
    for name, parameter in parameters.items():
        with partition.held(parameter) as share:
            tensors[name] = share.tensor.to("cpu", copy=True)
    fingerprints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    about = {"strategy": strategy, "fingerprints": json.dumps(fingerprints)}
    path = _path(folder, sharded)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, about)


def restore(reference: nn.Module, folder: Path, strategy: str) -> None:
    """Fills the reference from a checkpoint folder and proves it against what was saved. A collective.

    Raises:
        BadInput: no reference in it, or of another strategy, shape or world size.
        WeightsDiffer: an element is not what was saved.
    """
    ranks.together(lambda: _restore(reference, folder, strategy))


@torch.no_grad()
def _restore(reference: nn.Module, folder: Path, strategy: str) -> None:
    parameters = partition.parameters_by_name(reference)
    path = _path(folder, any(map(partition.is_partitioned, parameters.values())))
    if not path.exists():
        raise BadInput(
            f"checkpoint {folder} has no {path.name}: it was saved without reference.sync or by another number of "
            "processes; resume with the same sync and world size, or start a new job"
        )
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        if about["strategy"] != strategy or set(file.keys()) != parameters.keys():
            raise BadInput(f"{path}: strategy {about['strategy']} or another model, not {strategy} of this run's model")
        saved = json.loads(about["fingerprints"])
        for name, parameter in parameters.items():
            _fill(name, parameter, file.get_tensor(name), saved[name], path)


def _fill(name: str, parameter: nn.Parameter, tensor: torch.Tensor, saved: str, path: Path) -> None:
    with partition.held(parameter, change=True) as share:
        if share.tensor.shape != tensor.shape or share.tensor.dtype != tensor.dtype:
            raise BadInput(f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, the reference has another shape")
        share.tensor.copy_(tensor)
        found = fingerprint(share.tensor)
    if found != saved:
        raise WeightsDiffer(f"reference parameter {name} from {path} has fingerprint {found}, saved was {saved}")
    partition.release(parameter)


def _path(folder: Path, sharded: bool) -> Path:
    part = f"-{ranks.rank():05}-of-{ranks.world_size():05}" if sharded else ""
    return folder / FOLDER / f"reference{part}.safetensors"
