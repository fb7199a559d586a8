"""TRL's trainer as one that writes a checkpoint whole, or says that it could not: a disk that fails strands no rank.

A checkpoint is written between collectives: under ZeRO-3 the weights are gathered before rank 0 writes them, and
DeepSpeed's own part begins and ends with a barrier. If a rank left at the write that failed, the others would wait for
it until the watchdog ends them all. So it keeps the error, writes nothing more and goes along to the end.

With engine.py this is the only file that uses private names, here of transformers and DeepSpeed;
tests/trainer/test_engine_contract.py holds both to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from ..errors import DiskFailed
from ..files import disk_errors
from ..gang import ranks

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
            # A write that is not overridden below comes after the last collective, so its failure strands no rank.
            with self._kept():
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
    def _kept(self) -> Iterator[None]:
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
            with self._kept():
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
        with replaced(self.model_wrapped, "save_checkpoint", self._deepspeed_part(self.model_wrapped)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _deepspeed_part(self, engine: Any) -> Callable[..., None]:
        """DeepSpeed's save_checkpoint, with its writes as ours; it writes `latest` just before a barrier, so we do."""
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
            # DeepSpeed loads the folder that `latest` names, so the file is written after all others.
            if ranks.rank() == 0:
                self.write(Path(folder, LATEST).write_text, tag)

        return save_checkpoint

    @contextmanager
    def _writes_of(self, owner: Any, name: str) -> Iterator[None]:
        with replaced(owner, name, partial(self.write, getattr(owner, name))):
            yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A name of a module or an object means something else inside."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
