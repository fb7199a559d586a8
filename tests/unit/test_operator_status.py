"""The status that users see after each decision: conditions with their sentences, the phase,
counters and clocks."""

from typing import Any

import pytest

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import Outcome, Result
from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.resources import merge_patch
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.report.events import telling_change
from grpo_operator.report.pod_reports import duration
from grpo_operator.report.status import to_json
from tests.unit.operator_world import (
    GPU_PLAN,
    LIMITS,
    PLAN,
    active_status,
    after,
    at,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
    running,
    said,
    stored,
    terminated,
)

COMMIT = Decision(Action.COMMIT, "Admitted", plan=PLAN)
OOM = Outcome(result=Result.OUT_OF_MEMORY, message="CUDA out of memory")


def going_on(seen: Observation) -> GRPOJobStatus:
    return after(seen, Decision(Action.WAIT))


@pytest.mark.parametrize(("plan", "gpus"), [(PLAN, None), (GPU_PLAN, GPU_PLAN.gpus)])
def test_kubectl_s_column_of_gpus_is_empty_for_a_job_on_cpus(
    plan: ExecutionPlan, gpus: int | None
) -> None:
    status = after(make_seen(make_job()), Decision(Action.COMMIT, "Admitted", plan=plan))
    kept = to_json(status)
    assert kept["plan"].get("gpus") == gpus
    assert GRPOJobStatus.model_validate(kept).plan == plan


def test_a_commit_counts_the_attempt_and_publishes_the_plan() -> None:
    status = after(make_seen(make_job()), COMMIT)
    assert (status.attempt, status.plan, status.phase) == (1, PLAN, "Starting")
    assert status.start_time == status.attempt_start_time == at(0)
    assert of_type(status, "Admitted") == ("True", "Admitted", "attempt 1 was admitted")
    assert of_type(status, "Planned") == ("True", "Planned", "two nodes")
    assert of_type(status, "Scheduled")[:2] == ("False", "PodsPending")
    assert of_type(status, "Running") == ("False", "Starting", "attempt 1 starts")
    assert status.observed_generation == 1


def test_a_restart_says_why_and_counts() -> None:
    seen = running(make_pod(0, state=terminated(40)), make_pod(1))
    status = after(
        seen, Decision(Action.COMMIT, "OutOfMemory", "", ended=OOM, counted=True, plan=PLAN)
    )
    assert (status.attempt, status.restarts, status.phase) == (2, 1, "Restarting")
    assert status.job_uid is None
    assert status.active_seconds == 60
    assert of_type(status, "Degraded") == (
        "True",
        "OutOfMemory",
        "attempt 1 ended with OutOfMemory: CUDA out of memory",
    )
    assert of_type(status, "Running")[1] == "Restarting"
    assert status.outcome is not None
    assert (status.outcome.result, status.outcome.attempt) == ("OutOfMemory", 1)


def test_an_end_that_does_not_count_restarts_without_counting() -> None:
    status = after(
        running(), Decision(Action.COMMIT, "Preempted", "", ended=OOM, counted=False, plan=PLAN)
    )
    assert (status.attempt, status.restarts) == (2, 0)


def test_a_running_gang_is_healthy_and_names_its_pods() -> None:
    status = going_on(running(running=False))
    assert status.phase == "Running"
    assert of_type(status, "Scheduled") == ("True", "AllPodsBound", "2 of 2 pods have a node")
    assert of_type(status, "Running") == ("True", "AllPodsRunning", "attempt 1 runs with 2 pods")
    assert of_type(status, "Degraded")[0] == "False"
    assert [(pod.name, pod.node, pod.phase) for pod in status.pods] == [
        ("run-1-0-abcde", "node-0", "Running"),
        ("run-1-1-abcde", "node-1", "Running"),
    ]


