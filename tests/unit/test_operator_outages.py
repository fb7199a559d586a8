"""While the API server does not create the Job of an attempt, its job says why, holds nothing for
longer than a gang may wait for nodes, and starts soon after."""

from typing import Any

import pytest

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.errors import Forbidden
from grpo_kube.objects.resources import JOBS, Object, Resource
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.kueue_world import QUEUED
from tests.unit.operator_world import GPU_PLAN, LIMITS, NOW, PLAN, SERVED_PLAN
from tests.unit.write_world import BAD, WELL, World
from tests.virtual_time import virtually

GPUS: dict[str, Any] = {"placement": {"accelerator": "GPU", "nodes": None}, "preflight": "Off"}
KINDS: dict[str, tuple[dict[str, Any], ExecutionPlan]] = {
    "CPUs": ({}, PLAN),
    "engines": ({}, SERVED_PLAN),
    "GPUs": (GPUS, GPU_PLAN),
    "queued": (QUEUED, PLAN),
}
ATTEMPTS = {"CPUs": 1, "engines": 1, "GPUs": 2, "queued": 2}
"""Of a job whose first is not created for longer than a gang may wait for nodes."""
SHORT, LONG = 100.0, LIMITS.scheduling_timeout_seconds + 20.0
"""Seconds."""


class Webhook(World):
    """A cluster in which a webhook for Jobs is down when the job is created."""

    def __init__(self, kind: str, outage: float) -> None:
        self.explained_at = 0.0
        """When the status first said why the gang does not start."""
        self.started_at = 0.0
        spec, plan = KINDS[kind]
        super().__init__(spec, plan)
        self.outage = ("POST jobs", "unavailable", NOW + outage)

    def publish(self, job: GRPOJobRecord, status: GRPOJobStatus, now: float) -> None:
        super().publish(job, status, now)
        says_why = any("POST jobs run-1: 500" in one.message for one in status.conditions)
        self.explained_at = self.explained_at or (now if says_why else 0.0)
        self.started_at = self.started_at or (now if status.job_uid else 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gang_that_is_not_created_says_why_and_starts_soon_after(kind: str) -> None:
    world = Webhook(kind, SHORT)
    virtually(world.live())
    assert world.explained_at - NOW <= 20
    assert world.started_at - NOW - SHORT <= 20
    status = world.job["status"]
    assert (status["phase"], status["attempt"]) == ("Succeeded", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gang_that_is_not_created_holds_its_place_no_longer_than_one_without_nodes(
    kind: str,
) -> None:
    world = Webhook(kind, LONG)
    virtually(world.live())
    status = world.job["status"]
    assert (status["phase"], status["attempt"]) == ("Succeeded", ATTEMPTS[kind])
    names = {
        write for write in world.writes if write.startswith(f"POST jobs run-{status['attempt']}")
    }
    assert len(names) == (2 if kind == "engines" else 1)


class Counted(World):
    """A cluster whose namespace has a quota of Jobs: as many as an attempt needs."""

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        most = 2 if self.plan.engine else 1
        if resource is JOBS and len(self.all_of(JOBS)) >= most:
            raise Forbidden(
                f"POST {resource.path(namespace)}: 403 jobs.batch {body['metadata']['name']!r} is "
                "forbidden: exceeded quota: few, requested: count/jobs.batch=1, "
                f"used: count/jobs.batch={most}, limited: count/jobs.batch={most}",
                403,
            )
        return await super().create(resource, namespace, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_is_kept_for_its_logs_takes_no_quota_from_the_next_attempt(kind: str) -> None:
    spec, plan = KINDS[kind]
    world = Counted(spec, plan, ends=(BAD, WELL))
    virtually(world.live())
    status = world.job["status"]
    assert (status["phase"], status["restarts"]) == ("Succeeded", 1)
