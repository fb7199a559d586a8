"""Reference strategies: where the frozen model comes from and where it lives, one small class each.

Exists because TRL knows one way (load the path again); which of the five is right depends on sizes, and the planner
chooses. Interface: `strategy_for(plan) -> ReferenceStrategy`, given to engine.ReferenceGRPOTrainer, which calls it.
"""

from grpo_api.plan import TrainingPlan

from .adapter import Adapter
from .base import ReferenceStrategy
from .clone import Clone
from .none import NoReference
from .offload import Offload
from .sharded import Sharded

__all__ = ["Adapter", "Clone", "NoReference", "Offload", "ReferenceStrategy", "Sharded", "strategy_for"]


def strategy_for(plan: TrainingPlan) -> ReferenceStrategy:
    """The strategy that the plan chose, with its sync and offload settings.

    Raises:
        BadInput: sync with a strategy that has no reference of its own.
    """
    sync = plan.reference.sync
    if plan.execution.strategy == "Sharded":
        return Sharded(sync, plan.reference.offload, plan.model.trust_remote_code)
    plain = {kind.name: kind for kind in (Clone, Adapter, Offload, NoReference)}
    return plain[plan.execution.strategy](sync)
