"""A run's folder on an object store: what is where in it, who may write it, and what may be
deleted.

    <url>/<job>-<uid>/head.json    who may commit, and what counts
    attempt-N/                     beside it, and below it:
      checkpoint-S/manifest.json   the files of a checkpoint, with their hashes
      checkpoint-S/FILE.000000     a file's first part, then .000001 …
      metrics.jsonl, samples.jsonl its history, of the newest attempt
      export/FILE                  the finished model

An attempt writes below its own folder only. What the head doesn't name counts for nothing, and the
newest attempt deletes it, of its own and of older attempts.

The head is one small object, both fence and pointer. It is written only under the condition that it
is still what was read. So of two attempts that live at once the older can't move it any more, and
what that one has uploaded belongs to nobody. A write that is refused, or whose answer is lost, may
have been carried out; the nonce that is read then tells.

Some stores that speak S3 ignore conditions; on such a store two such attempts could both commit.
Each attempt therefore tries both conditions before it claims a run.
"""

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationError, field_validator

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import files_of
from grpo_api.report.history import HISTORY_FILES, METRICS_FILE, newest_history
from grpo_api.report.report import Outcome
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.text.base import Model
from grpo_api.text.clock import Clock
from grpo_api.text.contract import (
    ATTEMPT_PREFIX,
    CHECKPOINT_STORE_ENV,
    EXPORT_FOLDER,
    RESUME_STORE_ENV,
)

from ..runtime.clock import SYSTEM_CLOCK, OnWait, ignore_wait
from ..runtime.errors import BadInput, Denied, Preempted, StoreFailed
from ..runtime.paths import MANIFEST, attempt_folder_name, checkpoint_folder

if TYPE_CHECKING:
    from .store_client import Store

log = logging.getLogger(__name__)

HEAD = "head.json"
HEAD_TRIES = 100
"""Refused writes after which a store is taken for one that refuses everything."""

HeadChange = Callable[["Head"], "Head"]


class CommittedCheckpoint(Model):
    """A checkpoint that counts."""

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that made it, and below whose folder it is."""
    step: Annotated[int, Field(ge=1)]
    """Finished optimizer steps."""
    manifest: str
    """sha256 of its manifest."""
    time: Annotated[float, Field(ge=0)] = 0.0
    """When it was committed, in unix seconds of that attempt's rank 0."""

    @property
    def key(self) -> str:
        """Its folder."""
        return checkpoint_key(self.attempt, self.step)


class Head(Model):
    """The state of a run on an object store: its newest attempt and what counts."""

    uid: str
    """uid of the GRPOJob."""
    attempt: Annotated[int, Field(ge=1)]
    """The newest attempt that claimed the run; it alone moves the head."""
    nonce: str = ""
    """Another one in every write, by which a writer knows its own."""
    checkpoints: list[CommittedCheckpoint] = []
    """Those that count, in the order in which they were committed."""
    export: Annotated[int, Field(ge=1)] | None = None
    """The attempt below whose folder the finished model is."""
    outcome: Outcome | None = None
    """How the attempt ended that finished the run."""

    @field_validator("outcome", mode="before")
    @classmethod
    def _of_any_image(cls, outcome: object) -> object:
        """A newer image may say more of an end. What it adds to the head may name what counts, so
        it is not left out."""
        return Outcome.model_validate(outcome, extra="ignore") if outcome is not None else None


def _parsed_head(store: "Store", data: bytes) -> Head:
    try:
        return Head.model_validate_json(data)
    except ValidationError as error:
        raise BadInput(
            f"{store.url}/{HEAD} is not a run's head: {error.errors()[0]['msg']}"
        ) from error


def require_conditions(store: "Store", folder: str) -> None:
    """Try both conditions that writes of the head need, with an object made for this.

    Raises:
        BadInput: the store takes If-None-Match twice, or an If-Match that doesn't match.
        StoreFailed: as Store.get.
    """
    key = f"{folder}/probe-{uuid.uuid4().hex}"
    store.put_if_unchanged(key, b"first", None)
    try:
        if store.put_if_unchanged(key, b"second", None):
            raise _no_conditions_error(store, "If-None-Match: *", "twice for one object")
        stored = store.get(key)
        stale = stored[1] if stored else None
        store.put_if_unchanged(key, b"third", stale)
        if store.put_if_unchanged(key, b"fourth", stale):
            raise _no_conditions_error(store, "If-Match", "with the ETag of an earlier version")
    finally:
        store.delete([key])


def _no_conditions_error(store: "Store", condition: str, how: str) -> BaseException:
    return BadInput(
        f"{store.url}: this store took a write with {condition} {how}, so it doesn't keep "
        "conditions and can't tell the newest attempt from an old one. Use a store with "
        "conditional writes (docs/how-to/models/object-stores.md), or a volume"
    )


