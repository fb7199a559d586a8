"""Chooses among the events about a Job or pod the warning that still speaks of its state.

An event stays for an hour, whatever follows. A component warns until it gets on, and then says so
in an event of its own: its newest one counts. Events are ordered by resourceVersion, since the
clocks of two components differ. What a scheduler says ends when the pod has a node, and nobody asks
about a pod before that.
"""

from collections.abc import Iterable
from typing import NamedTuple

from grpo_kube.objects.json_reader import JsonObject

SCHEDULING = "FailedScheduling"
"""What schedulers and autoscalers say of a pod without a node."""


class StartEvent(NamedTuple):
    """What is read of one event."""

    version: int
    """Its resourceVersion, which each repetition raises."""
    writer: tuple[str, str]
    """The component that wrote it, and the instance."""
    is_warning: bool
    reason: str
    text: str
    """`reason: message`."""


def start_event(item: object) -> StartEvent | None:
    """The event of an API object; None where it can't be read."""
    try:
        event = JsonObject(item)
        source = event.part("source")
        component = source.text("component") or event.text("reportingComponent")
        instance = source.text("host") or event.text("reportingInstance")
        return StartEvent(
            version=event.part("metadata").digits("resourceVersion"),
            writer=(component, instance),
            is_warning=event.text("type") == "Warning",
            reason=event.text("reason"),
            text=event.reason_and_message(),
        )
    except ValueError:
        return None


def current_warning(events: Iterable[StartEvent]) -> str:
    """The newest warning that its writer has not followed by another event; empty without one."""
    newest = {event.writer: event for event in sorted(events)}
    warnings = [event for event in newest.values() if event.is_warning and not _is_over(event)]
    return max(warnings).text if warnings else ""


def _is_over(event: StartEvent) -> bool:
    """True for what schedulers say: a pod that is asked about has its node."""
    return event.reason == SCHEDULING or event.writer[0].endswith("-scheduler")
