"""A job that begins with another's checkpoints, on the real API server: it waits, is told where
they are, and keeps it.

What the trainer makes of them is in tests/trainer/test_resume.py.
"""

import json
from typing import Any

import pytest

from harness.client import ApiStatusError
from tests.integration.operator_bench import GRPOJOBS, JOBS, Bench, outcome
from tests.integration.operator_thread import OperatorThread

KEPT: dict[str, Any] = {"volumeClaimTemplate": {"size": "1Gi"}}


def template(bench: Bench, job: str) -> Any:
    """The pod template of a Job, once it is there."""
    bench.wait(f"Job {job}", lambda: bench.exists(JOBS, job))
    return bench.get(JOBS, job)["spec"]["template"]


def test_a_job_waits_for_another_and_begins_with_its_checkpoints(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit(
        "next", resumeFrom={"grpoJob": "run"}, checkpoint=KEPT, placement={"accelerator": "CPU"}
    )
    bench.wait(
        "the reason", lambda: bench.condition("Admitted", "next")[1] == "WaitingForCheckpoint"
    )
    assert "there is no GRPOJob run" in bench.condition("Admitted", "next")[2]
    uid = bench.submit(
        "run", checkpoint={"volume": {"claimName": "shared"}}, placement={"accelerator": "CPU"}
    )["metadata"]["uid"]
    bench.wait("its Job", lambda: bench.exists(JOBS, "run-1"))
    bench.wait(
        "the next reason",
        lambda: "has not made a step yet" in bench.condition("Admitted", "next")[2],
    )
    assert not bench.exists(JOBS, "next-1")
    progress = {"progress": {"step": 40, "totalSteps": 90}}
    bench.patch(GRPOJOBS, "run/status", {"status": progress})
    found = template(bench, "next-1")
    plan = json.loads(found["metadata"]["annotations"]["grpo.dev/plan"])
    assert plan["resumeFrom"] == f"/resume/run-{uid}"
    # kubectl shows no 0 GPUs for a job on CPUs.
    assert plan["execution"] == {"gpus": 0, **bench.status("run")["plan"]}
    assert {"name": "resume", "persistentVolumeClaim": {"claimName": "shared"}} in found["spec"][
        "volumes"
    ]
    mounts = {mount["name"]: mount for mount in found["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["resume"] == {"name": "resume", "mountPath": "/resume", "readOnly": True}
    assert bench.status("next")["resumeFrom"]["uid"] == uid
    bench.delete(GRPOJOBS, "run")
    bench.delete(JOBS, "next-1")
    again = template(bench, "next-2")
    assert (
        json.loads(again["metadata"]["annotations"]["grpo.dev/plan"])["resumeFrom"]
        == f"/resume/run-{uid}"
    )


def test_a_mismatch_fails_the_job_as_bad_input(bench: Bench, operator: OperatorThread) -> None:
    bench.submit(
        resumeFrom={"path": "earlier-uid"},
        checkpoint={"volume": {"claimName": "shared"}},
        suspend=True,
    )
    bench.wait_phase("Suspended")
    with pytest.raises(ApiStatusError, match="is this job itself"):
        bench.submit("self", resumeFrom={"grpoJob": "self"})
    bench.submit("plain")
    message = "spec.resumeFrom: … training.beta: checkpoint 0.04, now 0.5"
    bench.end(bench.wait_running("plain")[0], 43, outcome("BadInput", message=message))
    bench.wait_phase("Failed", "plain")
    assert bench.condition("Failed", "plain")[2] == message
