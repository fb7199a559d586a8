"""Which process of the gang this is, and the environment variables that say so to torch, accelerate
and DeepSpeed.

The pods are started by a Job, not by torchrun: the node rank is the pod's index, everything else is
in the plan. The variables must be set before torch is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_api.plan.plan import ExecutionPlan, Rendezvous
from grpo_api.text.contract import INDEX_ENV

from ..runtime.errors import BadInput

LOCAL_RANK_ENV = "LOCAL_RANK"
"""Set by the supervisor for each of a pod's processes; its absence marks the pod's first
process."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of one process in the gang."""

    node: int
    """Node rank: the pod's index, from 0."""
    local_rank: int
    """Process within the pod, from 0."""
    processes_per_node: int
    """Processes of each pod."""
    nodes: int
    """Pods of the gang."""

    @property
    def rank(self) -> int:
        """Global rank; ranks of one pod are neighbours."""
        return self.node * self.processes_per_node + self.local_rank

    @property
    def world_size(self) -> int:
        """Processes of the whole gang."""
        return self.nodes * self.processes_per_node

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which serves progress and writes manifests."""
        return self.rank == 0


def placement(execution: ExecutionPlan, environment: Mapping[str, str]) -> Placement:
    """This process's place, from the gang's size, the pod's index and the supervisor's LOCAL_RANK.

    Raises:
        BadInput: the index is missing, no number, or outside the gang.
    """
    node = _index(
        INDEX_ENV, environment.get(INDEX_ENV, "0" if execution.nodes == 1 else ""), execution.nodes
    )
    local = _index(
        LOCAL_RANK_ENV, environment.get(LOCAL_RANK_ENV, "0"), execution.processes_per_node
    )
    return Placement(node, local, execution.processes_per_node, execution.nodes)


def _index(name: str, value: str, size: int) -> int:
    if not value.isdecimal() or int(value) >= size:
        raise BadInput(f"environment variable {name} is {value!r}; the plan allows 0 to {size - 1}")
    return int(value)


def launch_environment(rendezvous: Rendezvous, place: Placement) -> dict[str, str]:
    """The variables that torchrun would set for torch.distributed, accelerate and DeepSpeed."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        LOCAL_RANK_ENV: str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.processes_per_node),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
    }
