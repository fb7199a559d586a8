"""Extends TRL's trainer so that a failed write strands no rank. It also saves a half-used
generation, so that a run resumes at any step.

A checkpoint is written between collectives. Under ZeRO-3 the weights are gathered before rank 0
writes them, and DeepSpeed's own part begins and ends with a barrier. If a rank left at the write
that failed, the others would wait for it until the watchdog ends them all. So it keeps the error,
writes nothing more and goes along to the end.

TRL takes several steps on one generation (several iterations, or one generation for several steps)
and keeps it in memory only. Each rank therefore saves the completions, scores and advantages that
are not yet used, and a run resumes at any step. A checkpoint between two generations has no such
file.

Three files use private names. Here they are those of transformers and DeepSpeed; in
training/reference_trainer.py and training/finite_loss.py they are TRL's. The test
tests/trainer/test_engine_contract.py fails when one of them changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from trl import GRPOTrainer

from ..gang import ranks
from ..runtime.durable_files import disk_errors
from ..runtime.errors import DiskFailed

LATEST = "latest"
"""File in which DeepSpeed looks for the name of its own folder of a checkpoint."""


class WritingTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no type information
    """GRPOTrainer whose ranks stay together while files are written."""

    _failures: list[DiskFailed] | None = None
    """What has failed on this rank of what is being written; None while nothing is."""

    @contextmanager
    def written_whole(self) -> Iterator[None]:
        """Surrounds collectives with writes between them: what fails is raised at the end.

        Raises:
            DiskFailed: a write of this rank failed; the others may have written theirs.
        """
        failures = self._failures = []
        try:
            # A write that is not overridden below comes after the last collective, so its failure
            # strands no rank.
            with self._collect_disk_failure():
                yield
        finally:
            self._failures = None
        if failures:
            raise failures[0]

    def write_model(self, folder: str) -> None:
        """Writes the model or the adapter as Hugging Face does. A collective.

        Raises:
            DiskFailed: a write of this rank failed; it has gone along with the others to the end.
        """
        with self.written_whole():
            self.save_model(folder)

    @contextmanager
    def _collect_disk_failure(self) -> Iterator[None]:
        try:
            with disk_errors():
                yield
        except DiskFailed as error:
            # Outside written_whole() no other rank waits in a collective for this one.
            if self._failures is None:
                raise
            self._failures.append(error)

    def write(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Do a write of this rank alone, unless an earlier one has failed."""
        # After a failure the checkpoint can't be whole, so further writes would only fill the disk.
        if not self._failures:
            with self._collect_disk_failure():
                action(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Rank 0's README, before anything else."""
        self.write(super().create_model_card, *args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Rank 0's weights, gathered by now, and what belongs to them."""
        self.write(super()._save, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_deepspeed_enabled:
            self.write(super()._save_optimizer_and_scheduler, output_dir)
            return
        with replace_attribute(
            self.model_wrapped, "save_checkpoint", self._deepspeed_part(self.model_wrapped)
        ):
            super()._save_optimizer_and_scheduler(output_dir)

    def _deepspeed_part(self, engine: Any) -> Callable[..., None]:
        """DeepSpeed's save_checkpoint, with its writes as ours; it writes `latest` just before a
        barrier, so we do."""
        original = engine.save_checkpoint

        @wraps(original)
        def save_checkpoint(folder: str, **options: Any) -> None:
            tag = f"global_step{engine.global_steps}"
            with (
                self._writes_of(engine.checkpoint_engine, "makedirs"),
                self._writes_of(engine.checkpoint_engine, "save"),
                self._writes_of(engine, "_copy_recovery_script"),
            ):
                original(folder, tag=tag, save_latest=False, **options)
            # DeepSpeed loads the folder that `latest` names, so the file is written after all
            # others.
            if ranks.rank() == 0:
                self.write(Path(folder, LATEST).write_text, tag)

        return save_checkpoint

    @contextmanager
    def _writes_of(self, owner: Any, name: str) -> Iterator[None]:
        with replace_attribute(owner, name, partial(self.write, getattr(owner, name))):
            yield


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A name of a module or an object means something else inside. A method of the object's class
    is hidden by it, and left as it is."""
    is_own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


Rollouts = list[dict[str, torch.Tensor]]
"""A generation cut into micro-batches, each a dictionary of TRL's names: tensors of shape
(completions, …) or ()."""


def save_rollouts(folder: Path, rollouts: Rollouts) -> None:
    """Write this rank's part into a checkpoint folder; the caller commits the checkpoint as a
    whole.

    Raises:
        OSError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{part}/{name}": tensor
        for part, batch in enumerate(rollouts)
        for name, tensor in batch.items()
    }
    # copies: the parts are views of one tensor, and safetensors writes no views
    save_file(
        {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()},
        _rollouts_path(folder),
    )


def load_rollouts(folder: Path, device: torch.device, micro_batches: int) -> Rollouts:
    """Load this rank's completions of a checkpoint that was made between two steps of a generation,
    cut into `micro_batches` micro-batches."""
    parts: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, tensor in load_file(_rollouts_path(folder)).items():
        part, _, name = key.partition("/")
        parts[int(part)][name] = tensor.to(device)
    return recut_rollouts([parts[part] for part in sorted(parts)], micro_batches)


def recut_rollouts(rollouts: Rollouts, micro_batches: int) -> Rollouts:
    """Cut a generation into another number of micro-batches, as after a plan that ran out of
    memory."""
    if len(rollouts) == micro_batches:
        return rollouts
    cut: dict[str, Sequence[torch.Tensor]] = {}
    for name, first in rollouts[0].items():
        whole = [batch[name] for batch in rollouts]
        # numbers of the whole generation are the same in each of its micro-batches
        cut[name] = torch.cat(whole).chunk(micro_batches) if first.ndim else [first] * micro_batches
    return [{name: parts[at] for name, parts in cut.items()} for at in range(micro_batches)]


def _rollouts_path(folder: Path) -> Path:
    return folder / f"rollouts-{ranks.rank():05}-of-{ranks.world_size():05}.safetensors"
