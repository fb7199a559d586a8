"""Caches the planner's answers by spec and by the nodes that it may use.

The queue is judged again at every change of the cluster, and most of its jobs get the same answer as before. So each
spec keeps its Planner, and nodes are compared by their resources, not by their names. The answers are the planner's
own, byte for byte, without the candidates that were not chosen.
"""

from collections import OrderedDict

from grpo_api.job import GRPOJobSpec
from grpo_api.learned import Learned
from grpo_planner import Inventory, Planner, PlanResult

MOST_SPECS = 1024
"""Specs whose planners are kept, the least recently asked for leave first: about 0.1 MiB each."""


class Plans:
    """Plans jobs on inventories. For one thread at a time."""

    def __init__(self, most: int = MOST_SPECS) -> None:
        """Keep the planners of at most `most` specs."""
        self._most = most
        self.made = 0
        """Specs that were planned for the first time, or again after they had been forgotten."""
        self._planners: OrderedDict[str, Planner] = OrderedDict()

    def __len__(self) -> int:
        """How many specs' planners are kept."""
        return len(self._planners)

    def expect(self, specs: int) -> None:
        """Make room for twice this number of specs: a full cache would drop each planner just before its next use."""
        self._most = max(self._most, 2 * specs)

    def plan(self, spec: GRPOJobSpec, inventory: Inventory, learned: Learned | None = None) -> PlanResult:
        """What plan_job answers, without candidates."""
        key = spec.model_dump_json() + (learned.model_dump_json() if learned else "")
        # Popped and put back: the order of the dictionary is then that of the last use.
        planner = self._planners.pop(key, None)
        if planner is None:
            planner = Planner(spec, brief=True, learned=learned)
            self.made += 1
        self._planners[key] = planner
        if len(self._planners) > self._most:
            self._planners.popitem(last=False)
        # Equal nodes are merged, so that another node's name alone does not call for another plan.
        return planner.plan(inventory.merged)
