"""Rejects plans that this trainer can't run as they say.

The planner makes none, but a plan may be written by hand or by another version.
"""

from collections.abc import Iterator

from grpo_api.plan import TrainingPlan

from .errors import BadInput
from .process.preemption import generation_boundary


def require_supported(plan: TrainingPlan) -> None:
    """Check what the schema can't.

    Raises:
        BadInput: all that is not supported, at once.
    """
    problems = list(_problems(plan))
    if problems:
        raise BadInput("; ".join(problems))


def _problems(plan: TrainingPlan) -> Iterator[str]:
    execution = plan.execution
    boundary = generation_boundary(plan)
    if plan.checkpoint_directory is not None and execution.save_every_steps % boundary:
        above = -(-execution.save_every_steps // boundary) * boundary
        yield (
            f"plan.execution.saveEverySteps is {execution.save_every_steps}, but a generation serves {boundary} "
            f"optimizer steps (stepsPerGeneration {execution.steps_per_generation} * numIterations "
            f"{plan.training.num_iterations} / gradientAccumulation {execution.gradient_accumulation}) and its "
            f"completions are in no checkpoint: a resume would not be exact; set it to {above}"
        )
    if execution.optimizer == "AdamW8bit" and execution.zero_stage > 0:
        yield (
            f"plan.execution.optimizer is AdamW8bit under ZeRO-{execution.zero_stage}: bitsandbytes keeps embeddings "
            f"and small tensors in 32 bits, which ZeRO's flat partitions don't let it find; set AdamW, or zeroStage 0"
        )
