"""The work queue, the cache and what is cleared up: the parts that keep the loop honest."""

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_kube.cache import Cache, Quarantine
from grpo_kube.objects.errors import Conflict, Unavailable
from grpo_kube.objects.resources import PODS, ObjectKey
from grpo_kube.work_queue import LAST_RETRY, WorkObserver, WorkQueue, work
from grpo_operator.decide.cleanup import CleanUp, clean_up
from grpo_operator.decide.observation import Observation
from grpo_operator.records.parsing import pod_record
from grpo_operator.records.records import PodRecord
from tests.unit.operator_world import (
    LIMITS,
    active_status,
    condition,
    make_child,
    make_job,
    make_pod,
    make_seen,
    running,
    terminated,
)
from tests.virtual_time import virtually

A, B, C = ObjectKey("n", "a"), ObjectKey("n", "b"), ObjectKey("n", "c")


async def drain(queue: WorkQueue) -> list[ObjectKey]:
    found = []
    while len(queue):
        key, _ = await queue.get()
        found.append(key)
        queue.done(key)
    return found


async def test_a_key_is_queued_once_however_often_it_is_added() -> None:
    queue = WorkQueue()
    for key in (A, B, A, A, B):
        queue.add(key)
    assert await drain(queue) == [A, B]


async def test_what_only_has_to_be_told_goes_last() -> None:
    queue = WorkQueue()
    queue.add(A, slow=True)
    queue.add(B)
    queue.add(C, slow=True)
    assert await drain(queue) == [B, A, C]


async def test_a_key_moves_to_the_fast_lane_but_not_back() -> None:
    queue = WorkQueue()
    queue.add(A, slow=True)
    queue.add(B, slow=True)
    queue.add(B)
    queue.add(B, slow=True)
    assert await drain(queue) == [B, A]


async def test_a_key_is_never_worked_on_twice_at_once() -> None:
    queue = WorkQueue()
    queue.add(A)
    key, _ = await queue.get()
    queue.add(A)
    queue.add(B)
    assert (await queue.get())[0] == B
    queue.done(key)
    assert (await queue.get())[0] == A


STEPS = st.tuples(st.sampled_from(("add", "slow", "get", "done")), st.sampled_from((A, B)))


# The key stands in both lanes; the second entry comes up while the first is worked on.
@example([("slow", A), ("add", A), ("get", A), ("add", A), ("slow", B), ("get", A)])
@given(st.lists(STEPS, min_size=8))
def test_whatever_is_added_no_key_has_two_workers_and_none_is_lost(
    steps: list[tuple[str, ObjectKey]],
) -> None:
    virtually(_work_as_told(steps))


async def _work_as_told(steps: list[tuple[str, ObjectKey]]) -> None:
    queue, added, active = WorkQueue(), set[ObjectKey](), set[ObjectKey]()
    for step, key in steps:
        if step in ("add", "slow"):
            queue.add(key, slow=step == "slow")
            added.add(key)
        elif step == "get" and added - active:
            taken, _ = await queue.get()
            assert taken not in active
            active.add(taken)
            added.remove(taken)
        elif step == "done" and key in active:
            active.remove(key)
            queue.done(key)
    for key in active:
        queue.done(key)
    assert set(await drain(queue)) == added


async def test_the_earliest_timer_of_a_key_counts() -> None:
    queue = WorkQueue()
    queue.add_after(A, 60)
    queue.add_after(A, 5)
    queue.add_after(A, 60)
    async with asyncio.timeout(10):
        assert (await queue.get())[0] == A


async def test_what_is_slow_stays_behind_when_its_time_has_come() -> None:
    queue = WorkQueue()
    queue.add_after(A, 5, slow=True)
    await asyncio.sleep(10)
    queue.add(B)
    assert await drain(queue) == [B, A]


async def test_work_cancels_the_timer_that_it_makes_needless() -> None:
    queue = WorkQueue()
    queue.add_after(A, 5)
    queue.add(A)
    assert await drain(queue) == [A]
    await asyncio.sleep(10)
    assert len(queue) == 0
    queue.add_after(A, 5)
    queue.close()
    await asyncio.sleep(10)
    assert len(queue) == 0


