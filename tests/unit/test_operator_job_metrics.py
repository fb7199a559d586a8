"""The grpo_job_* families: valid whatever jobs are called and say, few, and made anew only for what
has changed."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric, Sample
from prometheus_client.parser import text_string_to_metric_families

from grpo_api.plan.plan import MemoryPhases, MemoryPrediction
from grpo_api.report.metrics import (
    BY_REASON,
    ENDED_JOBS,
    ENDED_SECONDS,
    JOB,
    JOB_PROGRESS_TIME,
    JOB_RECONCILE_FAILURES,
    JOBS,
)
from grpo_api.report.report import Progress
from grpo_api.status.usage import GPUSeconds
from grpo_kube.objects.times import Observed
from grpo_operator.decide.observation import Pull, Silence
from grpo_operator.process import job_metrics
from grpo_operator.process.job_metrics import (
    JobMetrics,
    failure_samples,
    pod_samples,
    progress_samples,
)
from grpo_operator.records.names import COMPONENT_ENGINE
from grpo_operator.records.parsing import grpojob_record
from grpo_operator.records.records import GRPOJobRecord
from tests.generated import cases
from tests.unit.dirty_objects import GRPOJOB, dirty
from tests.unit.operator_world import (
    GPU_PLAN,
    NOW,
    active_status,
    at,
    condition,
    make_job,
    make_pod,
)
from tests.virtual_time import virtually

PEAK = {"predictedBytes": 5, "measuredBytes": 4, "ratio": "1.250"}
MEMORY = {**PEAK, "phases": {"forward": PEAK}}


def live(name: str = "run", **more: Any) -> GRPOJobRecord:
    return make_job(
        status=active_status(plan=GPU_PLAN, phase="Running", **more), name=name, uid=f"uid-{name}"
    )


def over(name: str, ago: float, phase: str = "Succeeded", **more: Any) -> GRPOJobRecord:
    status = active_status(
        phase=phase, conditions=[condition(phase)], completionTime=at(-ago), **more
    )
    return make_job(status=status, name=name, uid=f"uid-{name}")


def page(jobs: Iterable[GRPOJobRecord], metrics: JobMetrics | None = None) -> list[Metric]:
    text = virtually((metrics or JobMetrics(lambda: jobs, lambda: NOW)).text())
    return list(text_string_to_metric_families(text))


def samples(jobs: Iterable[GRPOJobRecord]) -> list[Sample]:
    return [sample for family in page(jobs) for sample in family.samples]


def of(found: list[Sample], name: str, **labels: str) -> list[float]:
    return [one.value for one in found if one.name == name and labels.items() <= one.labels.items()]


def test_the_expected_wait_is_of_the_turns_of_jobs_on_gpus() -> None:
    waits = [
        make_job(status={"phase": "Queued", "reason": "WaitingForGPUs"}, name=f"waits-{number}")
        for number in range(2)
    ]
    ends: dict[str, Any] = {"progress": {"attempt": 1, "etaSeconds": 3600}}
    ends["attemptStartTime"] = at(0)
    on_cpus = make_job(status=active_status(phase="Running", **ends), name="on-cpus")
    found = samples([*waits, live(**ends), on_cpus])
    assert of(found, "grpo_jobs_waiting", reason="WaitingForGPUs") == [2]
    assert of(found, "grpo_jobs_expected_wait_seconds", reason="WaitingForGPUs") == [7200]


def test_a_running_job_tells_its_phase_conditions_progress_and_memory() -> None:
    said = [
        condition("Admitted"),
        condition("Running"),
        condition("Degraded"),
        condition("Recoverable"),
    ]
    said.append(condition("Failed", "False"))
    progress = {"step": 140, "totalSteps": 1868, "percent": 7}
    found = samples([live(conditions=said, progress=progress, memory=MEMORY, restarts=2)])
    assert {one.labels["phase"] for one in found if one.name == "grpo_job_phase"} == {"Running"}
    conditions = [one.labels for one in found if one.name == "grpo_job_condition"]
    assert [(one["type"], one["reason"]) for one in conditions] == [("Degraded", "Because")]
    assert of(found, "grpo_job_step", namespace="team-a", grpojob="run") == [140]
    assert of(found, "grpo_job_restarts_total") == [2]
    assert of(found, "grpo_job_attempts_total") == [1]
    assert of(found, "grpo_job_info", strategy="Clone") == [1]
    assert of(found, "grpo_job_gpus", product="NVIDIA-H100-80GB-HBM3") == [8]
    assert not [one.name for one in found if "memory" in one.name], "rank 0 tells it"


@pytest.mark.parametrize("manager", ["kueue.x-k8s.io/multikueue", "example.com/other"])
@pytest.mark.parametrize("status", [None, {"phase": "Queued"}, {"phase": "Running"}])
def test_a_job_of_another_controller_has_no_series(
    manager: str, status: dict[str, Any] | None
) -> None:
    """An alert would say that this operator fails to reconcile it, or that it waits too long."""
    assert samples([make_job({"managedBy": manager}, status)]) == []
    assert samples([make_job({"managedBy": "grpo.dev/operator"}, status)]) != []


def test_a_running_job_tells_since_when_it_has_not_got_on_and_how_long_its_stage_may() -> None:
    job = live(conditions=[condition("Admitted"), condition("Running")])

    def told(
        pull: Pull | None, silence: Silence | None = None, of_job: GRPOJobRecord = job
    ) -> list[Any]:
        return [
            (labels, value)
            for _, labels, value in progress_samples(of_job, pull, silence, lambda at: NOW - at.at)
        ]

    assert told(None) == [], "not asked yet"
    assert told(make_pull(stage="Exporting", ago=30)) == [((), NOW - 30), (("Exporting",), 1800.0)]
    assert told(make_pull(stage="Connecting", ago=1))[1] == (("Connecting",), 60.8)
    assert told(make_pull(stage='"\n', ago=1))[1] == (("Unknown",), 1800.0)
    assert told(None, Silence(Observed(70), "refused")) == [
        ((), NOW - 70),
        (("Importing",), 2400.0),
    ]
    conditions = [condition("Admitted"), condition("Running")]
    status = active_status(plan=GPU_PLAN, phase="Running", conditions=conditions)
    own_program = make_job({"command": ["bash", "train.sh"]}, status)
    assert told(None, Silence(Observed(70), "refused"), own_program) == []
    assert told(make_pull(stage="Exporting", ago=30), of_job=own_program) != []
    assert told(make_pull(attempt=2, ago=1)) == [], "another attempt's"
    assert told(make_pull(ago=1), of_job=live(conditions=[condition("Admitted")])) == []


def test_pods_of_the_running_attempt_are_told_with_their_nodes() -> None:
    job = make_job(status=active_status(plan=GPU_PLAN, phase="Running"))
    pods = [
        make_pod(0, name="first", node="gpu-1"),
        make_pod(1, name="deleted", node="gpu-2", deleted=True),
        make_pod(0, name="engine", node="gpu-3", component=COMPONENT_ENGINE),
        make_pod(2, name="not bound", node=None),
        make_pod(3, name="ended", node="gpu-4", phase="Failed"),
        make_pod(0, attempt=2, name="of another attempt", node="gpu-5"),
        make_pod(0, name="of another job", node="gpu-6", owner="another"),
    ]
    assert [labels for _, labels, _ in pod_samples(job, pods)] == [
        ("1", "first", "gpu-1", "trainer"),
        ("1", "deleted", "gpu-2", "trainer"),
        ("1", "engine", "gpu-3", "engine"),
    ]


def make_pull(stage: str = "Training", *, ago: float, attempt: int = 1) -> Pull:
    return Pull(Progress(attempt=attempt, stage=stage), Observed(ago), Observed(ago))


def test_what_changes_while_the_job_does_not_is_read_at_every_scrape() -> None:
    since = [100.0]
    metrics = JobMetrics(
        lambda: [live()], lambda: NOW, lambda _: [(JOB_PROGRESS_TIME, (), since[0])]
    )
    for _ in range(2):
        found = [sample for family in page([], metrics) for sample in family.samples]
        assert of(found, "grpo_job_progress_timestamp_seconds", grpojob="run") == [since[0]]
        since[0] += 5.0


def test_two_thousand_jobs_of_the_chattiest_kind_fit_into_two_megabytes() -> None:
    """A thousand that run and have a number for everything, and many that have just ended and
    had."""
    peaks = MemoryPhases(load=1, generate=2, reference=3, forward=4, backward=2**34, step=6)
    sizes = {
        "peak_allocated_bytes": 1,
        "device_bytes": 1,
        "usable_bytes": 1,
        "host_bytes_per_node": 1,
    }
    memory = MemoryPrediction(phases=peaks, peak_phase="backward", **sizes)
    measured = {**MEMORY, "phases": dict.fromkeys(MemoryPhases.model_fields, PEAK)}
    kinds = ("Admitted", "Planned", "Scheduled", "Running", "Degraded", "Recoverable")
    spent = dict.fromkeys(GPUSeconds.model_fields, 123456.789)
    usage = {"asOf": at(-1), "gpuSeconds": spent, "queuedSeconds": 12.345, "cost": 1234.5}
    status = active_status(
        usage=usage,
        plan=GPU_PLAN.model_copy(update={"memory": memory, "parameters": "1.24B"}),
        phase="Running",
        progress={"step": 140},
        memory=measured,
        conditions=[condition(kind) for kind in kinds],
    )
    jobs = [
        make_job(status=status, name=f"gsm8k-llama-{number}", uid=f"uid-{number}")
        for number in range(1000)
    ]
    jobs += [over(f"gsm8k-llama-{number}", ago=1, usage=usage) for number in range(1000, 2000)]
    pull = make_pull(ago=1)
    metrics = JobMetrics(
        lambda: jobs,
        lambda: NOW,
        lambda job: progress_samples(job, pull, None, lambda at: NOW - at.at),
    )
    text = virtually(metrics.text())
    assert text.count("grpo_job_gpu_seconds{") == 1300 * len(GPUSeconds.model_fields)
    assert text.count("grpo_job_patience_seconds{") == 1000
    assert len(text) < 2e6


def test_what_became_of_the_gpus_is_told_of_live_and_ended_jobs() -> None:
    usage = {
        "asOf": at(-1),
        "gpuSeconds": {"training": 5400, "lost": 1800.6},
        "queuedSeconds": 7,
        "cost": 5.25,
    }
    ended = active_status(
        phase="Failed", conditions=[condition("Failed")], completionTime=at(-1), usage=usage
    )
    jobs = [
        live("runs", usage=usage),
        make_job(status=ended, name="over", uid="uid-over"),
        live("young"),
    ]
    found = samples(jobs)
    for name in ("runs", "over"):
        told = {
            one.labels["state"]: one.value for one in found if one.name == "grpo_job_gpu_seconds"
        }
        assert told == {"training": 5400, "lost": 1801}
        assert of(found, "grpo_job_cost", grpojob=name) == [5.25]
        assert of(found, "grpo_job_queued_seconds", grpojob=name) == [7]
    assert not of(found, "grpo_job_cost", grpojob="young")


def test_every_declared_family_has_its_help_and_kind_once() -> None:
    families = page([])
    assert [(one.name, one.documentation, one.type) for one in families] == [
        (one.name.removesuffix("_total"), one.help, one.kind) for one in (JOBS, *BY_REASON, *JOB)
    ]


def test_ended_jobs_are_counted_and_only_the_newest_have_series_of_their_own() -> None:
    jobs = [over(f"job-{number}", ago=number) for number in range(ENDED_JOBS + 100)]
    jobs += [over("old", ago=ENDED_SECONDS + 60), over("bad", ago=1, phase="Failed"), live()]
    found = samples(jobs)
    assert of(found, "grpo_jobs", namespace="team-a", phase="Succeeded") == [ENDED_JOBS + 101]
    assert of(found, "grpo_jobs", phase="Failed") == [1]
    assert of(found, "grpo_job_condition", grpojob="bad", type="Failed") == [1]
    assert of(found, "grpo_job_phase", grpojob="old") == []
    assert of(found, "grpo_job_phase", grpojob=f"job-{ENDED_JOBS + 99}") == []
    assert (
        len({one.labels["grpojob"] for one in found if "grpojob" in one.labels}) == ENDED_JOBS + 1
    )


def test_a_job_that_ended_long_ago_has_no_series_although_there_is_room() -> None:
    found = samples([over("old", ago=ENDED_SECONDS + 60), over("young", ago=ENDED_SECONDS - 60)])
    assert {one.labels["grpojob"] for one in found if "grpojob" in one.labels} == {"young"}


def test_series_stay_few_while_a_thousand_jobs_come_and_go() -> None:
    jobs: dict[str, GRPOJobRecord] = {}
    metrics = JobMetrics(jobs.values, lambda: NOW)
    for number in range(1000):
        jobs[f"job-{number}"] = live(f"job-{number}")
        jobs.pop(f"job-{number - 10}", None)
        if number % 100 == 99:
            found = [sample for family in page([], metrics) for sample in family.samples]
            assert {one.labels["grpojob"] for one in found if "grpojob" in one.labels} == set(jobs)
    jobs.clear()
    assert [family.samples for family in page([], metrics)] == [[]] * (
        1 + len(BY_REASON) + len(JOB)
    )


def waiting(name: str, reason: str, since: float, **more: Any) -> GRPOJobRecord:
    not_running = condition("Running", "False", reason, since=-since)
    status = {"phase": "Queued", "reason": reason, "conditions": [not_running], **more}
    return make_job(status=status, name=name, uid=f"uid-{name}", creationTimestamp=at(-9e4))


def test_jobs_that_wait_are_told_by_reason_beside_what_the_queue_expects() -> None:
    """Three turns of the longest run, which has begun 1,000 s ago and ends in 2,000 s."""
    runs = [
        live("short", attemptStartTime=at(-1800.0)),
        live("long", attemptStartTime=at(-1000.0), progress={"etaSeconds": 2000}),
    ]
    queued = [waiting(f"job-{number}", "WaitingForGPUs", number * 100.0) for number in range(5)]
    stuck = [waiting("image", "PodWaiting", 4000.0), waiting("odd", "SomeWord", 10.0)]
    found = samples([*runs, *queued, *stuck])
    told = {
        reason: [of(found, metric.name, reason=reason) for metric in BY_REASON]
        for reason in ("WaitingForGPUs", "PodWaiting", "Unknown")
    }
    assert told == {
        "WaitingForGPUs": [[5], [400], [9000]],
        "PodWaiting": [[1], [4000], [0]],
        "Unknown": [[1], [10], [0]],
    }
    alone = samples(queued)
    assert of(alone, BY_REASON[2].name) == [0], "nothing runs that could make room"


def test_a_job_whose_reconcile_fails_again_and_again_is_named() -> None:
    failures = {"bad": 7, "good": 0}
    jobs = [live(name) for name in failures]
    metrics = JobMetrics(
        lambda: jobs, lambda: NOW, lambda job: failure_samples(failures[job.key.name])
    )
    found = [sample for family in page([], metrics) for sample in family.samples]
    assert of(found, JOB_RECONCILE_FAILURES.name, grpojob="bad") == [7]
    assert of(found, JOB_RECONCILE_FAILURES.name, grpojob="good") == []


def test_a_jobs_lines_are_made_once_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    original = job_metrics._samples

    def noted(job: GRPOJobRecord) -> Iterator[job_metrics.Sample]:
        made.append(job.uid)
        return original(job)

    monkeypatch.setattr(job_metrics, "_samples", noted)
    jobs = [live("a"), live("b"), over("c", ago=5)]
    metrics = JobMetrics(lambda: jobs, lambda: NOW)
    for _ in range(3):
        virtually(metrics.text())
    assert made == ["uid-a", "uid-b", "uid-c"]
    jobs[0] = make_job(status=active_status(), name="a", uid="uid-a", resourceVersion="11")
    jobs[1] = make_job(status=active_status(), name="b", uid="another")
    virtually(metrics.text())
    assert made[3:] == ["uid-a", "another"]


@settings(max_examples=cases(50))
@given(
    st.lists(dirty(GRPOJOB), max_size=4),
    st.lists(st.text(min_size=1, max_size=20), min_size=4, max_size=4),
)
def test_the_page_is_valid_whatever_jobs_are_called_and_say(
    items: list[Any], names: list[str]
) -> None:
    jobs = []
    for number, (item, name) in enumerate(zip(items, names, strict=False)):
        try:
            named = {**item, "metadata": {**item["metadata"], "name": f"{name}{number}"}}
            jobs.append(grpojob_record(named))
        except (ValueError, TypeError, KeyError):
            continue
    found = samples(jobs)
    assert {one.labels["grpojob"] for one in found if "grpojob" in one.labels} == {
        job.name for job in jobs
    }
    series = [(one.name, *sorted(one.labels.items())) for one in found]
    assert len(series) == len(set(series))
    assert sum(of(found, "grpo_jobs")) == len(jobs)
