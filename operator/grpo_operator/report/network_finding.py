"""What the start of a gang found wrong with the network between its nodes: RDMA that is asked for
and not used, or links that are far slower than the plan assumes.

The run goes on, since a restart would meet the same network.
"""

from grpo_api.report.training_metrics import ALLREDUCE
from grpo_api.text.contract import NODE_GBPS_LABEL

from ..decide.observation import Observation
from ..decide.oom_feedback import measured_links
from ..records.reasons import Reason

GIGA = 1e9


def network_finding(observation: Observation) -> tuple[Reason, str] | None:
    """Reason and message of what rank 0 reports of the network; None where all is as planned."""
    if observation.pull is None:
        return None
    slow_links = _slow_links_message(observation)
    rdma_problem = observation.pull.progress.rdma_problem
    if rdma_problem:
        consequence = slow_links or "the run goes on without it"
        return Reason.RDMA_UNUSED, f"{rdma_problem}; {consequence}"
    if not slow_links:
        return None
    return Reason.NETWORK_SLOW, f"{slow_links}; {_advice(observation)}"


def _slow_links_message(observation: Observation) -> str:
    """The measured and the assumed bandwidth between nodes; empty where it is not slow."""
    plan = observation.job.status.plan
    # Inside a node the product table's guess is too rough to call a measurement slow.
    if observation.pull is None or plan is None or plan.nodes == 1:
        return ""
    links = measured_links(plan, observation.pull.progress.metrics.get(ALLREDUCE.key))
    if links is None or not plan.has_slow_links(links.bytes_per_second):
        return ""
    measured = links.bytes_per_second / GIGA
    assumed = (plan.link_bytes_per_second or 0) / GIGA
    return (
        f"the first all-reduce moved {measured:.3g} GB/s, less than half of the {assumed:.3g} GB/s "
        "that the plan's step time assumes, so steps take longer"
    )


def _advice(observation: Observation) -> str:
    """What to do about a slow network."""
    spec = observation.job.spec
    if spec and spec.resources.network_cards:
        return (
            "set NCCL_DEBUG to INFO in spec.env, and look for cards that NCCL leaves out and for "
            "`GDRDMA` in its channels (docs/internals/gpu.md)"
        )
    return (
        "request the nodes' RDMA cards (spec.resources.limits, examples/11-rdma-and-init.yaml), or "
        f"label the nodes {NODE_GBPS_LABEL} with what their network really has"
    )