def test_an_unschedulable_pod_is_told_in_the_schedulers_words() -> None:
    why = [
        {
            "type": "PodScheduled",
            "status": "False",
            "message": "0/2 nodes are available: 2 Insufficient cpu.",
        }
    ]
    waiting = make_pod(1, state={}, phase="Pending", node="", conditions=why)
    status = going_on(running(make_pod(0), waiting, running=False))
    message = "1 of 2 pods have a node: 0/2 nodes are available: 2 Insufficient cpu."
    assert of_type(status, "Scheduled") == ("False", "Unschedulable", message)
    assert status.phase == "Starting"


@pytest.mark.parametrize(
    ("reason", "degraded"),
    [
        ("ImagePullBackOff", "True"),
        ("CreateContainerConfigError", "True"),
        ("ContainerCreating", ""),
    ],
)
def test_a_container_that_can_not_start_degrades_the_job(reason: str, degraded: str) -> None:
    stuck = make_pod(
        1, state={"waiting": {"reason": reason, "message": "no such image"}}, phase="Pending"
    )
    seen = running(make_pod(0), stuck, running=False)
    status = after(seen, judged(seen))
    found = next((c for c in status.conditions if c.type == "Degraded"), None)
    assert (found.status if found else "") == degraded
    if found:
        assert found.message == f"pod run-1-1-abcde waits: {reason}: no such image"


def test_progress_and_metrics_are_published_with_four_digits() -> None:
    metrics = {"kl": 0.0131999, "reward": 1.84, "reward_std": 0.5, "unheard_of": 1.0}
    pull = make_pull(step=140, total_steps=1868, seconds_per_step=2.5, metrics=metrics)
    status = going_on(
        make_seen(
            make_job(status=active_status()), make_child(), make_pod(0), make_pod(1), pull=pull
        )
    )
    assert status.progress is not None
    assert (status.progress.summary, status.progress.percent) == ("140/1868", 7)
    assert (status.progress.eta_seconds, status.progress.eta) == (4320, "1h12m")
    assert status.progress.last_step_time == at(-1)
    assert status.metrics is not None
    assert (status.metrics.kl, status.metrics.reward, status.metrics.loss) == (
        "0.0132",
        "1.84",
        None,
    )


def test_before_the_number_of_steps_is_known_only_the_step_is_told() -> None:
    pull = make_pull(step=3)
    status = going_on(
        make_seen(make_job(status=active_status()), make_child(), make_pod(0), pull=pull)
    )
    assert status.progress is not None
    assert (status.progress.summary, status.progress.percent, status.progress.eta_seconds) == (
        "3",
        0,
        None,
    )


def test_measured_memory_stands_beside_the_prediction() -> None:
    phases = dict.fromkeys(("load", "generate", "reference", "forward", "backward", "step"), 10)
    memory = {
        "phases": phases,
        "peak_phase": "step",
        "peak_allocated_bytes": 80,
        "device_bytes": 90,
    }
    plan = GPU_PLAN.model_validate(
        GPU_PLAN.model_dump() | {"memory": memory | {"usable_bytes": 100, "host_bytes_per_node": 5}}
    )
    job = make_job(status=active_status(plan=plan))
    measured = {
        "step": 100,
        "load": 20,
        "reward": 90,
        "reserved": 120,
        "device": 150,
        "host": 10**9,
    }
    status = going_on(make_seen(job, make_child(), pull=make_pull(memory=measured)))
    assert status.memory is not None
    assert (status.memory.predicted_bytes, status.memory.measured_bytes, status.memory.ratio) == (
        80,
        100,
        "0.800",
    )
    assert {name: phase.ratio for name, phase in status.memory.phases.items()} == {
        "step": "0.100",
        "load": "0.500",
    }
    assert (
        status.memory.reserved_bytes,
        status.memory.predicted_device_bytes,
        status.memory.device_bytes,
    ) == ((120, 90, 150))


def test_on_cpus_there_is_no_gpu_memory_to_compare() -> None:
    seen = make_seen(
        make_job(status=active_status(plan=GPU_PLAN)),
        make_child(),
        pull=make_pull(memory={"host": 7}),
    )
    assert going_on(seen).memory is None


