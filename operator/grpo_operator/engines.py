"""What became of an attempt's engines, in words, and which of their pods to show.

An engine that is lost ends nothing: the Job controller makes it again by its index while training goes on. Only before
the gang runs are its engines needed as its training pods are.
"""

import re
from collections.abc import Iterable

from .observe import Observation
from .records import PodRecord

MOST_ENDS = 3
"""Engines whose ends a message tells."""
_SPAN = re.compile(r"([0-9]{1,3})(?:-([0-9]{1,3}))?")
"""Of engines there are at most 512 (EngineServersSpec.replicas)."""


def lost_engines(seen: Observation) -> str:
    """What is wrong with the engines of a gang that runs, as a sentence; empty when all of them do."""
    up = len(seen.engines_up)
    if up >= seen.replicas:
        return ""
    why = "; ".join(filter(None, (engine_ends(seen), _engine_waits(seen))))
    return f"{up} of {seen.replicas} engines run{f': {why}' if why else ''}; {_what_follows(seen)}"


def _what_follows(seen: Observation) -> str:
    """What becomes of those that don't run."""
    goes_on = "training goes on with those that are proven to have its weights"
    spent = sorted(_spent(seen.engines.spent) - seen.engines_up) if seen.engines else []
    if (seen.engines and seen.engines.ended) or len(spent) >= seen.replicas:
        return (
            "all have used up their retries, so none comes back in this attempt: it ends when training has waited for "
            "one as long as guard.weightSyncTimeoutSeconds allows, and the next has new engines"
        )
    if not spent:
        return f"the others are made again by their index, and {goes_on}"
    numbers = ", ".join(map(str, spent[:MOST_ENDS])) + (", …" if len(spent) > MOST_ENDS else "")
    return f"this attempt does without engine {numbers}, which used up all retries; {goes_on}"


def _spent(told: str) -> set[int]:
    """Numbers of `1,3-5`; what is none is left out."""
    spans = (_SPAN.fullmatch(part) for part in told.split(","))
    found = [(int(span[1]), int(span[2] or span[1])) for span in spans if span]
    return {index for first, last in found for index in range(first, last + 1)}


def engine_ends(seen: Observation) -> str:
    """How those that don't run ended, such as `engine 1 ended with OOMKilled, exit code 137`; empty when none has."""
    down = (pod for pod in shown(pod for pod in seen.engine_pods if pod.termination))
    ends = [_end(pod) for pod in down if pod.index not in seen.engines_up]
    return "; ".join(ends[:MOST_ENDS])


def _engine_waits(seen: Observation) -> str:
    """The first one whose container or pod waits, such as `engine 1 waits: ImagePullBackOff`; empty where none does."""
    waits = ((pod.index, pod.waiting or pod.unschedulable) for pod in shown(seen.engine_pods))
    return next((f"engine {index} waits: {why}" for index, why in waits if why), "")


def _end(pod: PodRecord) -> str:
    end = pod.termination
    if end is None:
        return ""
    # the kubelet's word for a container that said nothing itself is the plainest: OOMKilled, Evicted
    how = end.outcome.result if end.reported else next(iter(end.reasons), end.outcome.result)
    return f"engine {pod.index} ended with {how}" + (f", exit code {end.exit_code}" if end.exit_code else "")


def shown(pods: Iterable[PodRecord]) -> list[PodRecord]:
    """One pod for each engine, by index: the one that lives, else the last that was bound."""
    newest = {pod.index: pod for pod in sorted(pods, key=lambda one: (one.live, one.bound_at or 0.0, one.name))}
    return [newest[index] for index in sorted(newest)]
