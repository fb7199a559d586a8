"""A generation that is half used when a checkpoint is written: completions, scores, advantages; one file per rank.

TRL takes several steps on one generation (several iterations, or one generation for several steps) and keeps it in
memory only. With these files a run resumes at any step; a checkpoint between two generations has none.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..errors import BadInput
from ..gang import ranks

Rollouts = list[dict[str, torch.Tensor]]
"""A generation cut into micro-batches, each a dictionary of TRL's names: tensors of shape (completions, …) or ()."""


def save(folder: Path, rollouts: Rollouts) -> None:
    """Write this rank's part into a checkpoint folder; the caller commits the checkpoint as a whole.

    Raises:
        OSError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{part}/{name}": tensor for part, batch in enumerate(rollouts) for name, tensor in batch.items()}
    # copies: the parts are views of one tensor, and safetensors writes no views
    save_file({key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}, _path(folder))


def load(folder: Path, device: torch.device, micro_batches: int) -> Rollouts:
    """Load this rank's completions of a checkpoint, cut into `micro_batches` micro-batches. A collective.

    Raises:
        BadInput: a rank's file is missing, so that the steps that are left of the generation can't be taken.
    """
    return recut(ranks.together(lambda: _load(folder, device)), micro_batches)


def recut(rollouts: Rollouts, micro_batches: int) -> Rollouts:
    """Cut a generation into another number of micro-batches, as after a plan that ran out of memory."""
    if len(rollouts) == micro_batches:
        return rollouts
    cut: dict[str, Sequence[torch.Tensor]] = {}
    for name, first in rollouts[0].items():
        whole = [batch[name] for batch in rollouts]
        # numbers of the whole generation are the same in each of its micro-batches
        cut[name] = torch.cat(whole).chunk(micro_batches) if first.ndim else [first] * micro_batches
    return [{name: parts[at] for name, parts in cut.items()} for at in range(micro_batches)]


def _load(folder: Path, device: torch.device) -> Rollouts:
    path = _path(folder)
    if not path.exists():
        raise BadInput(
            f"checkpoint {folder} was made between two steps of one generation and has no {path.name} with its "
            "completions, so it can't be continued exactly; go on from an earlier checkpoint, or start a new job"
        )
    parts: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, tensor in load_file(path).items():
        part, _, name = key.partition("/")
        parts[int(part)][name] = tensor.to(device)
    return [parts[part] for part in sorted(parts)]


def _path(folder: Path) -> Path:
    return folder / f"rollouts-{ranks.rank():05}-of-{ranks.world_size():05}.safetensors"
