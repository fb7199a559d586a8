"""Rejects plans that this trainer can't run as they say.

The planner makes none, but a plan may be written by hand or by another version.
"""

from grpo_api.plan.plan import TrainingPlan

from .errors import BadInput


def require_supported(plan: TrainingPlan) -> None:
    """Check what the schema can't.

    Raises:
        BadInput: an optimizer that does not work under the plan's ZeRO stage.
    """
    execution = plan.execution
    if execution.optimizer == "AdamW8bit" and execution.zero_stage > 0:
        raise BadInput(
            f"plan.execution.optimizer is AdamW8bit under ZeRO-{execution.zero_stage}: bitsandbytes keeps embeddings "
            f"and small tensors in 32 bits, which ZeRO's flat partitions don't let it find; set AdamW, or zeroStage 0"
        )