def test_success_completes_the_progress_from_the_outcome() -> None:
    seen = running(make_pod(0, state=terminated(0, said("Succeeded", step=12))), make_pod(1))
    status = after(seen, judged(seen))
    assert status.phase == "Succeeded"
    assert of_type(status, "Succeeded") == ("True", "Succeeded", "finished after step 12")
    assert of_type(status, "Running")[:2] == ("False", "Finished")
    assert status.progress is not None
    assert (status.progress.summary, status.progress.percent, status.progress.eta_seconds) == (
        "12/12",
        100,
        0,
    )
    assert (status.completion_time, status.attempt_start_time) == (at(0), None)


def test_failure_is_the_opposite_of_success() -> None:
    status = after(running(), Decision(Action.FAIL, "BadInput", "row 7 has no answer", ended=OOM))
    assert status.phase == "Failed"
    assert of_type(status, "Failed") == ("True", "BadInput", "row 7 has no answer")
    assert of_type(status, "Succeeded")[0] == "False"


def test_suspension_stops_the_clock() -> None:
    status = after(
        running(activeSeconds=30), Decision(Action.SUSPEND, "Suspended", "spec.suspend is true")
    )
    assert (status.phase, status.active_seconds, status.attempt_start_time) == (
        "Suspended",
        90,
        None,
    )
    assert not stored(make_job(), status).is_active


def test_a_job_that_resumes_into_the_line_is_no_longer_suspended() -> None:
    suspended = make_job(status={"attempt": 1, "conditions": [condition("Suspended")]})
    status = after(
        make_seen(suspended), Decision(Action.QUEUE, "WaitingForGPUs", "needs 8", plan=GPU_PLAN)
    )
    assert of_type(status, "Suspended")[:2] == ("False", "Resumed")
    assert status.phase == "Queued"
    resumed = make_seen(stored(suspended, status))
    started = after(resumed, Decision(Action.COMMIT, plan=GPU_PLAN))
    change = telling_change(status.conditions, started.conditions)
    assert change
    assert change.reason == "Starting", "that it was resumed is no news any more"


def test_a_waiting_job_says_what_it_waits_for_in_three_places() -> None:
    status = after(
        make_seen(make_job()), Decision(Action.QUEUE, "WaitingForGPUs", "needs 8", plan=GPU_PLAN)
    )
    assert status.phase == "Queued"
    for kind in ("Admitted", "Scheduled", "Running"):
        assert of_type(status, kind) == ("False", "WaitingForGPUs", "needs 8")
    assert of_type(status, "Planned")[0] == "True"
    assert status.attempt == 0


def test_a_job_that_nothing_fits_is_pending_with_the_planners_words() -> None:
    status = after(
        make_seen(make_job()), Decision(Action.QUEUE, "OutOfDeviceMemory", "needs 90 GiB, has 80")
    )
    assert status.phase == "Pending"
    assert of_type(status, "Planned") == ("False", "OutOfDeviceMemory", "needs 90 GiB, has 80")


def test_a_refused_spec_is_pending() -> None:
    status = after(make_seen(make_job()), Decision(Action.REJECT, "NoImage", "spec.image: unset"))
    assert (status.phase, of_type(status, "Admitted")) == (
        "Pending",
        ("False", "NoImage", "spec.image: unset"),
    )


def test_a_release_is_no_restart() -> None:
    decision = Decision(Action.RELEASE, "SchedulingTimeout", "1 of 2 pods were bound")
    status = after(running(running=False), decision)
    assert (status.phase, status.restarts, status.attempt_start_time) == ("Queued", 0, None)
    assert of_type(status, "Admitted")[2] == "1 of 2 pods were bound; the gang is queued again"


ADAPTER = PLAN.model_copy(
    update={"method": "LoRA", "changes": ["trains a LoRA adapter of rank 16"]}
)


