"""Moves the reference towards the policy: reference = mixup * policy + (1 - mixup) * reference.

TRL's SyncRefModelCallback gathers both models whole on every rank under ZeRO-3 (4 bytes per parameter of each in bf16),
and its result is lost on resume. Elementwise mixing needs no gather: policy and reference are partitioned alike, so
each rank mixes its own partitions, in the same operations and so to the same bits.
"""

import torch
from torch import nn

from ..errors import TrainingError
from . import partition


@torch.no_grad()
def mix(policy: nn.Module, reference: nn.Module, mixup: float) -> None:
    """Mixes every parameter once, a tied one too, on this rank's elements. No collective.

    Raises:
        TrainingError: the two models don't have the same parameters in the same partitions.
    """
    targets = partition.parameters_by_name(reference)
    sources = partition.parameters_by_name(policy)
    if targets.keys() != sources.keys():
        different = sorted(targets.keys() ^ sources.keys())
        raise TrainingError(f"policy and reference have different parameters, such as {different[0]}")
    for name, target in targets.items():
        with partition.held(target) as old, partition.held(sources[name]) as new:
            if (old.start, old.stop, old.shape) != (new.start, new.stop, new.shape):
                raise TrainingError(f"policy and reference are partitioned differently at {name}")
            old.tensor.mul_(1.0 - mixup).add_(new.tensor.to(old.tensor.device), alpha=mixup)
        partition.release(target)
