"""The plan that a Workload was made for, stored in an annotation of the Workload.

A job may wait for long. A plan made later, on other nodes, could have another shape and would cost the job its place in
the queue. So the plan stays with the Workload until the spec changes, or until the job runs out of memory with it.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_api.plan import ExecutionPlan

from ..records import GRPOJobRecord
from ..workloads import WorkloadRecord


class Planned(BaseModel):
    """What stands in the annotation."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    attempt: int
    """Attempts that the job had had."""
    generation: int
    """The spec that was planned."""
    shape: str
    """See pod_sets.shape."""
    plan: ExecutionPlan


def planned(workload: WorkloadRecord | None) -> Planned | None:
    """Return the plan that a Workload was made for; None if the annotation is missing or can't be read."""
    if workload is None or not workload.planned:
        return None
    try:
        return Planned.model_validate_json(workload.planned)
    except ValidationError:
        return None


def annotation(job: GRPOJobRecord, plan: ExecutionPlan, shape: str) -> str:
    """The annotation of a Workload that is made now."""
    fields: dict[str, Any] = {"attempt": job.status.attempt, "generation": job.generation, "shape": shape, "plan": plan}
    return Planned.model_validate(fields).model_dump_json(by_alias=True, exclude_none=True)


def planned_for(job: GRPOJobRecord, workload: WorkloadRecord | None) -> ExecutionPlan | None:
    """The plan by which the job waits, or ran last since its Workload was made, if it needs no other one."""
    found, learned, status = planned(workload), job.status.learned, job.status
    # what MultiKueue made is of the other cluster's object, whose generation is another
    if found is None or not (job.kueue.prebuilt or found.generation == job.generation):
        return None
    if found.attempt >= status.attempt:
        return found.plan
    short = learned is not None and learned.last_of(status.attempt) is not None
    # of the same shape as the one that the Workload was made for, and by now maybe the answer to a shortfall
    return None if short else status.plan