_ATTEMPT = re.compile(rf"{ATTEMPT_PREFIX}([0-9]{{1,15}})/")
SAVE_WAIT = 60.0
"""Seconds without any answer after which a checkpoint is given up: the next one is due soon, and
training goes on."""
HISTORY_WAIT = 10.0
"""The same for a history that is sent."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The folder of one run, for who reads it."""

    store: "Store"

    def head(self) -> Head | None:
        """The head of the run; None before the first claim.

        Raises:
            BadInput: the object is not a head.
            StoreFailed: as Store.get.
        """
        stored = self.store.get(HEAD)
        return _parsed_head(self.store, stored[0]) if stored else None

    def manifest(self, checkpoint: CommittedCheckpoint) -> bytes | None:
        """A committed checkpoint's manifest; None if it is not the one that was committed."""
        stored = self.store.get(f"{checkpoint.key}/{MANIFEST}")
        if stored is None:
            return None
        content, _ = stored
        is_committed = hashlib.sha256(content).hexdigest() == checkpoint.manifest
        return content if is_committed else None

    def export_folder(self) -> str | None:
        """Folder of the finished model; None before there is one."""
        now = self.head()
        if now is None or not now.export:
            return None
        return export_key(now.export)

    def history_keys(self) -> dict[str, str]:
        """Keys of the newest attempt's history files, by their names."""
        if self.head() is None:
            return {}
        return newest_history(self.store.object_sizes())


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
            require_conditions(self.store, attempt_folder_name(self.attempt))
            self.sweep(self.claim_head())
        except Denied as error:
            if self.attempt > 1:
                raise
            raise BadInput(f"spec.checkpoint.store: {error}") from error

    def claim_head(self) -> Head:
        """Take the run for this attempt; older ones can't commit from now on.

        Raises:
            BadInput: as claim; or the head is gone, and with it what counts of the checkpoints.
            Preempted, StoreFailed: as claim.
        """
        if self.head() is None:
            self._require_new_run()

        def with_attempt(head: Head) -> Head:
            return head.model_copy(update={"attempt": self.attempt})

        return self._move_head(with_attempt, Head(uid=self.uid, attempt=self.attempt))

    def _require_new_run(self) -> None:
        # A manifest is only ever written below a head. Without this check a lost head would cost
        # all checkpoints: what no head names is deleted.
        keys = self.store.object_sizes(may_be_empty=True)
        manifests = [key for key in keys if key.endswith(f"/{MANIFEST}")]
        if manifests and self.head() is None:
            raise BadInput(
                f"{self.store.url}/{HEAD} is gone, which names the checkpoints that count, such as "
                f"{manifests[0]}. Restore it, or delete the folder to start again at step 0"
            )

    def commit(self, step: int, manifest: bytes, time: float) -> None:
        """Make an uploaded checkpoint of this attempt count; what counts no more is deleted.

        Raises:
            Preempted: a newer attempt has the run; what this one uploaded in vain is deleted.
            StoreFailed: the checkpoint may count or not, as if the process had been killed here.
        """
        digest = hashlib.sha256(manifest).hexdigest()
        new_checkpoint = CommittedCheckpoint(
            attempt=self.attempt, step=step, manifest=digest, time=max(0.0, time)
        )
        self.store.put(f"{new_checkpoint.key}/{MANIFEST}", manifest)

        def with_checkpoint(now: Head) -> Head:
            # The `keep` that were committed last: the step says less, for a run goes back behind a
            # checkpoint that is damaged.
            others = [each for each in now.checkpoints if each.key != new_checkpoint.key]
            return now.model_copy(update={"checkpoints": [*others, new_checkpoint][-self.keep :]})

        self._move_head_and_tidy(with_checkpoint)

    def withdraw(self, keys: Collection[str]) -> None:
        """Make the checkpoints in these folders count no more.

        Raises:
            Preempted, StoreFailed: as commit.
        """

        def without_dropped(now: Head) -> Head:
            checkpoints = [each for each in now.checkpoints if each.key not in keys]
            return now.model_copy(update={"checkpoints": checkpoints})

        self._tidy(self._move_head(without_dropped))

    def export(self, folder: Path) -> str:
        """Upload the finished model and make it count; returns its URL.

        Raises:
            Preempted, StoreFailed: as commit.
        """
        where = export_key(self.attempt)
        for name, path in files_of(folder).items():
            self.store.put_file(f"{where}/{name}", path)
        self._move_head_and_tidy(lambda now: now.model_copy(update={"export": self.attempt}))
        return f"{self.store.url}/{where}"

    def fetch_rows(self, folder: Path) -> None:
        """Bring the newest attempt's rows to their place below the run's folder on this node.

        Raises:
            OSError: the disk fails, or is full. StoreFailed: as Store.get.
        """
        key = self.history_keys().get(METRICS_FILE)
        if key:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(b"".join(self.store.stream(key)))

    def send_history(self, attempt_folder: Path) -> None:
        """Upload the history files of this attempt. They count for nothing in a resume, so the head
        does not name them.

        Raises:
            StoreFailed: as Store.get.
        """
        for name in HISTORY_FILES:
            path = attempt_folder / name
            if path.exists():
                self.store.put_file(f"{attempt_folder_name(self.attempt)}/{name}", path)

    def finish(self, outcome: Outcome) -> None:
        """Keep how the run ended, for an attempt that is started although it did.

        Raises:
            Preempted, StoreFailed: as commit.
        """
        self._move_head(lambda now: now.model_copy(update={"outcome": outcome}))

    def sweep(self, now: Head) -> None:
        """Delete what neither counts nor belongs to a newer attempt.

        Nothing that counts no more ever counts again, so an old attempt that does this late deletes
        nothing of worth.
        """
        current = {each.key for each in now.checkpoints}
        current |= {export_key(now.export)} if now.export else set()
        keys = self.store.object_sizes()
        current |= set(newest_history(keys).values())
        self.store.delete([key for key in keys if self._is_left(key, current)])

    def _move_head_and_tidy(self, changed: HeadChange) -> None:
        """Move the head, then delete what counts no more; without the run, what was uploaded in
        vain."""
        try:
            stands = self._move_head(changed)
        except Preempted:
            self._tidy()
            raise
        self._tidy(stands)

    def _tidy(self, now: Head | None = None) -> None:
        """Sweep once something counts, or is in vain: neither must depend on what is left being
        deleted."""
        try:
            if stands := now or self.head():
                self.sweep(stands)
        except StoreFailed as error:
            log.warning(f"what counts no more stays until the next checkpoint: {error}")

    def _is_left(self, key: str, current: set[str]) -> bool:
        of = _ATTEMPT.match(key)
        # A newer attempt's files are its own: it may be writing them now.
        if of is None or int(of[1]) > self.attempt:
            return False
        folder = "/".join(key.split("/")[:2])
        return folder not in current

    def _move_head(self, changed: HeadChange, first: Head | None = None) -> Head:
        """Write the changed head, if this attempt still has the run, until a write of ours
        succeeds; what stands then. `first`: the head to write if the store has none."""
        own_nonces: set[str] = set()
        for _ in range(HEAD_TRIES):
            stored = self.store.get(HEAD)
            head = _parsed_head(self.store, stored[0]) if stored else None
            if head and head.nonce in own_nonces:
                return head
            if head is None and first is None:
                gone = f"{self.store.url}/{HEAD} is gone"
                raise StoreFailed(f"{gone}; somebody deleted it while the run was going on")
            if head:
                self._require_newest(head)
            new = (changed(head) if head else first).model_copy(update={"nonce": uuid.uuid4().hex})  # type: ignore[union-attr]
            own_nonces.add(new.nonce)
            version = stored[1] if stored else None
            if self.store.put_if_unchanged(HEAD, new.model_dump_json().encode(), version):
                return new
        refused = f"{HEAD_TRIES} writes were refused, although nobody else made one"
        raise StoreFailed(f"{self.store.url}/{HEAD}: {refused}")

    def _require_newest(self, head: Head) -> None:
        if head.uid != self.uid:
            raise BadInput(
                f"{self.store.url} belongs to the job with uid {head.uid}, this one is "
                f"{self.uid}; name another folder"
            )
        if head.attempt > self.attempt:
            raise Preempted(
                f"attempt {self.attempt} is superseded by attempt {head.attempt}, which has "
                f"{self.store.url}"
            )