def test_consent_to_an_adapter_is_answered_loudly() -> None:
    status = after(make_seen(make_job()), Decision(Action.COMMIT, plan=ADAPTER))
    assert of_type(status, "TrainsAdapterOnly") == (
        "True",
        "AdapterIfNeeded",
        "trains a LoRA adapter of rank 16",
    )


@pytest.mark.parametrize(
    "spec", [{"adapter": {"use": "Always"}}, {"reference": {"strategy": "Adapter"}}], ids=str
)
def test_an_adapter_that_was_asked_for_is_no_news(spec: dict[str, Any]) -> None:
    status = after(make_seen(make_job(spec)), Decision(Action.COMMIT, plan=ADAPTER))
    assert all(found.type != "TrainsAdapterOnly" for found in status.conditions)


@pytest.mark.parametrize(
    ("checkpoint", "status", "reason"),
    [
        ({}, "False", "NoCheckpointVolume"),
        ({"volume": {"claimName": "c"}}, "True", "SharedVolume"),
        ({"store": {"url": "s3://bucket"}}, "True", "ObjectStore"),
    ],
    ids=["nothing", "a volume", "a store"],
)
def test_whether_a_run_can_be_recovered(
    checkpoint: dict[str, Any], status: str, reason: str
) -> None:
    seen = make_seen(make_job({"checkpoint": checkpoint}))
    assert of_type(after(seen, COMMIT), "Recoverable")[:2] == (status, reason)


def test_a_transition_time_moves_only_with_the_status() -> None:
    first = going_on(running(running=False))
    job = stored(make_job(), first)
    later = make_seen(job, make_child(), make_pod(0), make_pod(1), now=2e9)
    times = {found.type: found.last_transition_time for found in going_on(later).conditions}
    assert times["Running"] == at(0)


def test_a_clock_that_was_set_back_makes_deadlines_count_anew() -> None:
    year = 365 * 86400.0
    status = active_status(running=False, attemptStartTime=at(year), startTime=at(year))
    pods = [make_pod(index, state={}, phase="Pending", node="") for index in range(2)]
    unbound = make_seen(make_job(status=status), make_child(), *pods)
    since_first_sight = LIMITS.scheduling_timeout_seconds - 10
    assert judged(unbound).requeue_after == pytest.approx(since_first_sight)
    assert going_on(unbound).attempt_start_time == going_on(unbound).start_time == at(0)
    finished = active_status(attemptStartTime=None) | {
        "completionTime": at(year),
        "conditions": [condition("Succeeded", since=year)],
    }
    done = make_seen(make_job({"ttlSecondsAfterFinished": 130}, finished), make_pod(0))
    assert judged(done).requeue_after == pytest.approx(LIMITS.survivor_grace_seconds - 10)
    healed = going_on(done)
    assert healed.completion_time == at(0)
    assert all(found.last_transition_time <= at(0) for found in healed.conditions)
    assert to_json(going_on(make_seen(stored(done.job, healed), make_pod(0)))) == to_json(healed)


def test_the_same_world_gives_the_same_status() -> None:
    first = going_on(running())
    job = stored(make_job(), first)
    second = going_on(make_seen(job, make_child(), make_pod(0), make_pod(1)))
    assert merge_patch(job.raw_status, to_json(second)) == {}


@pytest.mark.parametrize(
    ("old", "new", "patch"),
    [
        ({}, {}, {}),
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": 1, "b": 2}, {"b": 2}, {"a": None}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "z": 3}}, {"a": {"y": None, "z": 3}}),
        ({"a": [1, 2]}, {"a": [1]}, {"a": [1]}),
        ({"a": 1}, {"a": {"x": 1}}, {"a": {"x": 1}}),
    ],
)
def test_the_patch_holds_only_the_difference(old: Any, new: Any, patch: Any) -> None:
    assert merge_patch(old, new) == patch


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (45, "45s"),
        (60, "1m"),
        (3661, "1h1m"),
        (4320, "1h12m"),
        (90061, "1d1h"),
        (3605, "1h"),
    ],
)
def test_durations_for_people(seconds: int, text: str) -> None:
    assert duration(seconds) == text
