"""What a finished job measured of its steps, as a row for the plans of other jobs."""

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.status.status import GRPOJobStatus
from grpo_planner.replan.measured_step import StepSeconds, measured_row
from grpo_planner.replan.past_run import Run
from grpo_planner.time.measured_runs import MeasuredRow


def finished_run(
    spec: GRPOJobSpec, status: GRPOJobStatus, source: str, cluster: str = ""
) -> MeasuredRow | None:
    """The row of a job that has ended with this status; None where no step of it was measured.

    `source` is its `namespace/job`, `cluster` where it ran.
    """
    plan, ended = status.plan, status.completion_time
    learned = status.learned or Learned()
    step = learned.step
    if plan is None or ended is None or step is None:
        return None
    if step.gpu_product != plan.gpu_product:
        # Its last attempt moved to other GPUs and made no step there.
        return None
    run = Run(plan, spec, learned)
    measured = StepSeconds.of_step(step)
    return measured_row(run, measured, source=source, date=ended, cluster=cluster)
