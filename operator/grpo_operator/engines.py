"""What became of an attempt's engines, in words, and which of their pods to show.

An engine that is lost ends nothing: the Job controller makes it again by its index while training goes on. Only before
the gang runs are its engines needed as its training pods are.
"""

import re
from collections.abc import Iterable

from .observe import Observation
from .records import PodRecord

MOST_ENDS = 3
"""Engines whose ends a message names at most."""
_SPAN = re.compile(r"([0-9]{1,3})(?:-([0-9]{1,3}))?")
"""Of engines there are at most 512 (EngineServersSpec.replicas)."""


def lost_engines(seen: Observation) -> str:
    """What is wrong with the engines of a gang that runs, as a sentence; empty when all of them do."""
    up = len(seen.engines_up)
    if up >= seen.replicas:
        return ""
    why = "; ".join(filter(None, (engine_ends(seen), _engine_waits(seen))))
    reason = f": {why}" if why else ""
    return f"{up} of {seen.replicas} engines run{reason}; {_what_follows(seen)}"


def _what_follows(seen: Observation) -> str:
    """What becomes of those that don't run."""
    goes_on = "training goes on with those that are proven to have its weights"
    spent: list[int] = []
    job_has_ended = False
    if seen.engines:
        spent = sorted(_spent(seen.engines.spent) - seen.engines_up)
        job_has_ended = bool(seen.engines.ended)
    if job_has_ended or len(spent) >= seen.replicas:
        return (
            "all have used up their retries, so none comes back in this attempt: it ends when training has waited for "
            "one as long as guard.weightSyncTimeoutSeconds allows, and the next has new engines"
        )
    if not spent:
        return f"the others are made again by their index, and {goes_on}"
    numbers = ", ".join(map(str, spent[:MOST_ENDS])) + (", …" if len(spent) > MOST_ENDS else "")
    return f"this attempt does without engine {numbers}, which used up all retries; {goes_on}"


def _spent(spans: str) -> set[int]:
    """Return the numbers of `1,3-5`; parts of another form are ignored."""
    numbers: set[int] = set()
    for part in spans.split(","):
        span = _SPAN.fullmatch(part)
        if span:
            first, last = int(span[1]), int(span[2] or span[1])
            numbers.update(range(first, last + 1))
    return numbers


def engine_ends(seen: Observation) -> str:
    """How those that don't run ended, such as `engine 1 ended with OOMKilled, exit code 137`; empty when none has."""
    ended = shown(pod for pod in seen.engine_pods if pod.termination)
    ends = [_end(pod) for pod in ended if pod.index not in seen.engines_up]
    return "; ".join(ends[:MOST_ENDS])


def _engine_waits(seen: Observation) -> str:
    """The first one whose container or pod waits, such as `engine 1 waits: ImagePullBackOff`; empty where none does."""
    for pod in shown(seen.engine_pods):
        if why := pod.waiting or pod.unschedulable:
            return f"engine {pod.index} waits: {why}"
    return ""


def _end(pod: PodRecord) -> str:
    end = pod.termination
    if end is None:
        return ""
    # the kubelet's word for a container that said nothing itself is the plainest: OOMKilled, Evicted
    how = end.outcome.result if end.reported else next(iter(end.reasons), end.outcome.result)
    return f"engine {pod.index} ended with {how}" + (f", exit code {end.exit_code}" if end.exit_code else "")


def shown(pods: Iterable[PodRecord]) -> list[PodRecord]:
    """One pod for each engine, by index: the one that lives, else the last that was bound."""
    newest = {pod.index: pod for pod in sorted(pods, key=_last_bound)}
    return [newest[index] for index in sorted(newest)]


def _last_bound(pod: PodRecord) -> tuple[bool, float, str]:
    """Sort key: pods that live come last, then those that were bound last."""
    return pod.live, pod.bound_at or 0.0, pod.name
