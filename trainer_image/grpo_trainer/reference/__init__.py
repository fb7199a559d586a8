"""Reference strategies: where the frozen model comes from and where it lives, one small class each.

TRL knows one way (load the path again); which of the five is right depends on sizes, and the planner chooses.
Interface: `strategy_for(plan) -> ReferenceStrategy`, for engine.ReferenceGRPOTrainer.
"""

from grpo_api.plan.plan import TrainingPlan

from .adapter import Adapter
from .base import ReferenceStrategy
from .clone import Clone
from .none import NoReference
from .offload import Offload
from .sharded import Sharded

__all__ = ["Adapter", "Clone", "NoReference", "Offload", "ReferenceStrategy", "Sharded", "strategy_for"]


def strategy_for(plan: TrainingPlan) -> ReferenceStrategy:
    """The strategy that the plan chose, with its sync and offload settings.

    Under ZeRO-3 an offloaded reference is a sharded one whose partitions are in host memory: DeepSpeed streams them in,
    and no rank ever holds a whole copy.

    Raises:
        BadInput: sync with a strategy that has no reference of its own.
    """
    sync, strategy = plan.reference.sync, plan.execution.strategy
    if strategy == "Sharded" or (strategy == "Offload" and plan.execution.zero_stage == 3):
        offload = strategy == "Offload" or plan.reference.offload is not None
        return Sharded(sync, offload, plan.model.trust_remote_code)
    plain = {kind.name: kind for kind in (Clone, Adapter, Offload, NoReference)}
    return plain[strategy](sync)
