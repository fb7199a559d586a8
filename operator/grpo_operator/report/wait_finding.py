"""Describes what rank 0 waits for, as the reason of Degraded: a hub, a reward service, a store or
engines that do not answer."""

from grpo_api.status.status import Condition, ConditionType
from grpo_api.text.messages import MAX_MESSAGE, plain_text, shorten
from grpo_kube.objects.times import timestamp

from ..decide.observation import Observation
from ..records.reasons import WAITS, Reason

WAIT_SECONDS = 30.0
"""A service that is away for less is no news: requests are repeated."""
_SERVICES = {
    Reason.WAITING_FOR_HUB: "the hub",
    Reason.WAITING_FOR_REWARDS: "a reward service",
    Reason.WAITING_FOR_STORE: "the object store",
    Reason.WAITING_FOR_ENGINES: "an engine",
}
_ADVICE = {
    Reason.WAITING_FOR_HUB: "Check that the pods may reach it (DNS, proxy, NetworkPolicy), or use "
    "model.cache with files that are there",
    Reason.WAITING_FOR_REWARDS: "Check the service, and that the pods may reach it",
    Reason.WAITING_FOR_STORE: "Check its endpoint, and that the pods may reach it",
    Reason.WAITING_FOR_ENGINES: "Read an engine's log (`grpo logs NAME --engine 0`)",
}


def wait_finding(observation: Observation) -> tuple[Reason, str] | None:
    """Reason and message of what rank 0 has waited for longer than WAIT_SECONDS; None for no such
    wait."""
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
