"""A Job whose end is seen before any of its pods is not judged until these were asked for."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from grpo_kube.objects.errors import Unavailable
from grpo_kube.objects.resources import PODS, Object, Selection
from grpo_operator.decide.observation import Observation
from grpo_operator.loop.caches import Caches, fetch_missing_pods
from grpo_operator.records.records import JobRecord, PodRecord
from tests.unit.operator_world import (
    KEY,
    active_status,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    pod_object,
    terminated,
)

ENDED = make_child(ended="Failed", reason="BackoffLimitExceeded")


class Listed:
    """Answers a LIST of pods, once there is an answer."""

    def __init__(self, *items: Object, away: bool = False) -> None:
        self.items, self.away, self.asked = list(items), away, list[Selection]()

    async def pages(self, selection: Selection) -> AsyncIterator[tuple[list[Object], int]]:
        self.asked.append(selection)
        if self.away:
            raise Unavailable("no")
        for item in self.items:
            yield [item], 20


def seen(*things: JobRecord | PodRecord) -> Observation:
    return make_seen(make_job(status=active_status()), *things, ago=0)


async def test_what_ended_a_job_is_asked_of_its_pods_before_it_passes_for_a_disruption() -> None:
    cluster, caches = Listed(pod_object(state=terminated(139))), Caches()
    before = seen(ENDED)
    assert (judged(before).reason, judged(before).counted) == ("Preempted", False)
    assert await fetch_missing_pods(cluster, caches, before)  # type: ignore[arg-type]
    selector = "batch.kubernetes.io/controller-uid=job-1"
    assert cluster.asked == [Selection(PODS, KEY.namespace, selector)]
    after = seen(ENDED, *caches.pods.owned_by(KEY))
    assert (judged(after).reason, judged(after).counted) == ("Error", True)


async def test_pods_that_seem_to_run_after_the_end_of_their_job_are_asked_for() -> None:
    """Their watch may be dead without a sign: it is silent for minutes until that is noticed."""
    killed = terminated(137, reason="OOMKilled")
    items = (pod_object(state=killed), pod_object(1, state=terminated(143)))
    cluster, caches = Listed(*items), Caches()
    before = seen(ENDED, make_pod(), make_pod(1))
    assert await fetch_missing_pods(cluster, caches, before)  # type: ignore[arg-type]
    after = seen(ENDED, *caches.pods.owned_by(KEY))
    assert (judged(after).reason, judged(after).counted) == ("OutOfMemory", True)


ENDS = (make_pod(state=terminated(1)), make_pod(1, state=terminated(143)))


@pytest.mark.parametrize("things", [(), (make_child(),), (ENDED, *ENDS)])
async def test_nobody_is_asked_while_the_job_runs_or_all_ends_are_known(things: Any) -> None:
    cluster = Listed(away=True)
    assert not await fetch_missing_pods(cluster, Caches(), seen(*things))  # type: ignore[arg-type]
    assert cluster.asked == []


async def test_without_an_answer_nothing_is_judged() -> None:
    with pytest.raises(Unavailable):
        await fetch_missing_pods(Listed(away=True), Caches(), seen(ENDED))  # type: ignore[arg-type]
