"""Chooses the checkpoint that an attempt continues from, the same on all ranks, and checks it
before it is loaded.

A damaged checkpoint is passed over for the one before it; another run's is rejected. Where
spec.resumeFrom leads to no checkpoint but to an exported adapter, its weights are the start of a
new run.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_api.text.contract import EXPORT_FOLDER

from ..gang import ranks
from ..runtime.errors import BadInput, DiskFailed, Diverged
from ..runtime.paths import CHECKPOINTS
from ..weights.checkpoint_files import ADAPTER, ADAPTER_CONFIG
from .checkpoint_target import CheckpointSource, CheckpointTarget
from .hashing import UNREADABLE
from .manifest import Manifest, require_continuable, require_same_run
from .volume_checkpoints import read_manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The checkpoint or the adapter that an attempt begins with; a fresh start has neither."""

    checkpoint: Path | None = None
    """The checkpoint to continue."""
    adapter: Path | None = None
    """The exported adapter whose weights a new run begins with, at step 0."""


Outdated = Callable[[Manifest], bool]
"""Whether a checkpoint was trained on what the run leaves out now."""


def begin(
    target: CheckpointTarget | None,
    source: CheckpointSource | None,
    identity: dict[str, str],
    method: str,
    outdated: Outdated = lambda _: False,
) -> Beginning:
    """The checkpoint to continue; without one, the exported adapter that spec.resumeFrom names. A
    collective. `target` has the run's own checkpoints, `source` those of spec.resumeFrom.

    Raises:
        Diverged: as choose.
        BadInput: as choose; or spec.resumeFrom leads to neither a checkpoint nor an adapter, or to
            an adapter although all parameters are trained.
    """
    checkpoint = choose(target, source, identity, outdated)
    if checkpoint is not None or source is None:
        return Beginning(checkpoint=checkpoint)
    source.bring_export()
    adapters = ranks.run_on_rank0(lambda: _adapters_of(source.folder))
    if not adapters:
        raise BadInput(
            f"spec.resumeFrom: {source.run_address} has no complete checkpoint and no exported "
            "adapter; name a run's folder, a checkpoint's or an exported adapter's"
        )
    if method != "LoRA":
        raise BadInput(
            f"spec.resumeFrom: {adapters[0]} is an exported adapter, but this run trains all "
            f"parameters (plan.method {method}). Set adapter.use: Always, or merge it and name the "
            "model in spec.model"
        )
    return Beginning(adapter=adapters[0])


def choose(
    target: CheckpointTarget | None,
    source: CheckpointSource | None,
    identity: dict[str, str],
    outdated: Outdated = lambda _: False,
) -> Path | None:
    """The newest complete, undamaged checkpoint of the run; if the run has none, of
    spec.resumeFrom; else None.

    An outdated checkpoint is never chosen. The run's own outdated checkpoints are withdrawn: no
    later attempt uses them. A collective.

    Raises:
        Diverged: there are checkpoints but all are outdated.
        BadInput: that checkpoint belongs to a different run, or there are checkpoints but all are
            damaged.
        DiskFailed: a disk gives none of them.
    """
    # spec.resumeFrom is only where the run began: its own checkpoints have come further.
    if target and (checkpoints := target.list_checkpoints()):
        usable = _usable_checkpoints(checkpoints, outdated)
        newest = _newest_undamaged(
            usable,
            lambda checkpoint: require_same_run(checkpoint, read_manifest(checkpoint), identity),
            target,
            "delete them to start again at step 0",
        )
        # Withdrawn, so that no later attempt goes back to what this run diverged on.
        if dropped := set(checkpoints) - set(usable):
            target.withdraw(dropped)
        return newest
    return _choose_of_source(source, identity, outdated) if source else None


def _choose_of_source(
    source: CheckpointSource, identity: dict[str, str], outdated: Outdated
) -> Path | None:
    checkpoints = source.list_checkpoints()
    while checkpoints:
        try:
            return _newest_undamaged(
                _usable_checkpoints(checkpoints, outdated),
                lambda checkpoint: require_continuable(
                    checkpoint, read_manifest(checkpoint), identity
                ),
                source,
                "name another run in spec.resumeFrom, or remove it",
            )
        except (_NoneUndamagedError, _NoneReadableError):
            # The other run may go on, so its rotation may have deleted what was listed.
            source.remove_copies()
            listed = source.list_checkpoints()
            if set(listed) <= set(checkpoints):
                raise
            checkpoints = listed
    return None


def _usable_checkpoints(checkpoints: list[Path], outdated: Outdated) -> list[Path]:
    """The checkpoints that aren't outdated, by rank 0's reading. One whose manifest can't be read
    is found damaged later. Raises Diverged if none is left."""

    def usable() -> list[Path]:
        return [checkpoint for checkpoint in checkpoints if not _is_outdated(checkpoint, outdated)]

    remaining = ranks.run_on_rank0(usable)
    if not remaining:
        names = ", ".join(map(str, checkpoints))
        raise Diverged(
            f"every checkpoint ({names}) was trained on what the run diverged on, so no checkpoint "
            "is left to go back to. Raise checkpoint.keep, or lower checkpoint.everySteps, in a "
            "new job"
        )
    return remaining


def _is_outdated(checkpoint: Path, outdated: Outdated) -> bool:
    try:
        return outdated(read_manifest(checkpoint))
    except BadInput:
        # A manifest that can't be read is damage, which `_newest_undamaged` reports.
        return False


def _adapters_of(folder: Path) -> list[Path]:
    """The folder itself or its export, whichever is an exported adapter; empty if neither is.

    A checkpoint of a LoRA run has the same files. Without a manifest it may be half written, so it
    is left out.
    """
    for candidate in (folder, folder / EXPORT_FOLDER):
        is_adapter = (candidate / ADAPTER_CONFIG).is_file() and (candidate / ADAPTER).is_file()
        if is_adapter and not candidate.match(CHECKPOINTS):
            return [candidate]
    return []


class _NoneUndamagedError(BadInput):
    """Every checkpoint is damaged, or gone."""


class _NoneReadableError(DiskFailed):
    """A disk gives no checkpoint, or what was listed is gone."""


def _newest_undamaged(
    checkpoints: list[Path],
    require: Callable[[Path], None],
    source: CheckpointSource,
    remedy: str,
) -> Path:
    """The first that is undamaged, which must be one to go on from; `source` brings its files to
    this node, and `remedy` says what a user can do where all are damaged."""
    damaged = []
    for checkpoint in checkpoints:
        # Each rank brings its share; a problem that several find is named once.
        own_problems = ranks.run_on_all(partial(source.bring, checkpoint), DiskFailed)
        problems = dict.fromkeys(each for part in ranks.gather(own_problems) for each in part)
        if not problems:
            require(checkpoint)
            return checkpoint
        damaged.append(f"{checkpoint}: {', '.join(problems)}")
        if ranks.rank() == 0:
            log.warning(f"passed over a damaged checkpoint, {damaged[-1]}")
    problems_of_all = "; ".join(damaged)
    # They may be whole: a volume that is away for a moment must not end the run for good.
    if UNREADABLE in problems_of_all:
        raise _NoneReadableError(f"no checkpoint can be read ({problems_of_all})")
    raise _NoneUndamagedError(f"every checkpoint is damaged ({problems_of_all}); {remedy}")
