"""spec.resumeFrom.grpoJob: where that job's checkpoints are, or why this job must wait for them.

It is found out once, before the first attempt, and kept in the status: the other job may be deleted later, while its
claim stays. With it goes its plan, since checkpoints continue exactly only with the split that made them.
"""

from grpo_api.job import GRPOJobSpec
from grpo_api.status import ResumeSource

from .decisions import Action, Decision, Limits
from .names import checkpoint_volume, run_folder
from .observe import Observation
from .reasons import Reason
from .records import GRPOJobRecord

LOOK_AGAIN = 10.0
"""Seconds until the other job is looked at again: nobody tells when it comes, or has made a step."""


def resolved(job: GRPOJobRecord) -> bool:
    """True if there is nothing to find out, or it has been found out."""
    wanted, found = job.resume_job, job.status.resume_from
    if wanted is None:
        return True
    return found is not None and found.grpo_job == wanted


def source_unresolved(seen: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """A job that begins with another's checkpoints waits until they can be named."""
    if seen.job.active or resolved(seen.job):
        return None
    found = _source(seen.job, seen.source)
    if isinstance(found, str):
        message = f"spec.resumeFrom.grpoJob: {found}"
        return Decision(Action.REJECT, Reason.WAITING_FOR_CHECKPOINT, message, look_again=LOOK_AGAIN)
    plan = seen.source.status.plan if seen.source else None
    message = f"begins with the checkpoints of {found.grpo_job}"
    commits = _commits(seen.job.spec, seen.source)
    return Decision(Action.RESOLVE, Reason.RESOLVED, message, plan=plan, resume_from=found, revisions=commits)


def _commits(spec: GRPOJobSpec | None, source: GRPOJobRecord | None) -> dict[str, str]:
    """The other job's commits of what both specs name alike: branches may have moved since."""
    if spec is None or source is None or source.spec is None:
        return {}
    mine, theirs = _repositories(spec), _repositories(source.spec)
    known = source.status.revisions or {}
    named_alike = [path for path, named in mine.items() if theirs.get(path) == named]
    return {path: known[path] for path in named_alike if path in known}


def _repositories(spec: GRPOJobSpec) -> dict[str, tuple[str | None, str | None]]:
    """Name and revision of each repository, by its path in the spec."""
    rewards = {f"rewards[{at}].model": reward.model for at, reward in enumerate(spec.rewards)}
    return {
        "model": (spec.model.name, spec.model.revision),
        "dataset": (spec.dataset.name, spec.dataset.revision),
        **{path: (model.name, model.revision) for path, model in rewards.items() if model},
    }


def _source(job: GRPOJobRecord, source: GRPOJobRecord | None) -> ResumeSource | str:
    """Where the checkpoints are, or what is missing."""
    name = job.resume_job or ""
    if source is None or source.deleting:
        return f"there is no GRPOJob {name} in this namespace"
    if source.spec is None:
        return f"the spec of GRPOJob {name} can't be read"
    store, volume = source.spec.checkpoint.store, checkpoint_volume(name, source.spec.checkpoint)
    if volume is None and store is None:
        return f"GRPOJob {name} has no checkpoint.volume, volumeClaimTemplate or store, so nothing of it is kept"
    progress = source.status.progress
    has_stepped = bool(progress and progress.step)
    if source.status.plan is None or not has_stepped:
        return f"GRPOJob {name} has not made a step yet"
    return ResumeSource(
        grpo_job=name,
        uid=source.uid,
        claim_name=volume.claim_name if volume else None,
        sub_path=volume.sub_path if volume else None,
        store=store,
        folder=run_folder(name, source.uid),
    )
