"""Caches the planner's answers.

The queue is judged again at every change of the cluster, and most
jobs get the same answer as before. So each spec keeps its Planner, and nodes are compared by their
resources instead of their names. The answers are the planner's own, byte for byte, without the
candidates that were not chosen and the rule that decided.
"""

from collections import OrderedDict

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import Planner
from grpo_planner.result.result import PlanResult
from grpo_planner.time.measured_runs import NO_RUNS, MeasuredRuns

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
        """Keep at least twice this many specs: a full cache would drop each just before its use."""
        self._most = max(self._most, 2 * specs)

    def plan(
        self,
        spec: GRPOJobSpec,
        inventory: Inventory,
        learned: Learned | None = None,
        measured: MeasuredRuns = NO_RUNS,
    ) -> PlanResult:
        """What plan_job answers, without candidates and the rule."""
        learned_key = learned.model_dump_json() if learned else ""
        # Namespaces see the same rows differently.
        namespace = measured.namespace if measured.rows else ""
        key = f"{namespace}{spec.model_dump_json()}{learned_key}"
        # Popped and put back: the order of the dictionary is then that of the last use.
        planner = self._planners.pop(key, None)
        if planner is None or not planner.has_planned_by(measured):
            planner = Planner(spec, brief=True, learned=learned, measured=measured)
            self.made += 1
        self._planners[key] = planner
        if len(self._planners) > self._most:
            self._planners.popitem(last=False)
        # Equal nodes are merged, so that another node's name alone does not call for another plan.
        return planner.plan(inventory.with_merged_nodes)
