"""A run's folder on an object store: what is where in it, who may write it, and what belongs to nobody.

    <url>/<job>-<uid>/head.json                                  who may commit, and what counts (head.py)
    <url>/<job>-<uid>/attempt-N/checkpoint-S/manifest.json       the files of a checkpoint, with their hashes
    <url>/<job>-<uid>/attempt-N/checkpoint-S/FILE.000000         a file's first part, then .000001 …
    <url>/<job>-<uid>/attempt-N/export/FILE                      the finished model

An attempt writes below its own folder only. What the head doesn't name counts for nothing, and the newest attempt
deletes it, of its own and of older attempts.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome
from grpo_api.text.clock import Clock
from grpo_api.text.contract import ATTEMPT_PREFIX, CHECKPOINT_STORE_ENV, EXPORT_FOLDER, RESUME_STORE_ENV

from ..clock import SYSTEM_CLOCK
from ..errors import BadInput, Denied, Preempted, StoreFailed
from ..paths import MANIFEST, attempt_named, checkpoint_folder, run_folder
from . import head as heads
from .base import Tell, silent
from .head import Committed, Head
from .probe import require_conditions

if TYPE_CHECKING:
    from .client import Store

_ATTEMPT = re.compile(rf"{ATTEMPT_PREFIX}([0-9]{{1,15}})/")
SAVE_WAIT = 60.0
"""Seconds without any answer after which a checkpoint is given up: the next one is due soon, and training goes on."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The folder of one run, for who reads it."""

    store: "Store"

    def head(self) -> Head | None:
        """The head of the run; None before the first claim."""
        return heads.read(self.store)

    def manifest(self, made: Committed) -> bytes | None:
        """A committed checkpoint's manifest; None if it is not the one that was committed."""
        found = self.store.get(f"{checkpoint_key(made.attempt, made.step)}/{MANIFEST}")
        if found is None:
            return None
        content, _ = found
        is_committed = hashlib.sha256(content).hexdigest() == made.manifest
        return content if is_committed else None

    def exported(self) -> str | None:
        """Folder of the finished model; None before there is one."""
        now = self.head()
        if now is None or not now.export:
            return None
        return export_key(now.export)


@dataclass(frozen=True, slots=True)
class RunStore(StoredRun):
    """The run on an object store, for the attempt that writes to it."""

    uid: str
    """uid of the GRPOJob."""
    attempt: int
    keep: int
    """Checkpoints that are kept."""

    def claim(self) -> None:
        """Take the run for this attempt, and clear away what older ones left.

        Raises:
            BadInput: the store can't be used, or the folder is another job's.
            Preempted: a newer attempt has it.
            StoreFailed: the store gave no answer for too long.
        """
        try:
            require_conditions(self.store, attempt_named(self.attempt))
            self.sweep(heads.claim(self.store, self.uid, self.attempt))
        except Denied as error:
            if self.attempt > 1:
                raise
            raise BadInput(f"spec.checkpoint.store: {error}") from error

    def commit(self, step: int, manifest: bytes, time: float) -> None:
        """Make an uploaded checkpoint of this attempt count; what counts no more is deleted.

        Raises:
            Preempted: a newer attempt has the run; what this one uploaded in vain is deleted.
            StoreFailed: the checkpoint may count or not, as if the process had been killed here.
        """
        self.store.put(f"{checkpoint_key(self.attempt, step)}/{MANIFEST}", manifest)
        digest = hashlib.sha256(manifest).hexdigest()
        made = Committed(attempt=self.attempt, step=step, manifest=digest, time=max(0.0, time))
        try:
            stands = self._change(lambda now: heads.with_checkpoint(now, made, self.keep))
        except Preempted:
            self._tidy()
            raise
        self._tidy(stands)

    def withdraw(self, dropped: list[Committed]) -> None:
        """Make checkpoints count no more.

        Raises:
            Preempted, StoreFailed: as commit.
        """
        self._tidy(self._change(lambda now: heads.without_checkpoints(now, dropped)))

    def export(self, folder: Path) -> str:
        """Upload the finished model and make it count; returns its URL.

        Raises:
            Preempted, StoreFailed: as commit.
        """
        where = export_key(self.attempt)
        try:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                self.store.put_file(f"{where}/{path.relative_to(folder).as_posix()}", path)
            stands = self._change(lambda now: now.model_copy(update={"export": self.attempt}))
        except Preempted:
            self._tidy()
            raise
        self._tidy(stands)
        return f"{self.store.url}/{where}"

    def finish(self, outcome: Outcome) -> None:
        """Keep how the run ended, for an attempt that is started although it did.

        Raises:
            Preempted, StoreFailed: as commit.
        """
        self._change(lambda now: now.model_copy(update={"outcome": outcome}))

    def sweep(self, now: Head) -> None:
        """Delete what neither counts nor belongs to a newer attempt.

        Nothing that counts no more ever counts again, so an old attempt that does this late deletes nothing of worth.
        """
        kept = {checkpoint_key(one.attempt, one.step) for one in now.checkpoints}
        kept |= {export_key(now.export)} if now.export else set()
        self.store.delete([key for key in self.store.listed() if self._is_left(key, kept)])

    def _tidy(self, now: Head | None = None) -> None:
        """Sweep once something counts, or is in vain: neither must depend on what is left being deleted."""
        try:
            if stands := now or self.head():
                self.sweep(stands)
        except StoreFailed as error:
            print(f"what counts no more stays until the next checkpoint: {error}", flush=True)

    def _is_left(self, key: str, kept: set[str]) -> bool:
        of = _ATTEMPT.match(key)
        # A newer attempt's files are its own: it may be writing them now.
        if of is None or int(of[1]) > self.attempt:
            return False
        folder = "/".join(key.split("/")[:2])
        return folder not in kept

    def _change(self, changed: heads.Change) -> Head:
        return heads.change(self.store, self.uid, self.attempt, changed)


def checkpoint_key(attempt: int, step: int) -> str:
    """Folder of a checkpoint."""
    return checkpoint_folder(Path(attempt_named(attempt)), step).as_posix()


def export_key(attempt: int) -> str:
    """Folder of an attempt's finished model."""
    return f"{attempt_named(attempt)}/{EXPORT_FOLDER}"


def run_store(
    plan: TrainingPlan,
    tell: Tell = silent,
    environment: Mapping[str, str] = os.environ,
    clock: Clock = SYSTEM_CLOCK,
) -> RunStore | None:
    """The run's folder on its object store; None without spec.checkpoint.store.

    Raises:
        BadInput: as open_store.
    """
    spec, folder = plan.checkpoint.store, run_folder(plan)
    if spec is None or folder is None:
        return None
    from .client import open_store

    settings = _settings(CHECKPOINT_STORE_ENV, environment)
    store = open_store(spec, settings, tell, folder.name, clock)
    return RunStore(store, plan.job.uid, plan.job.attempt, plan.checkpoint.keep)


def source_run(
    plan: TrainingPlan, tell: Tell = silent, environment: Mapping[str, str] = os.environ
) -> StoredRun | None:
    """The run on an object store that spec.resumeFrom names; None if it names a volume or is not set.

    Raises:
        BadInput: as open_store.
    """
    if plan.resume_store is None or plan.resume_from is None:
        return None
    from .client import open_store

    folder = Path(plan.resume_from).name
    return StoredRun(open_store(plan.resume_store, _settings(RESUME_STORE_ENV, environment), tell, folder))


def _settings(prefix: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The client's own, without the prefix under which the pod has them."""
    return {name.removeprefix(prefix): value for name, value in environment.items() if name.startswith(prefix)}
