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
"""Seconds until the other job is read again, since no event reports its progress."""


def source_unresolved(observation: Observation, limits: Limits) -> Decision | None:  # noqa: ARG001
    """A job that begins with another's checkpoints waits until they can be named. What was found
    for an earlier spec is dropped."""
    job = observation.job
    if job.is_active:
        return None
    if job.is_resume_resolved:
        return _other_revisions(observation)
    if job.resume_job is None:
        message = "begins without checkpoints of another job"
        return Decision(Action.RESOLVE, Reason.RESOLVED, message)
    source = _source(job, observation.source)
    if isinstance(source, str):
        message = f"spec.resumeFrom.grpoJob: {source}"
        return Decision(
            Action.REJECT, Reason.WAITING_FOR_CHECKPOINT, message, requeue_after=LOOK_AGAIN
        )
    plan = observation.source.status.plan if observation.source else None
    message = f"begins with the checkpoints of {source.grpo_job}"
    commits = _commits(job.spec, observation.source)
    return Decision(
        Action.RESOLVE, Reason.RESOLVED, message, plan=plan, resume_from=source, revisions=commits
    )


def _other_revisions(observation: Observation) -> Decision | None:
    """Resolve the same checkpoints with other commits if the job names other repositories since
    then. If the other job is gone, its commits are unknown and stay as they are."""
    job, source, status = observation.job, observation.source, observation.job.status
    is_new_spec = not status.attempt and job.generation != status.observed_generation
    if not is_new_spec or source is None or status.resume_from is None:
        return None
    commits = _commits(job.spec, source)
    if source.uid != status.resume_from.uid or commits == (status.revisions or {}):
        return None
    return Decision(
        Action.RESOLVE,
        Reason.RESOLVED,
        f"begins with the checkpoints of {source.name}",
        plan=status.plan,
        resume_from=status.resume_from,
        revisions=commits,
    )


def _commits(spec: GRPOJobSpec | None, source: GRPOJobRecord | None) -> dict[str, str]:
    """The other job's commits of the repositories that both specs name: branches may have moved
    since."""
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
