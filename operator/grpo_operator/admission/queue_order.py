"""The order of the queue: priority, then who has been passed over too often, then the namespace's
share, then age.

Priorities are the PriorityClasses' values. Among equals, the namespace that holds fewest GPUs goes
first, and within a namespace the oldest job. Every place that is given out counts at once, so that
namespaces take turns. A share alone could leave a job waiting for ever behind newcomers of
namespaces that hold less. So a job that MOST_PASSED_OVER younger ones of its priority have
overtaken goes before all others of that priority. Among such jobs the oldest goes first. What such
a job waits for is reserved for it.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from ..records.records import GRPOJobRecord

MOST_PASSED_OVER = 8
"""Younger jobs of its priority that may start before a job; then it is next."""


def age(job: GRPOJobRecord) -> tuple[float, str]:
    """Sorts jobs by age, the oldest first."""
    return job.created, job.uid


def priority(job: GRPOJobRecord, priorities: Mapping[str, int]) -> int:
    """The value of the job's PriorityClass, or of the default for a job that names none."""
    name = job.spec.placement.priority_class_name if job.spec else None
    return priorities.get(name or "", 0)


def sort_queue(
    waiting: Iterable[GRPOJobRecord],
    priorities: Mapping[str, int],
    gpus_held: Mapping[str, int],
    passed_over: Mapping[str, int],
) -> Iterator[GRPOJobRecord]:
    """Yield the waiting jobs in the order in which they are admitted.

    `gpus_held` are GPUs by namespace: the caller adds a job's before it asks for the next job.
    `passed_over`: by uid, how many younger jobs have started first.
    """
    # groupby needs equal priorities side by side; within one, the sort by age stays.
    oldest_first = sorted(waiting, key=age)
    ranked = sorted(oldest_first, key=lambda job: -priority(job, priorities))
    for _, group in groupby(ranked, key=lambda job: priority(job, priorities)):
        overdue: list[GRPOJobRecord] = []
        others: list[GRPOJobRecord] = []
        for job in group:
            if passed_over.get(job.uid, 0) >= MOST_PASSED_OVER:
                overdue.append(job)
            else:
                others.append(job)
        yield from overdue
        yield from _fair_order(others, gpus_held)


def _fair_order(jobs: list[GRPOJobRecord], gpus_held: Mapping[str, int]) -> Iterator[GRPOJobRecord]:
    """Jobs of one priority, oldest first in a namespace; the smallest share goes first."""
    lines: dict[str, list[GRPOJobRecord]] = {}
    for job in reversed(jobs):
        lines.setdefault(job.key.namespace, []).append(job)

    # A heap of the oldest job of each namespace. Only the namespace whose job was just yielded can
    # hold more GPUs now, so the other entries stay valid while the caller adds to `gpus_held`.
    def head(namespace: str) -> tuple[int, tuple[float, str], str]:
        oldest = lines[namespace][-1]
        return gpus_held.get(namespace, 0), age(oldest), namespace

    heads = [head(namespace) for namespace in lines]
    heapq.heapify(heads)
    while heads:
        _, _, namespace = heapq.heappop(heads)
        line = lines[namespace]
        yield line.pop()
        if line:
            heapq.heappush(heads, head(namespace))