async def test_a_key_that_fails_for_days_is_retried_at_the_longest_pause() -> None:
    queue = WorkQueue()
    pauses = [queue.retry(A) for _ in range(2000)]
    assert 0.8 * LAST_RETRY <= pauses[-1] <= 1.2 * LAST_RETRY


async def test_retries_grow_and_are_forgotten_after_success() -> None:
    queue = WorkQueue()
    found = [queue.retry(A) for _ in range(12)]
    queue.forget(A)
    found.append(queue.retry(A))
    assert found[0] == pytest.approx(0.1, rel=0.2)
    assert found[5] == pytest.approx(3.2, rel=0.2)
    assert found[11] == pytest.approx(60, rel=0.2)
    assert found[12] == pytest.approx(0.1, rel=0.2)


class Notes(WorkObserver):
    def __init__(self) -> None:
        self.results: list[str] = []

    def record_wait(self, seconds: float) -> None:
        assert seconds >= 0

    def record_reconcile(self, seconds: float, result: str) -> None:
        assert seconds >= 0
        self.results.append(result)


async def test_a_worker_survives_every_error_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, notes = WorkQueue(), Notes()
    answers: list[Any] = [Conflict("changed"), Unavailable("away"), ValueError("a bug"), 0.01, None]
    finished = asyncio.Event()

    async def reconcile(_: ObjectKey) -> float | None:
        answer = answers.pop(0)
        if not answers:
            finished.set()
        if isinstance(answer, Exception):
            raise answer
        found: float | None = answer
        return found

    worker = asyncio.create_task(work(queue, reconcile, notes))
    queue.add(A)
    async with asyncio.timeout(10):
        await finished.wait()
    await asyncio.sleep(0)
    worker.cancel()
    assert notes.results == ["requeue", "error", "error", "requeue_after", "success"]
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


def item(name: str, version: int, uid: str = "u") -> Any:
    meta = {"namespace": "n", "name": name, "uid": uid, "resourceVersion": str(version)}
    labels = {"grpo.dev/job-name": "run", "grpo.dev/attempt": "1"}
    return {"metadata": {**meta, "labels": labels}, "spec": {}, "status": {}}


def pods() -> Cache[PodRecord]:
    return Cache(PODS, pod_record, Quarantine(), index=lambda pod: pod.job_key)


def kept(cache: Cache[PodRecord], thing: Any) -> PodRecord:
    record = cache.put(thing)
    assert record is not None
    return record


def test_an_event_that_is_late_does_not_replace_our_own_newer_answer() -> None:
    cache = pods()
    assert kept(cache, item("p", 7)).version == 7
    assert kept(cache, item("p", 5)).version == 7
    assert kept(cache, item("p", 8, "another")).uid == "another"
    assert kept(cache, item("p", 7)).uid == "another"


def test_a_deletion_of_an_object_whose_name_was_taken_again_is_ignored() -> None:
    cache = pods()
    cache.put(item("p", 7, "new"))
    assert cache.discard(ObjectKey("n", "p"), "old") is None
    assert cache.discard(ObjectKey("n", "gone"), "old") is None
    assert len(cache) == 1
    assert cache.discard(ObjectKey("n", "p"), "new") is not None
    assert len(cache.owned_by(ObjectKey("n", "run"))) == 0


def listed(
    cache: Cache[PodRecord],
    objects: tuple[tuple[str, int], ...],
    version: int,
    written_meanwhile: tuple[tuple[str, int], ...] = (),
) -> set[ObjectKey]:
    with cache.relist() as listing:
        for name, at in objects:
            listing.add(item(name, at))
        for name, at in written_meanwhile:
            cache.put(item(name, at))
        listing.finish(version)
    return listing.changed


def test_a_list_removes_ghosts_and_keeps_what_is_newer_than_itself() -> None:
    cache = pods()
    for name, version in (("ghost", 3), ("same", 4), ("old", 5)):
        cache.put(item(name, version))
    objects = (("same", 4), ("old", 9), ("fresh", 10))
    changed = listed(cache, objects, 15, written_meanwhile=(("newer", 20),))
    assert changed == {ObjectKey("n", "run")}
    assert sorted(record.name for record in cache) == ["fresh", "newer", "old", "same"]
    assert cache.ghosts == 1
    assert listed(cache, (("same", 4), ("old", 9), ("fresh", 10), ("newer", 20)), 30) == set()


