"""Chooses the checkpoint that an attempt continues from, the same on all ranks, and checks it before it is loaded.

A damaged checkpoint is passed over for the one before it; another run's is rejected. Where spec.resumeFrom leads to no
checkpoint but to an exported adapter, its weights are the start of a new run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.clock import Clock
from grpo_api.text.contract import EXPORT_FOLDER

from ..gang import rank0_task, ranks
from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.durable_files import disk_errors, retry_disk_errors
from ..runtime.errors import BadInput, DiskFailed, Diverged
from ..runtime.paths import CHECKPOINTS, run_folder
from ..stores.store_base import Tell, silent
from ..weights.checkpoint_files import ADAPTER, ADAPTER_CONFIG
from .hashing import damage
from .manifest import OWNER, Manifest, require_continuable, require_same_run
from .store_checkpoints import remote_of, source_of
from .volume_checkpoints import checkpoints_of, claim, complete, read_manifest, withdraw


@dataclass(frozen=True, slots=True)
class Beginning:
    """The checkpoint or the adapter that an attempt begins with; a fresh start has neither."""

    checkpoint: Path | None = None
    """The checkpoint to continue."""
    adapter: Path | None = None
    """The exported adapter whose weights a new run begins with, at step 0."""


def claim_folder(plan: TrainingPlan, tell: Tell = silent, clock: Clock = SYSTEM_CLOCK) -> None:
    """Claim the checkpoint folder for this attempt and check that every rank sees the same one.

    With an object store, claim the run's folder there and one on the disk of every node. A collective.

    Args:
        plan: the attempt's plan.
        tell: called when the store shows progress, and during pauses.
        clock: the clock that retries wait by.

    Raises:
        BadInput: the folder belongs to another job, or isn't shared by all nodes; the store can't be used.
        Preempted: a newer attempt owns it.
        DiskFailed: the disk took nothing for minutes.
    """
    folder = run_folder(plan.checkpoint_directory)
    if folder is None:
        return

    @disk_errors()
    def claim_disk() -> None:
        claim(plan)

    if remote := remote_of(plan, tell, clock):

        def claim_disk_of_node() -> None:
            # Every node has a disk of its own, which its first rank claims. The store is one for all.
            if remote.local_rank == 0:
                claim_disk()

        ranks.run_on_all(claim_disk_of_node)
        rank0_task.run_on_rank0(remote.run.claim)
        return
    retry_disk_errors(lambda: rank0_task.run_on_rank0(claim_disk), clock)
    # Every rank saves its own partition. On a folder of its own node alone no attempt could load all of them.
    ranks.run_on_all(lambda: _require_visible(folder / OWNER))


def _require_visible(path: Path) -> None:
    if not path.is_file():
        raise BadInput(
            f"{path}, just written by rank 0, can't be seen: the checkpoint volume must be shared by all nodes "
            f"(ReadWriteMany). Use such a volume, or unset checkpoint.volume"
        )


Check = Callable[[Path], list[str]]
"""What is wrong with this rank's share of a checkpoint."""
Outdated = Callable[[Manifest], bool]
"""Whether a checkpoint was trained on what the run leaves out now."""


def begin(
    plan: TrainingPlan, identity: dict[str, str], outdated: Outdated = lambda _: False, tell: Tell = silent
) -> Beginning:
    """The checkpoint to continue; without one, the exported adapter that spec.resumeFrom names. A collective.

    Args:
        plan: the attempt's plan.
        identity: the run's identity, which a checkpoint must match.
        outdated: True for a checkpoint that may not be used.
        tell: called when a store shows progress, and during pauses.

    Raises:
        Diverged: as choose.
        BadInput: as choose; or spec.resumeFrom leads to neither a checkpoint nor an adapter, or to an adapter although
            all parameters are trained.
    """
    checkpoint = choose(plan, identity, outdated, tell)
    if checkpoint is not None or plan.resume_from is None:
        return Beginning(checkpoint=checkpoint)
    source, stored = Path(plan.resume_from), source_of(plan, tell)
    if stored:
        stored.bring_export()
    found = _listed(lambda: _adapters_of(source))
    if not found:
        raise BadInput(
            f"spec.resumeFrom: {stored.run.store.url if stored else source} has no complete checkpoint and no exported "
            "adapter; name a run's folder, a checkpoint's or an exported adapter's"
        )
    if plan.execution.method != "LoRA":
        raise BadInput(
            f"spec.resumeFrom: {found[0]} is an exported adapter, but this run trains all parameters (plan.method "
            f"{plan.execution.method}). Set adapter.use: Always, or merge it and name the model in spec.model"
        )
    return Beginning(adapter=found[0])


