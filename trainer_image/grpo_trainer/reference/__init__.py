"""Reference strategies: where the frozen model comes from and where it lives, one small class each.

TRL knows one way (load the path again); which of the five is right depends on sizes, and the planner chooses.
Interface: `strategy_for(plan) -> ReferenceStrategy`, for engine.ReferenceGRPOTrainer.
"""

from grpo_api.plan import TrainingPlan
from grpo_api.training import ReferenceOffload

from .adapter import Adapter
from .base import ReferenceStrategy
from .clone import Clone
from .none import NoReference
from .offload import Offload
from .sharded import Sharded

__all__ = ["Adapter", "Clone", "NoReference", "Offload", "ReferenceStrategy", "Sharded", "strategy_for"]


def strategy_for(plan: TrainingPlan) -> ReferenceStrategy:
    """The strategy that the plan chose, with its sync and offload settings.

    Under ZeRO-3 an offloaded reference is a sharded one whose partitions are in host memory or on disk: DeepSpeed
    streams them in, and no rank ever holds a whole copy.

    Raises:
        BadInput: sync with a strategy that has no reference of its own.
    """
    sync, offload = plan.reference.sync, plan.reference.offload
    if plan.execution.strategy == "Offload" and plan.execution.zero_stage == 3:
        return Sharded(sync, offload or ReferenceOffload(), plan.model.trust_remote_code)
    if plan.execution.strategy == "Sharded":
        return Sharded(sync, offload, plan.model.trust_remote_code)
    plain = {kind.name: kind for kind in (Clone, Adapter, Offload, NoReference)}
    return plain[plan.execution.strategy](sync)
