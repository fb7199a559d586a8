"""Workloads for the operator's unit tests, as Kueue would leave them, through the real parser."""

from dataclasses import replace
from typing import Any

from grpo_api.plan.plan import ExecutionPlan
from grpo_operator.decide.observation import Observation
from grpo_operator.kueue.workload_manifest import Priority, workload
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.records.workloads import WorkloadRecord, workload_record
from tests.unit.operator_world import PLAN, PODS, Thing, at, make_job, make_seen

QUEUED: dict[str, Any] = {"placement": {"accelerator": "CPU", "nodes": 2, "queueName": "team"}}
ASSIGNED: dict[str, Any] = {
    "clusterQueue": "all",
    "podSetAssignments": [{"name": "trainer", "flavors": {"cpu": "default"}, "count": 2}],
}


def workload_condition(
    kind: str, status: bool | str = True, reason: str = "Because", message: str = ""
) -> dict[str, Any]:
    """One condition of a Workload."""
    return {
        "type": kind, "status": str(status), "reason": reason, "message": message,
        "lastTransitionTime": at(-5),
    }  # fmt: skip


def admitted(*more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The status of a Workload that Kueue has admitted."""
    given = {
        one["type"]: one
        for one in (workload_condition("QuotaReserved"), workload_condition("Admitted"), *more)
    }
    return {"admission": ASSIGNED, "conditions": list(given.values()), **fields}


def evicted(reason: str = "Preempted") -> dict[str, Any]:
    """The status of one that Kueue has evicted, while it still holds its quota."""
    return admitted(workload_condition("Evicted", True, reason, "somebody else needs it"))


def make_item(
    status: dict[str, Any] | None = None,
    *,
    job: GRPOJobRecord | None = None,
    plan: ExecutionPlan = PLAN,
    spec: dict[str, Any] | None = None,
    **meta: Any,
) -> dict[str, Any]:
    """A Workload that was made for a plan of a job; `spec` and `meta` are merged in."""
    body = workload(job or make_job(QUEUED), plan, Priority(), PODS)
    metadata = {
        **body["metadata"],
        "uid": "workload-1",
        "resourceVersion": "13",
        "generation": 1,
        **meta,
    }
    return {
        **body,
        "metadata": metadata,
        "spec": {**body["spec"], **(spec or {})},
        "status": status or {},
    }


def make_workload(status: dict[str, Any] | None = None, **more: Any) -> WorkloadRecord:
    """The record of make_item."""
    return workload_record(make_item(status, **more))


def make_queued(
    workload: WorkloadRecord | None,
    *things: Thing,
    status: dict[str, Any] | None = None,
    **spec: Any,
) -> Observation:
    """What is seen of a job that Kueue admits."""
    return replace(make_seen(make_job({**QUEUED, **spec}, status), *things), workload=workload)
