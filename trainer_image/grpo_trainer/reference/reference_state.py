"""The reference's part of a checkpoint: which weights it began with, and, if it moved, where it is
now.

TRL forgets both. A reference that stays is built from the model again on resume. If the model's
files have changed meanwhile, it would silently be another one, so their fingerprints are kept. With
another config.json or tokenizer the policy would change, too. A synchronised reference is saved:
one safetensors file by rank 0, under ZeRO-3 one per rank with its own partitions, so that nothing
is gathered.

That the checkpoint is whole, and of a run with this strategy, sync, model and world size, is known
by now (checkpoints/manifest.py).
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ..engine_pod.hash_check import config_fingerprint
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


def shared_configuration(folder: Path) -> str:
    """Fingerprint of what lies beside the weights in a model's folder. A collective.

    Raises:
        WeightsDiffer: a rank has other files than the others.
    """
    everyone = ranks.gather(config_fingerprint(folder))
    others = [number for number, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise WeightsDiffer(
            f"{folder}: config.json, generation_config.json or the tokenizer on "
            f"{ranks.rank_names(others)} is another than on rank 0. Compare the model's files on "
            "the nodes"
        )
    return everyone[0]


def save_identity(folder: Path, start: str, configuration: str) -> None:
    """Rank 0 writes which model the checkpoint belongs to: the fingerprints of the start weights
    and of what lay beside them."""
    if ranks.rank() == 0:
        path = folder / FOLDER / IDENTITY
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"start": start, "configuration": configuration}))


def check_identity(folder: Path, start: str, configuration: str) -> None:
    """Whether this run's model begins as the checkpoint's did. A collective.

    Raises:
        BadInput: the model's files have changed since.
    """

    def check() -> None:
        saved = json.loads((folder / FOLDER / IDENTITY).read_text())
        if saved["start"] != start:
            raise BadInput(
                "the model's files have changed since this checkpoint: fingerprint then "
                f"{saved['start']}, now {start}. The reference would be another; restore the files "
                "or pin spec.model.revision"
            )
        # Checkpoints of earlier images have none.
        if saved.get("configuration", configuration) != configuration:
            raise BadInput(
                "the model's config.json, generation_config.json or tokenizer has changed since "
                "this checkpoint; restore the files or pin spec.model.revision"
            )

    ranks.run_on_all(check)


def save_reference(reference: nn.Module, folder: Path) -> None:
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
    path = _path(folder, sharded)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"fingerprints": json.dumps(fingerprints)})


def restore_reference(reference: nn.Module, folder: Path) -> None:
    """Fills the reference from a checkpoint folder and proves it against what was saved. A
    collective.

    Raises:
        WeightsDiffer: an element is not what was saved.
    """
    parameters = parameters_by_name(reference)
    path = _path(folder, any(map(is_partitioned, parameters.values())))

    @torch.no_grad()
    def restore() -> None:
        with safe_open(path, framework="pt") as file:
            saved = json.loads(file.metadata()["fingerprints"])
            for name, parameter in parameters.items():
                _fill(name, parameter, file.get_tensor(name), saved[name], path)

    ranks.run_on_all(restore)


def _fill(name: str, parameter: nn.Parameter, tensor: torch.Tensor, saved: str, path: Path) -> None:
    with local_share(parameter) as share:
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
