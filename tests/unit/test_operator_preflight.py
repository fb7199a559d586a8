"""The preflight of a job: what it has come to, whom it keeps from GPUs, and what the status says.

Reports, pods, events and ages are generated: whatever meets, no job is kept for ever without a
cause of its own, and none that has a mistake holds a GPU.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import LearnedPrompts
from grpo_api.report.preflight import MAX_PROBLEMS, PreflightReport
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation, observe
from grpo_operator.decide.preflight import (
    BLOCKED_SECONDS,
    Check,
    Preflight,
    problems_message,
    should_check,
)
from grpo_operator.kueue.workload_steps import next_step
from grpo_operator.loop.caches import Caches
from grpo_operator.loop.preflights import Preflights
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.pods.preflight_job import preflight_digest
from grpo_operator.records.names import ANNOTATION_DIGEST, COMPONENT_PREFLIGHT
from grpo_operator.records.parsing import job_record, pod_record
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.report.events import telling_change
from grpo_operator.report.status import build_status, to_json
from tests.generated import cases
from tests.unit.operator_world import (
    GPU_PLAN,
    LIMITS,
    NOW,
    active_status,
    at,
    child_object,
    make_job,
    make_seen,
    of_type,
    pod_object,
    terminated,
)
from tests.unit.queue_world import cluster, judged

ON = PodDefaults(image="trainer:1", preflight=True)
GPUS: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"},
    "placement": {"accelerator": "GPU", "nodes": None},
    "training": {"promptsPerStep": 8, "numGenerations": 6},
}
WRONG = {"path": "spec.dataset.columns", "message": "no column `promt`; there is `prompt`"}
SILENT = {"path": "spec.model.name", "message": "huggingface.co: no answer", "transient": True}
STORE = {"path": "spec.checkpoint.store", "message": "s3: no answer", "transient": True}
QUOTA = 'FailedCreate: pods "run-preflight-" is forbidden: exceeded quota: few'
ACCOUNT = 'FailedCreate: error looking up service account team-a/nobody: serviceaccount "nobody"'
CLAIM = 'persistentvolumeclaim "data" not found'
NO_CPU = "0/8 nodes are available: 8 Insufficient cpu."


def gpu_job(status: dict[str, Any] | None = None, **spec: Any) -> GRPOJobRecord:
    placement = GPUS["placement"] | spec.pop("placement", {})
    return make_job({**GPUS, **spec, "placement": placement}, status)


def digest_of(job: GRPOJobRecord) -> str:
    return preflight_digest(job.valid_spec, job.valid_spec.image or "trainer:1")


def child(job: GRPOJobRecord, **more: Any) -> dict[str, Any]:
    body = child_object(0, name="run-preflight", uid="preflight-1", **more)
    body["metadata"]["annotations"] = {ANNOTATION_DIGEST: more.get("digest", digest_of(job))}
    return body


def a_pod(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = pod_object(0, 0, state, by="preflight-1", component=COMPONENT_PREFLIGHT, **more)
    del body["metadata"]["labels"]["grpo.dev/job-uid"]
    return body


def reported(**report: Any) -> dict[str, Any]:
    return a_pod(terminated(0, json.dumps(report)), name="a-report")


EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
UNBOUND = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def evicted(number: int) -> dict[str, Any]:
    end = terminated(143)
    return a_pod(end, name=f"evicted-{number}", uid=f"evicted-{number}", conditions=[EVICTED])


def pending(message: str) -> dict[str, Any]:
    scheduled = {**UNBOUND, "message": message}
    return a_pod({}, phase="Pending", node="", conditions=[scheduled])


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return a_pod({"waiting": {"reason": reason, "message": message}}, phase="Pending")


TEXT = {"rows": 9, "mean": 20.0, "p95": 30, "dropped": 0, "template": "Unused"}
PULL = waiting("ErrImagePull", "no such image")
CREATING = waiting("ContainerCreating")
PODS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "no cpu": [pending(NO_CPU)],
    "no claim": [pending(CLAIM)],
    "no image": [PULL],
    "creating": [CREATING],
    "running": [a_pod({"running": {}})],
    "evicted": [*map(evicted, range(3)), a_pod({"running": {}})],
    "evicted once": [evicted(0), a_pod({"running": {}})],
    "passed": [reported()],
    "text prompts": [reported(prompts=TEXT)],
    "passed, once evicted": [evicted(0), reported(skipped=[{"path": "spec.a", "message": "b"}])],
    "failed": [reported(problems=[WRONG, SILENT])],
    "hub": [reported(problems=[SILENT])],
    "store": [reported(problems=[STORE, SILENT])],
    "no module": [a_pod(terminated(1, "No module named grpo_trainer.preflight"))],
    "forged": [a_pod(terminated(0, '{"problems": "none"}'))],
    "killed": [a_pod(terminated(137, reason="OOMKilled"))],
}
ENDED = {name for name, pods in PODS.items() if "terminated" in str(pods[-1:])}
WARNINGS = {"none": ("", "QuotaExceeded"), "creating": ("", "FailedMount: no configmap")}
KNOWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "hub": {"tries": 2, "time": at(-20), "report": {"problems": [SILENT]}},
    "hub, long ago": {"tries": 9, "time": at(-601), "report": {"problems": [SILENT]}},
    "just blocked": {"blockedSince": at(-1)},
    "blocked": {"blockedSince": at(-BLOCKED_SECONDS)},
    "lost": {"tries": 1, "time": at(-31), "cause": "DeadlineExceeded", "blockedSince": at(-31)},
    "passed": {"tries": 1, "time": at(-9), "report": {}},
    "given up": {"tries": 1, "cause": "no quota", "givenUp": True},
    "clock set back": {"tries": 1, "time": at(9000), "report": {"problems": [SILENT]}},
}


def look(job: GRPOJobRecord, *things: dict[str, Any], warning: str = "", ago: float = 90) -> Any:
    """What is seen now of a preflight whose Job was first seen so many seconds ago."""
    caches = Caches()
    for thing in things:
        is_pod = "nodeName" in thing["spec"]
        (caches.pods if is_pod else caches.jobs).put(thing)
    unused: Any = None
    preflights = Preflights(unused, caches, unused, ON)
    preflights.look(job, NOW - ago, Observed(NOW - ago))
    found = preflights.look(job, NOW, Observed(NOW))
    return replace(found, warning=warning) if found else None


def seen(job: GRPOJobRecord, preflight: Preflight | None) -> Observation:
    return replace(make_seen(job), preflight=preflight)


def known_status(job: GRPOJobRecord, known: dict[str, Any]) -> dict[str, Any]:
    return {"preflight": {"digest": digest_of(job), **known}} if known else {}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[str, str, str, bool, Preflight]:
    mode = draw(st.sampled_from(["Auto", "Required"]))
    known = draw(st.sampled_from(sorted(KNOWN)))
    pods = draw(st.sampled_from(sorted(PODS)))
    has_job = draw(st.booleans())
    job = gpu_job(preflight=mode)
    job = gpu_job(known_status(job, KNOWN[known]), preflight=mode)
    things = [child(job), *PODS[pods]] if has_job else []
    if has_job and pods in ENDED and draw(st.booleans()):
        things[0] = child(job, ended="Complete")
    warning = draw(st.sampled_from(["", QUOTA, ACCOUNT]))
    ago = draw(st.sampled_from([0.0, 4.0, 90.0, 4000.0]))
    return mode, known, pods, has_job, look(job, *things, warning=warning, ago=ago)


@given(worlds())
@settings(max_examples=cases(2000, gate=200))
def test_whatever_meets_a_job_starts_only_when_it_passed_or_may_go_on_without(
    world: tuple[str, str, str, bool, Preflight],
) -> None:
    mode, known, pods, has_job, preflight = world
    check = preflight.check
    report = check.status.report
    problems = report.problems if report else []
    assert check.message
    if check.reason == "Passed":
        assert report is not None
        assert not problems
    if check.reason == "NotChecked":
        assert check.status.given_up
        assert check.status.cause
        assert mode == "Auto" or known == "given up"
    is_final = check.reason in ("Passed", "NotChecked", "PreflightFailed")
    assert is_final == (check.requeue_after is None)
    assert check.requeue_after is None or check.requeue_after > 0
    assert not (check.should_start and has_job)
    if check.reason == "PreflightFailed":
        assert has_job
        assert pods == "failed"
    status = build_status(seen(preflight.job, preflight), Decision(Action.QUEUE, check.reason, "x"))
    assert of_type(status, "Checked")[:2] == (str(check.has_passed), check.reason)
    # what is written is read again as the same
    again = gpu_job(to_json(status), preflight=mode)
    assert again.status.preflight == check.status


@pytest.mark.parametrize(
    ("pods", "warning", "reason", "says"),
    [
        ("none", QUOTA, "PreflightBlocked", "its pod was not created: FailedCreate"),
        ("none", ACCOUNT, "PreflightBlocked", "the job's own pods would wait for the same"),
        ("no cpu", "", "PreflightBlocked", "Insufficient cpu"),
        ("no claim", "", "PreflightBlocked", "the job's own pods would wait for the same"),
        ("no image", "", "PreflightBlocked", "ErrImagePull: no such image"),
        ("creating", "FailedMount: no configmap", "PreflightBlocked", "FailedMount: no configmap"),
        ("creating", "", "Checking", "checks the job"),
        ("evicted", "", "PreflightBlocked", "evicted 3 times"),
        ("evicted once", "", "Checking", "checks the job"),
        ("passed", "", "Passed", "no mistakes"),
        ("text prompts", "", "Passed", "chat template is not applied: set dataset.systemPrompt"),
        ("passed, once evicted", "", "Passed", "not checked: spec.a: b"),
        ("failed", "", "PreflightFailed", "no column `promt`; there is `prompt`; spec.model.name"),
        ("hub", "", "WaitingForHub", "huggingface.co: no answer; it is checked again"),
        ("store", "", "WaitingForStore", "spec.checkpoint.store: s3: no answer"),
    ],
)
def test_a_check_says_what_it_has_come_to(pods: str, warning: str, reason: str, says: str) -> None:
    job = gpu_job()
    check: Check = look(job, child(job), *PODS[pods], warning=warning).check
    assert check.reason == reason
    assert says in check.message


@pytest.mark.parametrize("pods", ["no module", "forged", "killed"])
def test_a_preflight_that_ran_and_reported_nothing_keeps_nobody_but_who_requires_it(
    pods: str,
) -> None:
    for mode, reason in (("Auto", "NotChecked"), ("Required", "PreflightBlocked")):
        job = gpu_job(preflight=mode)
        ended = look(job, child(job, ended="Failed"), *PODS[pods])
        assert ended.check.reason == reason
        assert "ended without a report" in ended.check.message
        assert ended.check.status.job_uid == "preflight-1"


def test_a_preflight_that_somebody_suspends_is_blocked() -> None:
    check = look(gpu_job(), child(gpu_job(), suspended=True)).check
    assert "can't run: its pod was not created: Job run-preflight is suspended" in check.message


def test_a_job_that_ended_before_its_pod_s_end_is_known_is_waited_for() -> None:
    job = gpu_job()
    early = look(job, child(job, ended="Complete"), ago=3)
    assert early.check.reason == "Checking"
    late = look(job, child(job, ended="Complete"), ago=61)
    assert late.check.status.cause


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_a_pod_may_leave_anything_as_its_last_words(words: bytes) -> None:
    message = words.decode(errors="replace")
    pod = pod_record(a_pod(terminated(0, message)))
    assert pod.report is None or pod.report.problems == []


@pytest.mark.parametrize(
    "message",
    [
        '{"prompts": {"rows": 1, "mean": 1e999, "p95": 1, "dropped": 0}}',
        json.dumps({"problems": [WRONG] * (MAX_PROBLEMS + 1)}),
        json.dumps({"problems": [{**WRONG, "message": "x" * 301}]}),
        '{"revisions": {"model": "main"}}',
        '{"omittedProblems": -1}',
        "[" * 4000,
    ],
)
def test_a_report_beyond_its_bounds_is_none(message: str) -> None:
    assert pod_record(a_pod(terminated(0, message))).report is None


def test_a_report_of_a_newer_image_is_read() -> None:
    message = json.dumps({"problems": [WRONG], "newer": 1})
    report = pod_record(a_pod(terminated(0, message))).report
    assert report
    assert report.problems[0].path == WRONG["path"]


def test_a_gang_s_pod_reports_no_preflight() -> None:
    assert pod_record(pod_object(0, 1, terminated(0, "{}"))).report is None


def test_the_pause_doubles_up_to_ten_minutes() -> None:
    for tries, pause in ((1, 30), (2, 60), (5, 480), (6, 600), (60, 600)):
        for age, starts in ((pause - 1, False), (pause, True)):
            known = {"tries": tries, "time": at(-age), "report": {"problems": [SILENT]}}
            job = gpu_job()
            job = gpu_job(known_status(job, known))
            check = look(job, ago=0).check
            assert (check.should_start, check.reason) == (starts, "WaitingForHub")


def test_a_clock_that_was_set_back_makes_a_job_wait_no_longer() -> None:
    hour = 3600.0
    known = {"tries": 1, "time": at(hour), "report": {"problems": [SILENT]}}
    check = look(gpu_job(known_status(gpu_job(), known)), ago=0).check
    assert (check.should_start, check.requeue_after) == (False, 30.0)
    known = {"cause": "no room", "blockedSince": at(hour)}
    check = look(gpu_job(known_status(gpu_job(), known))).check
    assert check.status.blocked_since == at(0)


@pytest.mark.parametrize(
    ("status", "spec", "checks"),
    [
        ({}, {}, True),
        ({}, {"preflight": "Required", "command": ["mine"]}, True),
        ({}, {"command": ["mine"]}, False),
        ({}, {"preflight": "Off"}, False),
        ({}, {"placement": {"accelerator": "CPU"}}, False),
        ({}, {"managedBy": "example.com/other"}, False),
        ({"attempt": 1}, {}, False),
        (active_status(plan=GPU_PLAN), {}, False),
    ],
)
def test_who_is_checked(status: dict[str, Any], spec: dict[str, Any], checks: bool) -> None:
    assert should_check(gpu_job(status, **spec), enabled=True) is checks


def test_an_installation_without_preflights_makes_them_only_where_a_job_requires_one() -> None:
    assert not should_check(gpu_job(), enabled=False)
    assert should_check(gpu_job(preflight="Required"), enabled=False)


def test_a_job_of_another_spec_is_deleted_and_its_report_ignored() -> None:
    job = gpu_job()
    found = look(job, child(job, digest="0" * 64), reported(problems=[WRONG]), ago=30)
    assert found.is_over
    assert (found.check.reason, found.check.should_start) == ("Checking", False)


def test_a_job_is_deleted_once_its_report_is_in_the_status_or_the_user_pauses() -> None:
    job = gpu_job()
    there = look(job, child(job), reported())
    assert not there.is_over
    kept = gpu_job(to_json(build_status(seen(job, there), Decision(Action.QUEUE, "Checking"))))
    assert look(kept, child(job), reported()).is_over
    assert look(gpu_job(suspend=True), child(job)).is_over
    assert look(replace(job, deleting=True), child(job)).is_over, "a finalizer may hold the job"


def test_a_preflight_is_of_no_attempt() -> None:
    job = gpu_job(active_status(attempt=2, plan=GPU_PLAN))
    jobs = [job_record(child(job))]
    pods = [pod_record(a_pod({"running": {}}))]
    found = observe(
        job, jobs, pods, now=NOW, at=Observed(NOW), first_seen_tracker=FirstSeenTracker()
    )
    assert not (found.pods)
    assert not (found.earlier_jobs)
    assert not (found.earlier_pods)
    assert not (found.gang_left)


def test_a_mistake_fails_the_job_without_an_attempt_and_a_retry_checks_again() -> None:
    job = gpu_job()
    observation = seen(job, look(job, child(job), reported(problems=[WRONG, STORE])))
    decision = decide(observation, LIMITS)
    assert (decision.action, decision.reason) == (Action.FAIL, "BadInput")
    status = build_status(observation, decision)
    assert (status.phase, status.attempt, status.ends) == ("Failed", 0, [])
    assert status.usage is None or not status.usage.attempts
    assert of_type(status, "Failed")[2] == (
        "spec.dataset.columns: no column `promt`; there is `prompt`; "
        "spec.checkpoint.store: s3: no answer"
    )
    assert status.outcome
    assert status.outcome.result == "BadInput"
    failed = gpu_job({**to_json(status), "retry": 0}, retry=1)
    retried = build_status(seen(failed, None), decide(make_seen(failed), LIMITS))
    assert retried.preflight
    assert (retried.preflight.report, retried.preflight.tries) == (None, 0)


@given(st.integers(1, MAX_PROBLEMS), st.integers(1, 300), st.integers(0, 9))
@settings(max_examples=cases(200, gate=20))
def test_a_message_names_the_worst_problem_and_counts_those_without_room(
    number: int, length: int, omitted: int
) -> None:
    problems = [SILENT, *({**WRONG, "message": "x" * length} for _ in range(number - 1))]
    report = PreflightReport.model_validate(
        {"problems": problems, "omittedProblems": omitted}, by_alias=True
    )
    message = problems_message(report)
    assert message.startswith(WRONG["path"] if number > 1 else str(SILENT["path"]))
    shown = message.count(": x") + message.count("no answer")
    hidden = number + omitted - shown
    assert (f"has {hidden} more" in message) is (hidden > 0)
    assert len(message) <= 240 or shown == 1


def test_what_the_files_say_of_model_and_prompts_goes_to_the_planner() -> None:
    shape = {
        "modelType": "qwen2",
        "layers": 24,
        "hiddenSize": 896,
        "intermediateSize": 4864,
        "attentionHeads": 14,
        "vocabSize": 151936,
    }
    job = gpu_job(image="mine:1")
    lengths = {"rows": 2000, "mean": 81.6, "p95": 240, "dropped": 3}
    there = look(job, child(job), reported(architecture=shape, hasVllm=False, prompts=lengths))
    learned = build_status(seen(job, there), Decision(Action.QUEUE, "Checking")).learned
    assert learned
    assert learned.architecture
    assert learned.architecture.layers == 24
    assert learned.has_vllm is False
    assert learned.prompts == LearnedPrompts(mean=82, p95=240)


def test_the_first_attempt_trains_the_commits_that_were_checked() -> None:
    job = gpu_job()
    commits = {"model": "a" * 40, "dataset": "b" * 40}
    checked = look(job, child(job), reported(revisions=commits))
    queued = build_status(seen(job, checked), Decision(Action.QUEUE, "WaitingForGPUs"))
    assert queued.revisions is None  # until then the spec may name another revision
    waiting_job = gpu_job(to_json(queued))
    commit = Decision(Action.COMMIT, "Admitted", plan=GPU_PLAN)
    committed = build_status(seen(waiting_job, look(waiting_job)), commit)
    assert committed.revisions == commits
    later = gpu_job(to_json(queued) | {"revisions": {"model": "c" * 40}})
    again = build_status(seen(later, look(later)), commit)
    assert again.revisions == {**commits, "model": "c" * 40}, "an attempt's own come first"
    changed = gpu_job(to_json(queued), model={"name": "another/model"})
    assert build_status(seen(changed, look(changed)), commit).revisions is None
    unchecked = gpu_job(to_json(queued), preflight="Off")
    assert build_status(seen(unchecked, look(unchecked)), commit).revisions is None


def stated(job: GRPOJobRecord, check: Preflight, decision: Decision) -> GRPOJobRecord:
    """The job with what its status says of the check."""
    spec = {"preflight": "Auto"}
    return gpu_job(to_json(build_status(seen(job, check), decision)), **spec)


def test_a_preflight_that_begins_is_no_event_and_one_that_waits_is() -> None:
    job = gpu_job()
    for pods, reason in (("running", None), ("hub", "WaitingForHub")):
        there = look(job, child(job), *PODS[pods])
        decision = Decision(Action.QUEUE, there.check.reason, "x")
        change = telling_change([], build_status(seen(job, there), decision).conditions)
        assert (change and change.reason) == reason


def test_the_queue_admits_nobody_before_the_check_and_keeps_its_place_only_meanwhile() -> None:
    nodes = cluster(8)
    queued = Decision(Action.QUEUE, "Checking", "x")

    def verdict(job: GRPOJobRecord) -> tuple[bool, bool, str]:
        found = judged([job], nodes, preflight=True)[job.uid]
        assert found.plan is not None
        return found.admitted, found.blocked, str(found.reason)

    job = gpu_job()
    assert verdict(job) == (False, False, "Checking")
    for pods, expected in (
        ("running", (False, False, "Checking")),
        ("hub", (False, True, "WaitingForHub")),
        ("no cpu", (False, True, "PreflightBlocked")),
        ("passed", (True, False, "Admitted")),
    ):
        there = look(job, child(job), *PODS[pods])
        assert verdict(stated(job, there, queued)) == expected
    found = judged([job], nodes, preflight=True)[job.uid]
    assert found.message == "its preflight is under way; 1st of 1 in the queue"


def test_kueue_is_asked_for_nothing_before_the_check() -> None:
    spec = {"placement": {"accelerator": "GPU", "nodes": None, "queueName": "q"}}
    job = gpu_job(**spec)
    queued = Decision(Action.QUEUE, "Checking", "x", plan=GPU_PLAN)
    running = seen(job, look(job, child(job)))
    assert next_step(running, queued, ON) is None
    passed = look(job, child(job), reported())
    checked = gpu_job(to_json(build_status(seen(job, passed), queued)), **spec)
    after = seen(checked, look(checked))
    assert next_step(after, queued, ON) is not None
