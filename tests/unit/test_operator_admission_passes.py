"""When passes are made, what jobs hear of them, and what happens when one can't be made."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest

from grpo_api.text.contract import LABEL_QUEUE
from grpo_kube.objects.errors import Unavailable
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.admission import queue as queue_module
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.queue import AdmissionQueue
from grpo_operator.admission.scheduler import MOST_NEW_SPECS, Cycle, CycleInput, schedule
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.operator_world import (
    LIMITS,
    NOW,
    PODS,
    active_status,
    at,
    condition,
    make_job,
    make_seen,
)
from tests.unit.queue_world import ASKED, Jobs, cluster, gang, gpu_pod, job, own_pod


class Bench:
    """A queue, the cluster that it sees, and what its jobs hear."""

    def __init__(self, jobs: list[GRPOJobRecord], snapshot: Snapshot) -> None:
        self.jobs, self.snapshot, self.now = Jobs(jobs), snapshot, NOW
        self.set_back = 0
        """Seconds by which the wall clock was set back."""
        self.problem: Unavailable | None = None
        self.heard: list[tuple[str, bool]] = []
        self.queue = AdmissionQueue(
            self.jobs,
            self.take,
            self.tell,
            limits=LIMITS,
            pods=PODS,
            clock=ProcessClock(lambda: self.now - self.set_back, lambda: Observed(self.now)),
            first_seen_tracker=FirstSeenTracker(),
        )
        for one in jobs:
            self.queue.record_job(one.key, one)

    def take(self) -> Snapshot:
        if self.problem:
            raise self.problem
        return self.snapshot

    def tell(self, keys: Iterable[ObjectKey], *, slow: bool = False) -> None:
        self.heard += [(key.name, slow) for key in keys]

    async def news(self) -> list[tuple[str, bool]]:
        """Makes a pass; what was heard of it."""
        self.heard = []
        await self.queue.run_cycle()
        return self.heard

    async def action(self, one: GRPOJobRecord) -> Action | None:
        answer = await self.queue.answer(make_seen(one), ASKED)
        return answer.action if answer else None


def waiting(count: int, gpus: int = 8) -> list[GRPOJobRecord]:
    return [job(f"j{number}", gang(1, gpus), age=1000 - number) for number in range(count)]


@contextlib.asynccontextmanager
async def running(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[CycleInput]]:
    """The queue runs; what its passes were asked."""
    asked: list[CycleInput] = []

    def noted(question: CycleInput, plans: Plans) -> Cycle:
        asked.append(question)
        return schedule(question, plans)

    monkeypatch.setattr(queue_module, "schedule", noted)
    task = asyncio.create_task(bench.queue.run())
    yield asked
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(probe: Any) -> None:
    async with asyncio.timeout(30):
        while not probe():  # noqa: ASYNC110  what a pass does sets no event
            await asyncio.sleep(0.01)


async def test_many_that_come_at_once_make_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([], cluster(8, pods=[gpu_pod("p", 8)]))
    async with running(bench, monkeypatch) as asked:
        for one in waiting(100):
            bench.jobs.append(one)
            bench.queue.record_job(one.key, one)
        await until(lambda: len(bench.heard) == 100)
        assert len(asked) == 1


async def test_a_change_that_concerns_nobody_makes_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(waiting(1), cluster(8))
    async with running(bench, monkeypatch) as asked:
        await until(lambda: asked)
        for one in (bench.jobs[0], make_job(name="cpu", uid="uid-cpu")):
            bench.queue.record_job(one.key, one)
        bench.queue.record_job(ObjectKey("team-a", "never-known"), None)
        await asyncio.sleep(5 * queue_module.GATHER)
        assert len(asked) == 1


async def test_who_is_paused_is_judged_when_the_pause_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = {"attempt": 1, "reason": "SchedulingTimeout", "endTime": at(-29.9)}
    released = [condition("Admitted", "False", "SchedulingTimeout", since=-29.9)]
    one = make_job(
        {"placement": {"accelerator": "GPU"}}, {"attempt": 1, "conditions": released, "ends": [end]}
    )
    bench = Bench([one], cluster(8))
    async with running(bench, monkeypatch):
        await asyncio.sleep(5 * queue_module.GATHER)
        bench.now += 1
        await until(lambda: bench.heard)


async def test_only_news_is_told() -> None:
    bench = Bench(waiting(3), cluster(8, pods=[gpu_pod("p", 8)]))
    assert await bench.news() == [("j0", False), ("j1", False), ("j2", False)]
    assert await bench.news() == []
    bench.snapshot = cluster(8)
    assert await bench.news() == [("j0", False)], "the others wait as before, for another"
    assert [await bench.action(one) for one in bench.jobs] == [
        Action.COMMIT,
        Action.QUEUE,
        Action.QUEUE,
    ]


async def test_new_sentences_alone_are_told_one_after_the_other() -> None:
    bench = Bench(waiting(3), cluster(8, pods=[gpu_pod("p", 8)]))
    await bench.news()
    bench.snapshot = cluster(8, pods=[gpu_pod("q", 8)])
    assert await bench.news() == []
    before = await bench.queue.answer(make_seen(bench.jobs[0]), ASKED)
    bench.queue._publisher.publish_one_message()
    after = await bench.queue.answer(make_seen(bench.jobs[0]), ASKED)
    assert bench.heard == [("j0", True)]
    assert before is not None
    assert after is not None
    assert ("team-a/p" in before.message, "team-a/q" in after.message) == (True, True)
    assert await bench.news() == [], "those who wait for their turn keep it"
    for _ in range(5):
        bench.queue._publisher.publish_one_message()
    assert bench.heard == [("j1", True), ("j2", True)]


async def test_nobody_is_answered_before_a_pass_and_none_is_made_blind() -> None:
    bench = Bench(waiting(1), cluster(8))
    assert await bench.action(bench.jobs[0]) is None
    bench.problem = Unavailable("nodes of all namespaces have not been listed")
    assert await bench.news() == []
    assert await bench.action(bench.jobs[0]) is None
    bench.problem = None
    await bench.news()
    assert await bench.action(bench.jobs[0]) is Action.COMMIT


@pytest.mark.parametrize(("taken", "verdict"), [(0, Action.COMMIT), (8, Action.QUEUE)])
async def test_a_verdict_is_for_one_generation(taken: int, verdict: Action) -> None:
    bench = Bench(waiting(1), cluster(8, pods=[gpu_pod("p", taken)]))
    await bench.news()
    assert await bench.action(bench.jobs[0]) is verdict
    changed = make_job(
        {"placement": {"accelerator": "GPU", "nodes": None}}, name="j0", uid="uid-j0", generation=2
    )
    bench.jobs[0] = changed
    assert await bench.action(changed) is None


@pytest.mark.parametrize("set_back", [0, 3600])
async def test_a_commit_that_is_denied_gives_its_place_to_others_for_a_while(set_back: int) -> None:
    first, second = waiting(2)
    bench = Bench([first, second], cluster(8))
    await bench.news()
    bench.queue.release_denied(first)
    bench.set_back = set_back
    assert await bench.action(first) is None
    assert await bench.news() == [("j1", False)]
    assert await bench.action(second) is Action.COMMIT
    bench.now += 60
    assert await bench.news() == [("j0", False)]
    assert await bench.action(first) is Action.QUEUE, "its GPUs are the other's by now"


async def test_a_restart_is_answered_at_once_and_counts_who_was_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = job("mine", gang(1, 8), active=True), job("other", gang(1, 8))
    bench = Bench([mine, other], cluster(8, 8, pods=[own_pod(mine, 8, "node-0")]))
    assert await bench.action(mine) is Action.COMMIT, "without any pass"
    bench = Bench([mine, other], cluster(8, 8, pods=[own_pod(mine, 8, "node-0")]))
    await bench.news()
    bench.snapshot = cluster(8)
    assert await bench.action(other) is Action.COMMIT
    assert await bench.action(mine) is Action.QUEUE, (
        "its node is gone, and the other was promised the last"
    )


async def test_a_pass_that_a_restart_overtook_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = job("mine", gang(1, 8), active=True), job("other", gang(1, 8))
    bench = Bench([mine, other], cluster(8, 8, pods=[own_pod(mine, 8, "node-0")]))

    async def slow(work: Any, *arguments: Any) -> Any:
        found = work(*arguments)
        bench.snapshot = cluster(8)
        assert await bench.action(mine) is Action.COMMIT
        return found

    with monkeypatch.context() as patched:
        patched.setattr("asyncio.to_thread", slow)
        assert await bench.news() == []
    assert await bench.action(other) is None
    await bench.news()
    assert await bench.action(other) is Action.QUEUE


async def test_a_job_that_comes_during_a_pass_is_judged_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, late = waiting(2)
    bench = Bench([first], cluster(8))

    def slow(question: CycleInput, plans: Plans) -> Cycle:
        if late not in bench.jobs:
            bench.jobs.append(late)
            bench.queue.record_job(late.key, late)
        return schedule(question, plans)

    monkeypatch.setattr(queue_module, "schedule", slow)
    task = asyncio.create_task(bench.queue.run())
    await asyncio.sleep(10 * queue_module.GATHER)
    task.cancel()
    assert bench.heard == [("j0", False), ("j1", False)]


async def test_a_pass_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(waiting(1), cluster(8))

    def stumble(*_: object) -> None:
        raise IndexError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(queue_module, "schedule", stumble)
        assert await bench.queue._run_cycle_safely() == queue_module.NOT_KNOWN_PAUSE
    assert "a cycle over the queue failed" in caplog.text
    await bench.news()
    assert await bench.action(bench.jobs[0]) is Action.COMMIT


@pytest.mark.parametrize("turns", range(6))
async def test_a_queue_ends_at_whatever_moment_it_is_cancelled(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many events and the end come in one turn of the loop to a process that stood still.
    bench = Bench(waiting(1), cluster(8))

    def stumble(*_: object) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(queue_module, "schedule", stumble)
    task = asyncio.create_task(bench.queue.run())
    # Since the cycle failed, the next one is due in time, or with a change.
    await asyncio.sleep(queue_module.NOT_KNOWN_PAUSE / 2)
    bench.queue.wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    ended, _ = await asyncio.wait({task}, timeout=100)
    assert ended


async def test_many_new_specs_are_planned_over_several_passes_and_those_ahead_don_t_wait() -> None:
    count = MOST_NEW_SPECS + 5
    jobs = []
    for number in range(count):
        spec = {
            "placement": {"accelerator": "GPU", "gpuProduct": "None"},
            "training": {"learningRate": 1e-6 * (number + 1)},
        }
        jobs.append(
            make_job(
                spec,
                name=f"j{number:03}",
                uid=f"uid-{number:03}",
                creationTimestamp=at(number - 1000),
            )
        )
    bench = Bench(jobs, cluster(8))
    assert len(await bench.news()) == MOST_NEW_SPECS
    assert await bench.news() == [
        (f"j{number:03}", False) for number in range(MOST_NEW_SPECS, count)
    ]
    assert await bench.action(jobs[0]) is Action.QUEUE


async def test_a_gang_that_can_not_be_looked_at_any_more_holds_its_place_until_its_jobs_say_otherwise() -> (  # noqa: E501
    None
):
    holder, waits = job("holder", gang(1, 8), age=200, active=True), job("waits", gang(1, 8))
    bench = Bench([holder, waits], cluster(8))
    bench.queue.record_job(holder.key, None)  # its status can't be read, and its Job lives
    await bench.news()
    assert await bench.action(waits) == Action.QUEUE
    bench.jobs.remove(holder)
    bench.queue.record_job(holder.key, None)
    assert bench.queue._is_due.is_set(), "its GPUs are free"
    await bench.news()
    assert await bench.action(waits) == Action.COMMIT


async def test_the_release_of_a_gang_that_got_a_queue_name_wakes_those_who_wait() -> None:
    placement = {"placement": {"accelerator": "GPU"}}
    named = {"labels": {LABEL_QUEUE: "team"}}
    holder = make_job(placement, active_status(plan=gang(1, 8)), **named)
    waits = job("waits", gang(1, 8))
    bench = Bench([replace(holder, keeps_place=True), waits], cluster(8))
    bench.queue.record_job(holder.key, holder)
    await bench.news()
    released = make_job(placement, {"attempt": 1}, **named)
    bench.jobs[0] = released
    bench.queue.record_job(holder.key, released)
    assert bench.queue._is_due.is_set()
    await bench.news()
    assert await bench.action(waits) == Action.COMMIT
