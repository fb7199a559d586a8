"""spec.resumeFrom: when the other job's checkpoints can be named, what is kept of it, and what the
pods are told."""

from typing import Any

import pytest

from grpo_api.job import parse_spec
from grpo_operator.admission.resume_plan import kept_plan
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.observation import Observation
from grpo_operator.pods.manifests import attempt_of, indexed_job, training_plan
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.operator_world import (
    PLAN,
    PODS,
    SPEC,
    active_status,
    after,
    condition,
    judged,
    make_job,
    make_seen,
    of_type,
    stored,
)

CLAIM = {"volume": {"claimName": "shared", "subPath": "runs"}}
FAILED = {"conditions": [condition("Admitted", reason="Admitted"), condition("Failed")]}
STEP: dict[str, Any] = {"progress": {"step": 7, "totalSteps": 9}}


def source(checkpoint: Any = CLAIM, **more: Any) -> GRPOJobRecord:
    """A job that has made checkpoints."""
    status = active_status(**STEP, **more)
    return make_job({"checkpoint": checkpoint}, status, name="earlier", uid="uid-of-earlier")


def seen(other: GRPOJobRecord | None, **spec: Any) -> Observation:
    """A new job that begins with the other's."""
    job = make_job({"resumeFrom": {"grpoJob": "earlier"}, **spec})
    return Observation(job=job, now=make_seen(job).now, at=make_seen(job).at, source=other)


def found(other: GRPOJobRecord, **spec: Any) -> GRPOJobRecord:
    """The new job, once the other's checkpoints are named."""
    look = seen(other, **spec)
    decision = judged(look)
    assert decision.action is Action.RESOLVE
    return stored(look.job, after(look, decision))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (None, "there is no GRPOJob earlier"),
        (source({}), "nothing of it is kept"),
        (
            make_job({"checkpoint": CLAIM}, active_status(), name="earlier"),
            "has not made a step yet",
        ),
        (make_job({"checkpoint": CLAIM}, name="earlier"), "has not made a step yet"),
        (
            make_job(
                {"checkpoint": CLAIM}, active_status(**STEP), name="earlier", deletionTimestamp="x"
            ),
            "there is no",
        ),
    ],
)
def test_a_job_waits_for_checkpoints_that_can_not_be_named(
    other: GRPOJobRecord | None, says: str
) -> None:
    look = seen(other)
    decision = judged(look)
    assert (decision.action, decision.reason) == (Action.REJECT, "WaitingForCheckpoint")
    assert says in decision.message
    assert decision.requeue_after
    status, reason, _ = of_type(after(look, decision), "Admitted")
    assert (status, reason) == ("False", "WaitingForCheckpoint")
    assert not look.job.is_waiting_for_admission


@pytest.mark.parametrize("more", [{}, FAILED])
def test_what_is_found_is_kept_with_the_plan_that_made_it(more: dict[str, Any]) -> None:
    job = found(source(**more))
    kept = job.status.resume_from
    assert kept is not None
    assert kept.model_dump() == {
        "grpoJob": "earlier",
        "uid": "uid-of-earlier",
        "claimName": "shared",
        "subPath": "runs",
        "store": None,
        "folder": "earlier-uid-of-earlier",
    }
    assert kept_plan(job) == PLAN
    assert judged(make_seen(job)).action is Action.ADMIT  # the other may be gone by now


def test_the_pods_mount_the_other_claim_read_only_and_are_told_its_folder() -> None:
    job = found(
        source({"volumeClaimTemplate": {"size": "1Gi"}}),
        checkpoint={"volumeClaimTemplate": {"size": "1Gi"}},
    )
    attempt = attempt_of(job, job.valid_spec, PLAN, 1)
    assert training_plan(attempt).resume_from == "/resume/earlier-uid-of-earlier"
    pod = indexed_job(attempt, PODS)["spec"]["template"]["spec"]
    assert {"name": "resume", "persistentVolumeClaim": {"claimName": "earlier-checkpoints"}} in pod[
        "volumes"
    ]
    mount = {"name": "resume", "mountPath": "/resume", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]


def test_the_pods_reach_the_other_s_store_with_its_credentials() -> None:
    theirs = {"url": "s3://theirs/runs", "credentialsSecretRef": {"name": "their-keys"}}
    own = {"url": "s3://bucket", "credentialsSecretRef": {"name": "keys"}}
    job = found(
        source({"store": theirs}),
        checkpoint={"store": own},
        envFrom=[{"secretRef": {"name": "all"}}],
    )
    assert job.status.resume_from is not None
    assert job.status.resume_from.claim_name is None
    attempt = attempt_of(job, job.valid_spec, PLAN, 1)
    plan = training_plan(attempt)
    assert plan.resume_from == "/tmp/resume/earlier-uid-of-earlier"
    assert plan.resume_store is not None
    assert plan.resume_store.url == "s3://theirs/runs"
    pod = indexed_job(attempt, PODS)["spec"]["template"]["spec"]
    assert "resume" not in [volume["name"] for volume in pod["volumes"]]
    assert pod["containers"][0]["envFrom"] == [
        {"prefix": "GRPO_CHECKPOINT_STORE_", "secretRef": {"name": "keys"}},
        {"prefix": "GRPO_RESUME_STORE_", "secretRef": {"name": "their-keys"}},
        {"secretRef": {"name": "all"}},
    ]


def test_a_folder_of_the_own_volume_needs_no_mount() -> None:
    job = make_job({"resumeFrom": {"path": "earlier-uid/attempt-1"}, "checkpoint": CLAIM})
    assert judged(make_seen(job)).action is Action.ADMIT
    attempt = attempt_of(job, job.valid_spec, PLAN, 1)
    assert training_plan(attempt).resume_from == "/checkpoints/earlier-uid/attempt-1"
    volumes = indexed_job(attempt, PODS)["spec"]["template"]["spec"]["volumes"]
    assert "resume" not in [volume["name"] for volume in volumes]


def test_a_change_before_the_start_is_found_out_anew() -> None:
    job = found(source())
    spec = {**SPEC, "resumeFrom": {"grpoJob": "another"}}
    parse_spec(spec)
    changed = make_job(spec, {"resumeFrom": job.raw_status["resumeFrom"]})
    assert judged(make_seen(changed)).reason == "WaitingForCheckpoint"
