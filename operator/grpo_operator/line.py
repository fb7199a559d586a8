"""Who may start: the answer to a job that asks for an attempt.

Exists so that a gang starts only when all of it fits, in order of priority, then age. Called by reconcile under its
admission lock; the commit of an attempt and its plan to the status is the reservation, nothing here is remembered.
"""

from dataclasses import replace

from grpo_api.plan import ExecutionPlan
from grpo_planner import Inventory, plan_job

from .admission import plan_problem, spec_problem
from .errors import Reason
from .observe import Observation, queued_by_kueue
from .policies import Action, Decision
from .records import GRPOJobRecord


class Line:
    """Answers ADMIT decisions."""

    def __init__(self, default_image: str) -> None:
        """`default_image` is for jobs without spec.image."""
        self._default_image = default_image

    def competes(self, job: GRPOJobRecord) -> bool:
        """Whether the job's GPUs are the operator's to hand out."""
        return job.spec is not None and job.spec.placement.accelerator == "GPU" and not queued_by_kueue(job)

    async def answer(self, seen: Observation, asked: Decision) -> Decision:
        """COMMIT with a plan, QUEUE with what the gang waits for, or REFUSE."""
        spec = seen.job.spec
        if spec is None:
            return asked
        if problem := spec_problem(spec, self._default_image):
            return Decision(Action.REFUSE, *problem)
        if plan := kept_plan(seen):
            return replace(asked, action=Action.COMMIT, plan=plan)
        result = plan_job(spec, Inventory())
        if result.chosen is None:
            return replace(asked, action=Action.QUEUE, reason=result.reason, message=result.message)
        if problem := plan_problem(seen.job, result.chosen):
            return Decision(Action.REFUSE, *problem)
        return replace(asked, action=Action.COMMIT, reason=Reason.ADMITTED, plan=result.chosen)


def kept_plan(seen: Observation) -> ExecutionPlan | None:
    """The plan of a run that has made progress: it resumes as it began, whatever the cluster has become."""
    progress = seen.job.status.progress
    return seen.job.status.plan if progress and progress.step else None