def choose(
    plan: TrainingPlan, identity: dict[str, str], outdated: Outdated = lambda _: False, tell: Tell = silent
) -> Path | None:
    """The newest complete, undamaged checkpoint of the run; if the run has none, of spec.resumeFrom; else None.

    An outdated checkpoint is never chosen. The run's own outdated checkpoints are withdrawn: no later attempt uses
    them. A collective.

    Raises:
        Diverged: there are checkpoints but all are outdated.
        BadInput: that checkpoint belongs to a different run, or there are checkpoints but all are damaged.
    """
    own, source, remote = run_folder(plan.checkpoint_directory), plan.resume_from, remote_of(plan, tell)
    if remote:
        remote.bring_manifests()
    # spec.resumeFrom is only where the run began: its own checkpoints have come further.
    if own and (found := _listed(lambda: complete(own))):
        usable = _usable(found, outdated)
        check = remote.bring if remote else _damage
        newest = _newest(usable, lambda one: require_same_run(one, read_manifest(one), identity), check)
        # Withdrawn, so that no later attempt goes back to what this run diverged on.
        dropped = set(found) - set(usable)
        if dropped and remote:
            rank0_task.run_on_rank0(lambda: remote.withdraw(dropped))
        elif dropped:
            rank0_task.run_on_rank0(lambda: withdraw(plan, dropped))
        return newest
    if source is None:
        return None
    stored = source_of(plan, tell)
    if stored:
        stored.bring_manifests()
    found = _listed(lambda: checkpoints_of(Path(source)))
    if not found:
        return None
    check = stored.bring if stored else _damage
    return _newest(_usable(found, outdated), lambda one: require_continuable(one, read_manifest(one), identity), check)


def _usable(found: list[Path], outdated: Outdated) -> list[Path]:
    """Those that aren't outdated, by rank 0's reading. One whose manifest can't be read is found damaged later.

    Raises:
        Diverged: none is left.
    """

    def usable() -> list[Path]:
        return [one for one in found if not _is_outdated(one, outdated)]

    left = _listed(usable)
    if not left:
        raise Diverged(
            f"every checkpoint ({', '.join(map(str, found))}) was trained on what the run diverged on, so there is "
            "none to go back to. Raise checkpoint.keep, or lower checkpoint.everySteps, in a new job"
        )
    return left


def _is_outdated(checkpoint: Path, outdated: Outdated) -> bool:
    try:
        return outdated(read_manifest(checkpoint))
    except BadInput:
        # A manifest that can't be read is damage, which `_newest` reports.
        return False


def _adapters_of(folder: Path) -> list[Path]:
    """The folder itself or its export, whichever is an exported adapter; empty if neither is.

    A checkpoint of a LoRA run has the same files. Without a manifest it may be half written, so it is left out.
    """
    for candidate in (folder, folder / EXPORT_FOLDER):
        is_adapter = (candidate / ADAPTER_CONFIG).is_file() and (candidate / ADAPTER).is_file()
        if is_adapter and not candidate.match(CHECKPOINTS):
            return [candidate]
    return []


def _listed(find: Callable[[], list[Path]]) -> list[Path]:
    """Rank 0's list for all: a volume may show its folders to one node later than to another."""
    own = find() if ranks.rank() == 0 else []
    found: list[Path] = ranks.gather(own)[0]
    return found


def _newest(found: list[Path], require: Callable[[Path], None], check: Check) -> Path:
    """The first that is undamaged, which must be one to go on from; `check` finds damage in this rank's share."""
    damaged = []
    for checkpoint in found:
        problems = _damage_anywhere(checkpoint, check)
        if not problems:
            require(checkpoint)
            return checkpoint
        damaged.append(f"{checkpoint}: {', '.join(problems)}")
        if ranks.rank() == 0:
            print(f"passed over a damaged checkpoint, {damaged[-1]}", flush=True)
    raise BadInput(f"every checkpoint is damaged ({'; '.join(damaged)}); delete them to start again at step 0")


def _damage(checkpoint: Path) -> list[str]:
    try:
        return damage(checkpoint, read_manifest(checkpoint).files, ranks.rank(), ranks.world_size())
    except BadInput as error:
        return [str(error)]


def _damage_anywhere(checkpoint: Path, check: Check) -> list[str]:
    """Problems of a checkpoint's files, each rank checking its share, each problem once."""
    own = ranks.run_on_all(lambda: check(checkpoint), DiskFailed)
    return list(dict.fromkeys(problem for part in ranks.gather(own) for problem in part))