def cleared(seen: Observation) -> CleanUp:
    return clean_up(seen, LIMITS)


def test_a_running_gang_is_left_alone() -> None:
    assert cleared(running()) == CleanUp()


def test_only_the_last_failed_job_is_kept() -> None:
    seen = make_seen(
        make_job(status=active_status(attempt=3)), make_child(1), make_child(2), make_child(3)
    )
    assert cleared(seen) == CleanUp(delete_jobs=("run-1",))


def test_survivors_are_left_to_the_job_controller_when_it_will_end_them() -> None:
    job = make_job(status=active_status(attempt=2))
    failed = make_seen(
        job, make_child(1), make_child(2), make_pod(0, 1, terminated(1)), make_pod(1, 1)
    )
    assert cleared(failed) == CleanUp()
    hung = make_seen(job, make_child(1), make_child(2), make_pod(0, 1), make_pod(1, 1))
    assert cleared(hung) == CleanUp(stop_attempts=(1,))


def test_orphans_are_not_left_to_the_controller_of_another_job() -> None:
    job = make_job(status=active_status(attempt=2))
    pods = (make_pod(0, 1, terminated(1)), make_pod(1, 1, by=""))
    assert cleared(make_seen(job, make_child(1), make_child(2), *pods)) == CleanUp(
        stop_attempts=(1,)
    )


def test_a_pod_whose_container_has_just_failed_is_not_deleted_with_its_logs() -> None:
    status = active_status(conditions=[condition("Failed", since=0)])
    pods = (make_pod(0, state=terminated(1), phase="Running"), make_pod(1))
    assert cleared(make_seen(make_job(status=status), make_child(), *pods)) == CleanUp()


def test_a_job_that_is_suspended_or_released_loses_its_job_and_pods() -> None:
    job = make_job(status=active_status(conditions=[condition("Admitted", "False", "Suspended")]))
    assert cleared(make_seen(job, make_child(), make_pod(0))) == CleanUp(("run-1",), (1,))


def test_a_failed_attempt_that_waits_for_gpus_keeps_its_logs() -> None:
    job = make_job(
        status=active_status(conditions=[condition("Admitted", "False", "WaitingForGPUs")])
    )
    assert cleared(make_seen(job, make_child(), make_pod(0, state=terminated(1)))) == CleanUp()


@pytest.mark.parametrize("state", [None, terminated(1)])
def test_a_gang_that_waits_is_not_kept_waiting_by_pods_that_its_deleted_job_left(
    state: dict[str, Any] | None,
) -> None:
    """As after `kubectl delete job --cascade=orphan`: nobody else would ever end them."""
    job = make_job(
        status=active_status(conditions=[condition("Admitted", "False", "WaitingForGPUs")])
    )
    left = (make_pod(0, state=state, by=""), make_pod(1, by=""))
    assert cleared(make_seen(job, *left)) == CleanUp(stop_attempts=(1,))
    assert cleared(make_seen(make_job(status=active_status()), *left)) == CleanUp()


def test_peers_of_a_rank_0_that_is_done_get_time_to_end() -> None:
    done = active_status(conditions=[condition("Succeeded", since=-10)])
    late = active_status(conditions=[condition("Succeeded", since=-31)])
    failed = active_status(conditions=[condition("Failed", since=-1)])
    for status, stop in ((done, ()), (late, (1,)), (failed, (1,))):
        seen = make_seen(
            make_job(status=status), make_child(), make_pod(0, state=terminated(0)), make_pod(1)
        )
        assert cleared(seen) == CleanUp(stop_attempts=stop)


async def test_a_queue_counts_what_is_put_in_and_tells_how_long_the_oldest_takes() -> None:
    queue = WorkQueue()
    for name in ("a", "b", "a"):
        queue.add(ObjectKey("n", name))
    assert (queue.adds, queue.active, queue.longest) == (2, 0, 0.0)
    first, _ = await queue.get()
    await asyncio.sleep(3.0)
    await queue.get()
    await asyncio.sleep(1.0)
    assert (queue.active, queue.longest) == (2, 4.0)
    queue.done(first)
    assert (queue.active, queue.longest) == (1, 1.0)
    queue.retry(first)
    assert (queue.retries, queue.adds) == (1, 2)
    queue.close()
