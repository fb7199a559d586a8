"""Pulling the progress of rank 0: what is understood, what is a failed pull, and how often who is
asked."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from grpo_api.report.report import Progress
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed
from grpo_operator.loop.progress import (
    MAX_ANSWER,
    ProgressPuller,
    PullFailed,
    Target,
    http_fetch,
    next_pull,
    targets,
)
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.operator_world import KEY, UID, active_status, make_job, make_pod
from tests.unit.test_kube_client import Handler, serving

ANSWER = {"attempt": 1, "step": 3, "totalSteps": 9, "samples": [{"prompt": "p"}], "newer": "field"}


def target(ip: str, uid: str = "pod-1") -> Target:
    """Rank 0 of the first attempt of a job."""
    return Target(KEY, uid, ip, UID, 1)


def running_job(uid: str = UID, attempt: int = 1) -> GRPOJobRecord:
    """The job, or another that was made under its name since."""
    return make_job(status=active_status(attempt), uid=uid)


async def fetched(handler: Handler) -> Any:
    async with serving(handler) as url, aiohttp.ClientSession() as session:
        return await http_fetch(session, int(url.rsplit(":", 1)[1]))(target("127.0.0.1"))


@pytest.mark.realtime
async def test_progress_of_a_newer_trainer_is_understood() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/progress"
        return web.json_response(ANSWER)

    assert (await fetched(answer)).step == 3


@pytest.mark.realtime
@pytest.mark.parametrize("text", ["{}", "not json", '{"attempt": 0}', "x" * (MAX_ANSWER + 1)])
async def test_answers_that_are_no_progress_are_failed_pulls(text: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    with pytest.raises(PullFailed):
        await fetched(answer)


@pytest.mark.realtime
async def test_redirects_and_errors_are_failed_pulls() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "http://169.254.169.254/"})

    with pytest.raises(PullFailed, match="302"):
        await fetched(answer)


class Trainer:
    """A rank 0 that answers, or not."""

    def __init__(self) -> None:
        self.asked = 0
        self.broken = False

    async def fetch(self, _: Target) -> Any:
        self.asked += 1
        if self.broken:
            raise PullFailed("refused")
        return Progress.model_validate(ANSWER, extra="ignore")


async def test_the_last_answer_is_kept_while_its_pod_lives() -> None:
    trainer, told, results = Trainer(), list[ObjectKey](), list[str]()
    job = running_job()
    targets = [target("10.0.0.1")]
    puller = ProgressPuller(lambda: targets, trainer.fetch, told.append, 5.0, results.append)
    puller.tick(0.0)
    await asyncio.sleep(1)
    kept = puller.pull(job)
    assert puller.silence(job) is None
    assert kept is not None
    assert (kept.progress.step, told) == (3, [KEY])
    trainer.broken = True
    puller.tick(1e9)
    await asyncio.sleep(1)
    assert puller.pull(job) is kept
    silence = puller.silence(job)
    assert silence is not None
    assert (silence.since, silence.problem) == (kept.at, "refused")
    assert (results, len(told)) == (["success", "error"], 2)
    targets[0] = target("10.0.0.2", "pod-2")
    puller.tick(0.0)
    assert puller.pull(job) is None
    targets.clear()
    puller.tick(0.0)
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    "other", [running_job(uid="uid-of-another"), running_job(attempt=2)], ids=["job", "attempt"]
)
async def test_what_rank_0_said_is_not_told_of_another(other: GRPOJobRecord) -> None:
    """The next tick may come a second after another job of that name, or another attempt."""
    trainer = Trainer()
    puller = ProgressPuller(lambda: [target("10.0.0.1")], trainer.fetch, lambda _: None, 5.0)
    puller.tick(0.0)
    await asyncio.sleep(1)
    assert puller.pull(running_job())
    assert puller.pull(other) is None
    trainer.broken = True
    puller.tick(1e9)
    await asyncio.sleep(1)
    assert puller.silence(running_job())
    assert puller.silence(other) is None


def test_pods_of_an_older_job_of_that_name_are_not_asked() -> None:
    """They may take minutes to end, and answer until then."""
    old = make_pod(0, owner="uid-of-another", by="job-of-another", uid="old")
    pods = [old, make_pod(0), old]
    assert [asked.uid for asked in targets([running_job()], lambda _: pods)] == [pods[1].uid]


async def test_a_target_that_does_not_answer_is_asked_less_often() -> None:
    trainer = Trainer()
    trainer.broken = True
    puller = ProgressPuller(lambda: [target("10.0.0.1")], trainer.fetch, lambda _: None, 5.0)
    running = asyncio.create_task(puller.run())
    await asyncio.sleep(200)
    running.cancel()
    assert 2 <= trainer.asked <= 8


@pytest.mark.parametrize(
    ("stage", "advances"),
    [("Loading", True), ("Training", False)],
    ids=["a load that gets on", "training"],
)
def test_events_are_progress_except_while_it_trains(stage: str, advances: bool) -> None:
    def answer(events: int) -> Progress:
        return Progress(attempt=1, stage=stage, step=2, events=events)

    first = next_pull(None, answer(4), Observed(10.0))
    same, later = (
        next_pull(first, answer(4), Observed(20.0)),
        next_pull(first, answer(5), Observed(20.0)),
    )
    assert same.advanced_at == Observed(10.0)
    assert later.advanced_at == Observed(20.0 if advances else 10.0)
