"""What became of an attempt's engines, in words, and which of their pods to show.

An engine that is lost ends nothing: the Job controller makes it again by its index while training goes on. Only before
the gang runs are its engines needed as its training pods are.
"""

from collections.abc import Iterable

from .observe import Observation
from .records import PodRecord

MOST_ENDS = 3
"""Engines whose ends a message tells."""


def lost_engines(seen: Observation) -> str:
    """What is wrong with the engines of a gang that runs, as a sentence; empty when all of them do."""
    up = len(seen.engines_up)
    if up >= seen.replicas:
        return ""
    why = f": {ends}" if (ends := engine_ends(seen)) else ""
    return (
        f"{up} of {seen.replicas} engines run{why}; the others are made again by their index, and training goes on "
        "with those that are proven to have its weights"
    )


def engine_ends(seen: Observation) -> str:
    """How those that don't run ended, such as `engine 1 ended with OOMKilled, exit code 137`; empty when none has."""
    down = (pod for pod in shown(pod for pod in seen.engine_pods if pod.termination))
    ends = [_end(pod) for pod in down if pod.index not in seen.engines_up]
    return "; ".join(ends[:MOST_ENDS])


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
