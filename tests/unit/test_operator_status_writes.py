"""A status write stands on the version that was looked at: no decision overwrites what it has not
seen."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_api.plan.learned import Learned
from grpo_api.report.report import Outcome, Result
from grpo_kube.objects.errors import ClusterError, Conflict, Denied, Unavailable
from grpo_kube.objects.resources import Object, Resource
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.status_writer import MOST_UNCONFIRMED, StatusThrottle, StatusWriter
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.report.status import build_status, to_json
from tests.unit.operator_world import (
    PLAN,
    TRAINERS,
    active_status,
    at,
    job_object,
    make_child,
    make_job,
    make_pull,
    make_seen,
)
from tests.unit.reconcile_world import apply_merge_patch

COMMIT = Decision(Action.COMMIT, plan=PLAN)
WAIT = Decision(Action.WAIT)
RUNNING = make_seen(make_job(status=active_status()), *TRAINERS, pull=make_pull(step=3))
"""Of a job of version 10."""
STARTING = make_seen(make_job(status=active_status(running=False)), make_child())


class Api:
    """Takes a status patch only on the version that stands, and denies what pods reported, if it is
    told to."""

    def __init__(
        self,
        version: str = "10",
        *,
        denies: str = "",
        loses: type[ClusterError] | None = None,
        before: Object | None = None,
    ) -> None:
        self.before = before or active_status()
        self.version = version
        self.denies = denies
        self.loses = loses
        """The error instead of an answer, of a patch that is taken."""
        self.taken: list[Object] = []
        self.caches = Caches()
        self.reported: list[str] = []
        api: Any = self
        self.writer = StatusWriter(api, self.caches.grpojobs, 5.0, self._report)

    def _report(self, job: GRPOJobRecord, *_: Any) -> None:
        self.reported.append(job.name)

    async def patch(
        self, _kind: Resource, _namespace: str, _name: str, patch: Object, _subresource: str
    ) -> Object:
        """As the API server does."""
        if patch["metadata"]["resourceVersion"] != self.version:
            raise Conflict("the object has been modified", 409)
        if self.denies in patch["status"]:
            raise Denied(f"status.{self.denies}: Invalid value", 422)
        self.taken.append(patch)
        self.version = str(int(self.version) + 1)
        if self.loses:
            raise self.loses("no answer")
        status = self.before
        for taken in self.taken:
            status = apply_merge_patch(status, taken["status"])
        return job_object(status=status, resourceVersion=self.version)

    async def get(self, *_: Any) -> Object:
        return job_object(status=active_status(), resourceVersion=self.version)


async def test_a_status_is_written_on_the_version_that_was_looked_at() -> None:
    api = Api()
    await api.writer.commit(RUNNING, COMMIT)
    (patch,) = api.taken
    assert patch["metadata"] == {"resourceVersion": "10"}
    assert patch["status"]["attempt"] == 2
    assert api.reported == ["run"]


@pytest.mark.parametrize("denies", ["nothing", "progress"])
async def test_a_status_is_not_written_over_what_came_since(denies: str) -> None:
    api = Api("42", denies=denies)
    with pytest.raises(Conflict):
        await api.writer.publish(RUNNING, WAIT)
    assert (api.taken, api.reported) == ([], [])
    (job,) = api.caches.grpojobs
    assert job.version == 42, "the next decision is made on what stands"


@pytest.mark.parametrize("denied", ["progress", "metrics", "pods"])
async def test_what_is_denied_takes_no_other_field_with_it(denied: str) -> None:
    api, willing_api = Api(denies=denied), Api(denies="nothing")
    await api.writer.publish(RUNNING, WAIT)
    await willing_api.writer.publish(RUNNING, WAIT)
    written = {field for patch in api.taken for field in patch["status"]}
    assert written == willing_api.taken[0]["status"].keys() - {denied}
    assert "conditions" in api.taken[0]["status"], "what is decided is written at once"
    assert len(api.reported) == 1


async def test_what_was_denied_is_written_once_its_value_is_another() -> None:
    api = Api(denies="progress")
    await api.writer.publish(RUNNING, WAIT)
    written = make_job(status=apply_merge_patch(active_status(), api.taken[0]["status"]))
    later = make_seen(written, *TRAINERS, pull=make_pull(step=4))
    later = replace(later, at=Observed(RUNNING.at.at + 60))
    api.denies, api.version = "nothing", str(later.job.version)
    await api.writer.publish(later, WAIT)
    assert api.taken[-1]["status"]["progress"]["step"] == 4


@pytest.mark.parametrize("error", [Unavailable, Conflict])
@pytest.mark.parametrize("applied", [True, False])
async def test_a_write_whose_answer_is_lost_is_reported_if_the_api_server_took_it(
    error: type[ClusterError], applied: bool
) -> None:
    api = Api(loses=error)
    with pytest.raises(error):
        await api.writer.publish(RUNNING, WAIT)
    assert api.reported == []
    api.loses = None
    job = RUNNING.job
    if applied:
        job = make_job(status=to_json(build_status(RUNNING, WAIT)), resourceVersion="11")
    api.version = str(job.version)
    await api.writer.publish(replace(RUNNING, job=job), WAIT)
    assert api.reported == ["run"], "reported once, by the first write or by its repetition"
    assert len(api.taken) == (1 if applied else 2)


async def test_writes_that_fail_for_days_take_no_more_memory() -> None:
    api = Api(denies="conditions")
    for number in range(100):
        waits = Decision(Action.QUEUE, "WaitingForGPUs", f"{number} free", plan=PLAN)
        with pytest.raises(Denied):
            await api.writer.publish(STARTING, waits)
    (remembered,) = api.writer._unconfirmed.values()
    assert len(remembered[1]) == MOST_UNCONFIRMED


@pytest.mark.parametrize(
    ("running", "patch", "seconds"),
    [
        (True, {"phase": "Running", "progress": {}}, 0.0),
        (True, {"conditions": [], "progress": {}}, 0.0),
        (True, {"progress": {}}, 3.0),
        (False, {"phase": "Starting", "conditions": []}, 0.0),
        (False, {"conditions": []}, 8.0),
    ],
)
def test_what_is_not_urgent_waits_for_company(running: bool, patch: Object, seconds: float) -> None:
    observation = RUNNING if running else STARTING
    throttle = StatusThrottle(5.0)
    assert throttle.seconds_left(observation, patch) <= 0.0, "nothing was written before"
    throttle.record_write(observation.job.key, Observed(observation.at.at - 2.0), {})
    assert throttle.seconds_left(observation, patch) == seconds


NEWER: dict[str, Any] = {"queue": ["a"], "depth": {"b": 1}}
"""Fields that only a newer version knows."""


@pytest.mark.parametrize("is_commit", [False, True])
async def test_fields_of_a_newer_version_survive_a_write(is_commit: bool) -> None:
    """Two versions take turns during an upgrade, and after a rollback."""
    end = {"attempt": 1, "reason": "Error", "endTime": at(-90), **NEWER}
    status = active_status(attempt=2, ends=[end], learned={"hasVllm": False, **NEWER}, **NEWER)
    status["plan"] |= NEWER
    plan = PLAN.model_copy(update={"micro_batch": 2}) if is_commit else None
    decision = Decision(
        Action.COMMIT if is_commit else Action.WAIT,
        plan=plan,
        ended=Outcome(result=Result.ERROR),
        learned=Learned(has_vllm=True),
    )
    api = Api(before=status)
    await api.writer.commit(make_seen(make_job(status=status), *TRAINERS), decision)
    (patch,) = api.taken
    written = apply_merge_patch(status, patch["status"])
    assert written["learned"]["hasVllm"]
    assert [end["attempt"] for end in written["ends"]] == [1, 2]
    for part in (written, written["ends"][0], written["learned"]):
        assert part.items() >= NEWER.items()
    # Another plan is made by this version, and the newer fields say nothing of it.
    assert (written["plan"].items() >= NEWER.items()) is not is_commit
