"""Resolves spec.resumeFrom.grpoJob: finds the checkpoints of another job, to begin with them.

The source is resolved once, before the first attempt, and kept in the status. The reason is that
the other job may be deleted later while its claim stays. Its plan is kept, too, since checkpoints
continue exactly only with the split that made them. Until the checkpoints are found, the check says
why the job must wait.
"""

from grpo_api.job import GRPOJobSpec
from grpo_api.status.status import ResumeSource

from ..records.names import checkpoint_volume, run_folder
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord
from .decisions import Action, Decision, Limits
from .observation import Observation

LOOK_AGAIN = 10.0
"""Seconds until the other job is looked at again, since no event reports its progress."""


def is_resolved(job: GRPOJobRecord) -> bool:
    """True if there is nothing to find out, or it has been found out."""
    wanted = job.resume_job
    source = job.status.resume_from
    if wanted is None:
        return True
    return source is not None and source.grpo_job == wanted


def source_unresolved(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """A job that begins with another's checkpoints waits until they can be named."""
    if observation.job.is_active or is_resolved(observation.job):
        return None
    source = _source(observation.job, observation.source)
    if isinstance(source, str):
        message = f"spec.resumeFrom.grpoJob: {source}"
        return Decision(
            Action.REJECT, Reason.WAITING_FOR_CHECKPOINT, message, look_again=LOOK_AGAIN
        )
    plan = observation.source.status.plan if observation.source else None
    message = f"begins with the checkpoints of {source.grpo_job}"
    commits = _commits(observation.job.spec, observation.source)
    return Decision(
        Action.RESOLVE, Reason.RESOLVED, message, plan=plan, resume_from=source, revisions=commits
    )


def _commits(spec: GRPOJobSpec | None, source: GRPOJobRecord | None) -> dict[str, str]:
    """The other job's commits of what both specs name alike: branches may have moved since."""
    if spec is None or source is None or source.spec is None:
        return {}
    repositories = _repositories(spec)
    source_repositories = _repositories(source.spec)
    source_commits = source.status.revisions or {}
    commits: dict[str, str] = {}
    for path, repository in repositories.items():
        is_same = source_repositories.get(path) == repository
        if is_same and path in source_commits:
            commits[path] = source_commits[path]
    return commits


def _repositories(spec: GRPOJobSpec) -> dict[str, tuple[str | None, str | None]]:
    """Name and revision of each repository, by its path in the spec."""
    repositories: dict[str, tuple[str | None, str | None]] = {
        "model": (spec.model.name, spec.model.revision),
        "dataset": (spec.dataset.name, spec.dataset.revision),
    }
    for index, reward in enumerate(spec.rewards):
        if reward.model:
            path = f"rewards[{index}].model"
            repositories[path] = (reward.model.name, reward.model.revision)
    return repositories


def _source(job: GRPOJobRecord, source: GRPOJobRecord | None) -> ResumeSource | str:
    """Where the checkpoints are, or what is missing."""
    name = job.resume_job or ""
    if source is None or source.deleting:
        return f"there is no GRPOJob {name} in this namespace"
    if source.spec is None:
        return f"the spec of GRPOJob {name} can't be read"
    store = source.spec.checkpoint.store
    volume = checkpoint_volume(name, source.spec.checkpoint)
    if volume is None and store is None:
        return (
            f"GRPOJob {name} has no checkpoint.volume, volumeClaimTemplate or store, so "
            "nothing of it is kept"
        )
    progress = source.status.progress
    has_stepped = bool(progress and progress.step)
    if source.status.plan is None or not has_stepped:
        return f"GRPOJob {name} has not made a step yet"
    claim_name = volume.claim_name if volume else None
    sub_path = volume.sub_path if volume else None
    return ResumeSource(
        grpo_job=name,
        uid=source.uid,
        claim_name=claim_name,
        sub_path=sub_path,
        store=store,
        folder=run_folder(name, source.uid),
    )