def checkpoint_key(attempt: int, step: int) -> str:
    """Folder of a checkpoint."""
    return checkpoint_folder(Path(attempt_folder_name(attempt)), step).as_posix()


def export_key(attempt: int) -> str:
    """Folder of an attempt's finished model."""
    return f"{attempt_folder_name(attempt)}/{EXPORT_FOLDER}"


def run_store(
    plan: TrainingPlan, *, on_answer: OnWait = ignore_wait, clock: Clock = SYSTEM_CLOCK
) -> RunStore | None:
    """The folder of the plan's run on its object store, of the same name as that on a node; None
    without spec.checkpoint.store.

    Raises:
        BadInput: as open_store.
    """
    store_spec, directory = plan.checkpoint.store, plan.checkpoint_directory
    if store_spec is None or directory is None:
        return None
    from .store_client import open_store

    settings = _settings(CHECKPOINT_STORE_ENV)
    store = open_store(store_spec, settings, on_answer, Path(directory).name, clock)
    return RunStore(store, plan.job.uid, plan.job.attempt, plan.checkpoint.keep)


def source_run(
    folder: str, store: ObjectStoreSpec | None, on_answer: OnWait = ignore_wait
) -> StoredRun | None:
    """The run on an object store that spec.resumeFrom names; None if it names a volume.

    `folder` is the plan's resume_from: the run's folder has the same name on the store.

    Raises:
        BadInput: as open_store.
    """
    if store is None:
        return None
    from .store_client import open_store

    settings = _settings(RESUME_STORE_ENV)
    return StoredRun(open_store(store, settings, on_answer, Path(folder).name))


def _settings(prefix: str) -> dict[str, str]:
    """The client's own, without the prefix under which the pod has them, and without the newline
    that a Secret made from a file often ends with: the client panics at it."""
    return {
        name.removeprefix(prefix): value.strip()
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }
