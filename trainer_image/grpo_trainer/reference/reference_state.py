"""The reference's part of a checkpoint: which weights it began with, and, if it moved, where it is
now.

TRL forgets both. A reference that stays is built from the model again on resume. If the model's
files have changed meanwhile, it would silently be another one, so their fingerprint is kept. A
synchronised one is saved: one safetensors file by rank 0, under ZeRO-3 one per rank with its own
partitions, so that nothing is gathered.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ..gang import ranks
from ..runtime.errors import BadInput, WeightsDiffer
from ..weights.parameters import (
    fingerprint,
    is_partitioned,
    local_share,
    parameters_by_name,
    release,
)

FOLDER = "reference"
IDENTITY = "identity.json"


def save_identity(folder: Path, strategy: str, start: str) -> None:
    """Rank 0 writes which reference the checkpoint belongs to; `start` is the fingerprint of the
    start weights."""
    if ranks.rank() == 0:
        path = folder / FOLDER / IDENTITY
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"strategy": strategy, "start": start}))


def check_identity(folder: Path, strategy: str, start: str) -> None:
    """Whether this run's reference begins as the checkpoint's did. A collective.

    Raises:
        BadInput: another strategy, or the model's files have changed since.
    """
    ranks.run_on_all(
        lambda: _check_identity(folder / FOLDER / IDENTITY, {"strategy": strategy, "start": start})
    )


def _check_identity(path: Path, current: dict[str, str]) -> None:
    if not path.exists():
        raise BadInput(
            f"checkpoint {path.parent.parent} does not say which reference it had; start a new job"
        )
    saved = json.loads(path.read_text())
    if saved["strategy"] != current["strategy"]:
        raise BadInput(
            f"{path}: reference strategy {saved['strategy']}, this run's is {current['strategy']}"
        )
    if saved["start"] != current["start"]:
        raise BadInput(
            "the model's files have changed since this checkpoint: fingerprint then "
            f"{saved['start']}, now {current['start']}. The reference would be another; restore "
            "the files or pin spec.model.revision"
        )


def save_reference(reference: nn.Module, folder: Path, strategy: str) -> None:
    """Writes `reference/` below a checkpoint folder; the caller commits the checkpoint as a
    whole."""
    parameters = parameters_by_name(reference)
    sharded = any(map(is_partitioned, parameters.values()))
    if not sharded and ranks.rank() != 0:
        return
    tensors = {}
    for name, parameter in parameters.items():
        with local_share(parameter) as share:
            tensors[name] = share.tensor.to("cpu", copy=True)
    fingerprints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    about = {"strategy": strategy, "fingerprints": json.dumps(fingerprints)}
    path = _path(folder, sharded)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, about)


def restore_reference(reference: nn.Module, folder: Path, strategy: str) -> None:
    """Fills the reference from a checkpoint folder and proves it against what was saved. A
    collective.

    Raises:
        BadInput: no reference in it, or of another strategy, shape or world size.
        WeightsDiffer: an element is not what was saved.
    """
    ranks.run_on_all(lambda: _restore(reference, folder, strategy))


@torch.no_grad()
def _restore(reference: nn.Module, folder: Path, strategy: str) -> None:
    parameters = parameters_by_name(reference)
    path = _path(folder, any(map(is_partitioned, parameters.values())))
    if not path.exists():
        raise BadInput(
            f"checkpoint {folder} has no {path.name}: it was saved without reference.sync or by "
            "another number of "
            "processes; resume with the same sync and world size, or start a new job"
        )
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        if about["strategy"] != strategy or set(file.keys()) != parameters.keys():
            raise BadInput(
                f"{path}: strategy {about['strategy']} or another model, not {strategy} of this "
                "run's model"
            )
        saved = json.loads(about["fingerprints"])
        for name, parameter in parameters.items():
            _fill(name, parameter, file.get_tensor(name), saved[name], path)


def _fill(name: str, parameter: nn.Parameter, tensor: torch.Tensor, saved: str, path: Path) -> None:
    with local_share(parameter) as share:
        if share.tensor.shape != tensor.shape or share.tensor.dtype != tensor.dtype:
            raise BadInput(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, the reference has "
                "another shape"
            )
        share.tensor.copy_(tensor)
        actual = fingerprint(share.tensor)
    if actual != saved:
        raise WeightsDiffer(
            f"reference parameter {name} from {path} has fingerprint {actual}, saved was {saved}"
        )
    release(parameter)


def _path(folder: Path, sharded: bool) -> Path:
    part = f"-{ranks.rank():05}-of-{ranks.world_size():05}" if sharded else ""
    return folder / FOLDER / f"reference{part}.safetensors"
