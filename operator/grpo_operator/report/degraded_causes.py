"""Explains why a running gang is Degraded: by its nodes and engines, and by rank 0's report. It may
not have written a checkpoint, a service does not answer, or the network is slower than planned.

The services are a hub, a reward service, a store and engines. Of the network two things are
reported: RDMA that is requested and not used, and links that are far slower than assumed. The run
goes on, since a restart would meet the same network.
"""

from grpo_api.report.training_metrics import ALLREDUCE, CHECKPOINT_STEP
from grpo_api.status.status import Condition, ConditionType
from grpo_api.text.contract import NODE_GBPS_LABEL
from grpo_api.text.messages import MAX_MESSAGE, plain_text, shorten
from grpo_kube.objects.times import timestamp

from ..decide.observation import Observation
from ..decide.oom_feedback import measured_links
from ..decide.running_checks import lost_node_message
from ..decide.start_checks import lost_engines
from ..records.reasons import WAITS, Reason

Cause = tuple[Reason, str]
"""Reason and message of Degraded."""
WAIT_SECONDS = 30.0
"""A service that is away for less is no news: requests are repeated."""
_SERVICES = {
    Reason.WAITING_FOR_HUB: "the hub",
    Reason.WAITING_FOR_REWARDS: "a reward service",
    Reason.WAITING_FOR_STORE: "the store of its checkpoints",
    Reason.WAITING_FOR_ENGINES: "an engine",
}
_ADVICE = {
    Reason.WAITING_FOR_HUB: "Check that the pods may reach it (DNS, proxy, NetworkPolicy), or use "
    "model.cache with files that are there",
    Reason.WAITING_FOR_REWARDS: "Check the service, and that the pods may reach it",
    Reason.WAITING_FOR_STORE: "Check its volume or endpoint, and that the pods may reach it",
    Reason.WAITING_FOR_ENGINES: "Read an engine's log (`grpo logs NAME --engine 0`)",
}


def running_cause(observation: Observation) -> Cause | None:
    """Why a gang is Degraded whose training pods all run; None if it is not."""
    if lost_node := lost_node_message(observation):
        message = (
            f"{lost_node}; unless it comes back, Kubernetes ends the pod, after five minutes by "
            "default, and the gang starts again. Look at the node (`kubectl describe node`)"
        )
        return Reason.NODE_NOT_READY, message
    if unwritten := _checkpoint_cause(observation):
        return unwritten
    if lost := lost_engines(observation):
        return Reason.ENGINES_LOST, lost
    return _wait_cause(observation) or _network_cause(observation)


def _checkpoint_cause(observation: Observation) -> Cause | None:
    """The checkpoint that rank 0 could not write."""
    progress = observation.pull.progress if observation.pull else None
    if progress is None or not progress.checkpoint_problem:
        return None
    checkpoint_step = progress.metrics.get(CHECKPOINT_STEP.key, 0.0)
    message = (
        f"{progress.checkpoint_problem}; it is tried again, until then a restart goes back "
        f"to step {checkpoint_step:.0f}"
    )
    return Reason.CHECKPOINT_NOT_WRITTEN, message


def _wait_cause(observation: Observation) -> Cause | None:
    """What rank 0 has waited for longer than WAIT_SECONDS."""
    pull = observation.pull
    wait = pull.progress.waiting if pull else None
    if wait is None or wait.seconds < WAIT_SECONDS or wait.target not in WAITS:
        return None
    reason = WAITS[wait.target]
    why = shorten(plain_text(wait.why), MAX_MESSAGE // 2)
    message = f"rank 0 waits for {_SERVICES[reason]}: {why}, since "
    stated = observation.job.condition(ConditionType.DEGRADED)
    begin = observation.now - wait.seconds
    return reason, message_since(stated, message, begin, advice(reason))


def advice(reason: str) -> str:
    """What to do about a wait, as a sentence that follows another; empty for other reasons."""
    return f". {_ADVICE[Reason(reason)]}" if reason in _ADVICE else ""


def message_since(stated: Condition | None, message: str, unix: float, end: str = "") -> str:
    """The message with a time after it. The stated one where only the time would differ, since a
    wait that goes on must not cause a write."""
    if stated and stated.message.startswith(message):
        return stated.message
    return f"{message}{timestamp(max(0.0, unix))}{end}"


GIGA = 1e9


def _network_cause(observation: Observation) -> Cause | None:
    """What rank 0 reports of the network; None where all is as planned."""
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
