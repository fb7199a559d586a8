"""What a user changes before an attempt or between two: nothing of the earlier spec is left, also
where the operator did not look meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_api.effective_spec import applied_class
from grpo_api.spec.immutability import WHILE_STOPPED
from grpo_operator.admission.resume_plan import kept_plan
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.decide.preflight import should_check
from grpo_operator.pods.manifests import attempt_of, engines_job, indexed_job, spec_version
from grpo_operator.records.names import ANNOTATION_SPEC
from tests.unit.kueue_world import admitted, make_workload
from tests.unit.operator_world import (
    PLAN,
    PODS,
    SERVED_PLAN,
    active_status,
    after,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    of_type,
    stored,
)
from tests.unit.test_operator_preflight import (
    WRONG,
    child,
    gpu_job,
    look,
    reported,
    seen,
)
from tests.unit.test_operator_resuming import found, source

SHAPE = {
    "modelType": "qwen2",
    "layers": 24,
    "hiddenSize": 896,
    "intermediateSize": 4864,
    "attentionHeads": 14,
    "vocabSize": 151936,
}
QUEUED = Decision(Action.QUEUE, "WaitingForGPUs")


def test_a_retry_after_a_failed_check_checks_again_although_an_attempt_was_made() -> None:
    paused = [condition("Admitted", "False", "Suspended")]
    before = active_status(conditions=paused, preflight={"digest": "a" * 64})
    job = gpu_job(before)
    observation = seen(job, look(job, child(job), reported(problems=[WRONG])))
    failed = stored(job, after(observation, judged(observation)), retry=1)
    assert failed.is_finished
    retry = judged(make_seen(failed))
    assert retry.action is Action.RETRY
    waiting = stored(failed, after(make_seen(failed), retry))
    assert should_check(waiting, enabled=True)
    there = look(waiting)
    assert (there.is_needed, there.check.should_start) == (True, True)
    assert not look(waiting, child(waiting), reported(problems=[WRONG])).check.should_start


@pytest.mark.parametrize("preflight", ["Auto", "Off"])
def test_another_model_is_not_planned_by_the_shape_of_the_first(preflight: str) -> None:
    job = gpu_job(image="mine:1")
    there = look(job, child(job), reported(architecture=SHAPE, hasVllm=False))
    checked = stored(job, after(seen(job, there), QUEUED))
    assert checked.status.learned
    assert checked.status.learned.architecture
    assert checked.status.learned.has_vllm is False
    model = {"name": "Qwen/Qwen2.5-1.5B-Instruct"}
    other = stored(checked, checked.status, model=model, image="mine:2", preflight=preflight)
    edited = stored(other, after(seen(other, look(other)), QUEUED))
    learned = edited.status.learned
    assert learned
    assert (learned.architecture, learned.has_vllm) == (None, None)
    if preflight == "Auto":
        there = look(edited, child(edited), reported(architecture={**SHAPE, "layers": 28}))
        learned = after(seen(edited, there), QUEUED).learned
        assert learned
        assert learned.architecture
        assert learned.architecture.layers == 28


@pytest.mark.parametrize("preflight", ["Auto", "Off"])
def test_after_an_attempt_another_image_is_not_planned_by_what_the_first_has(
    preflight: str,
) -> None:
    job = gpu_job(image="mine:1")
    there = look(job, child(job), reported(architecture=SHAPE, hasVllm=False))
    checked = after(seen(job, there), QUEUED)
    ran = checked.model_copy(update={"attempt": 1})
    other = stored(job, ran, image="mine:2", preflight=preflight)
    learned = after(seen(other, look(other)), QUEUED).learned
    assert learned
    assert learned.has_vllm is None
    assert learned.architecture, "what an attempt has loaded stays"


def test_a_job_that_no_longer_resumes_another_is_planned_from_its_spec() -> None:
    job = found(source(revisions={"model": "a" * 40}))
    assert kept_plan(job)
    assert job.status.revisions == {"model": "a" * 40}
    changed = stored(job, job.status, resumeFrom=None)
    assert not changed.is_waiting_for_admission
    decision = judged(make_seen(changed))
    assert decision.action is Action.RESOLVE
    status = after(make_seen(changed), decision)
    assert (status.resume_from, status.plan, status.revisions) == (None, None, None)
    assert judged(make_seen(stored(changed, status))).action is Action.ADMIT


def test_another_dataset_is_not_read_at_the_commit_of_the_first() -> None:
    commits = {"model": "a" * 40, "dataset": "b" * 40}
    other = source(revisions=commits)
    job = found(other)
    assert job.status.revisions == commits
    changed = stored(job, after(make_seen(job), QUEUED), dataset={"name": "x/z"})
    assert judged(make_seen(changed)).action is Action.ADMIT, "the other job is gone"
    there = replace(make_seen(changed), source=other)
    status = after(there, judged(there))
    assert status.revisions == {"model": "a" * 40}
    assert (status.resume_from, status.plan) == (job.status.resume_from, job.status.plan)
    assert judged(replace(there, job=stored(changed, status))).action is Action.ADMIT


def test_a_deadline_that_is_raised_while_an_attempt_runs_stays_within_its_class() -> None:
    limits = applied_class("short", 1, {"limits": {"activeDeadlineSeconds": 60}})
    status = active_status(jobClass=limits.model_dump(mode="json", by_alias=True))
    job = make_job({"jobClassName": "short", "activeDeadlineSeconds": 86400}, status)
    assert job.active_deadline == 60
    assert judged(make_seen(job)).reason == "DeadlineExceeded"


@pytest.mark.parametrize("kind", ["TrainsAdapterOnly", "EngineFallback"])
def test_a_plan_without_what_an_earlier_one_fell_back_to_says_so(kind: str) -> None:
    """The user has named other GPUs before the first step, or another engine after a failure."""
    waits = [condition("Admitted", "False", "WaitingForGPUs"), condition(kind)]
    job = make_job(status=active_status(conditions=waits))
    status = after(make_seen(job), Decision(Action.COMMIT, plan=PLAN))
    assert of_type(status, kind)[:2] == ("False", "AsExpected")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [({"suspend": True}, "Suspended"), ({"activeDeadlineSeconds": 60}, "DeadlineExceeded")],
)
def test_a_job_that_is_checked_no_more_does_not_say_that_a_pod_checks_it(
    spec: dict[str, Any], reason: str
) -> None:
    used = {"attempt": 1, "activeSeconds": 100, "preflight": {"digest": "a" * 64}}
    waits = [condition("Admitted", "False", "Checking"), condition("Checked", "False", "Checking")]
    job = gpu_job({**used, "conditions": waits}, **spec)
    observation = seen(job, look(job, child(job)))
    decision = judged(observation)
    assert decision.reason == reason
    assert of_type(after(observation, decision), "Checked") == ("False", reason, decision.message)


def test_a_job_that_starts_unchecked_does_not_say_that_a_pod_checks_it() -> None:
    waits = [condition("Admitted", "False", "Checking"), condition("Checked", "False", "Checking")]
    job = gpu_job({"conditions": waits}, preflight="Off")
    observation = seen(job, look(job, child(job)))
    status = after(observation, Decision(Action.COMMIT, plan=PLAN))
    assert of_type(status, "Checked")[:2] == ("True", "NotChecked")


STOPPED: dict[str, Any] = {
    "image": "mine:2",
    "imagePullPolicy": "Always",
    "command": ["python", "-m", "grpo_acceptance"],
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "s"}}],
    "resources": {"limits": {"memory": "1Gi"}},
    "sharedMemory": "1Gi",
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    "podTemplate": {"metadata": {"labels": {"team": "rl"}}},
    "placement": {"nodes": 3},
    "generation": {"tensorParallel": 2},
    "guard": {"maxKL": 3.0},
    "export": {"to": "None"},
    "rewards": [{"format": {"pattern": "a.*"}, "maxFailureShare": 0.5}],
    "model": {"cache": {"claimName": "hub"}},
}
"""What a user may change only while the job is stopped."""
MOUNTS = {"podTemplate": {"spec": {"volumes": [{"name": "more", "emptyDir": {}}]}}}


def edited(spec: dict[str, Any], *, seen: int = 2, **meta: Any) -> Observation:
    """A running job whose spec has been changed since its attempt was started; the operator saw
    the generation `seen` of 4."""
    before = make_job(MOUNTS)
    assert before.spec
    started = spec_version(before.spec)
    meta = {"generation": 4, **meta}
    spec = {**spec, "podTemplate": {**MOUNTS["podTemplate"], **spec.get("podTemplate", {})}}
    job = make_job(spec, active_status(observedGeneration=seen), **meta)
    assert job.spec, job.problems
    return make_seen(job, make_child(version=started), make_pod(0), make_pod(1))


def test_every_field_that_may_change_while_a_job_is_stopped_is_changed() -> None:
    assert {*STOPPED} == {*WHILE_STOPPED, "model"}


@pytest.mark.parametrize("field", STOPPED)
def test_an_edit_in_a_suspension_that_nobody_saw_ends_the_attempt_of_before(field: str) -> None:
    """The operator was away while its user suspended, changed and resumed the job."""
    observation = edited({field: STOPPED[field]})
    decision = judged(observation)
    assert (decision.action, decision.reason) == (Action.SUSPEND, "Suspended")
    assert decision.requeue_after == 0.0
    status = after(observation, decision)
    assert of_type(status, "Suspended")[0] == "True"
    assert "attempt 1 ends, and the next one follows the new spec" in decision.message
    assert (status.restarts, status.uncounted_restarts) == (0, 0)
    resumed = stored(observation.job, status)
    assert judged(make_seen(resumed)).action is Action.ADMIT


def test_other_edits_end_no_attempt() -> None:
    at_any_time = {"restarts": {"limit": 9}, "samples": {"groups": 0}, "preflight": "Required"}
    queue = {"kueue.x-k8s.io/queue-name": "team"}
    for observation in (
        edited(at_any_time),
        replace(edited({}, labels=queue), workload=make_workload(admitted())),
        # A version of the operator with other defaults makes another hash of the same spec.
        edited({"image": "mine:2"}, seen=4),
        edited({"image": "mine:2"}, seen=3),
    ):
        assert judged(observation).action is Action.WAIT


def test_an_attempt_of_a_former_operator_goes_on() -> None:
    """Once it hashed nothing, then with the generation before the hash."""
    job = make_job({"image": "mine:2"}, active_status(), generation=9)
    assert job.spec
    for version in ("", f"1.{spec_version(job.spec)}"):
        observation = make_seen(job, make_child(version=version), make_pod(0), make_pod(1))
        assert judged(observation).action is Action.WAIT


def test_the_jobs_of_an_attempt_say_which_spec_they_are_made_from() -> None:
    job = make_job(MOUNTS, active_status(), generation=3)
    assert job.spec
    for body in (indexed_job, engines_job):
        made = body(attempt_of(job, job.spec, SERVED_PLAN, 1), PODS)
        assert made
        version = made["metadata"]["annotations"][ANNOTATION_SPEC]
        assert version == spec_version(job.spec)
