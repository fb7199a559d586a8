"""Gangs that compete for GPUs, with the real planner, scheduler and API server; the GPUs are
kwok's.

Each test has nodes of its own, which its jobs select by a label, so that tests don't disturb each
other.
"""

import pytest

from grpo_operator.decide.decisions import Limits
from harness.client import ApiStatusError
from harness.programs.patience import wait_for_event
from tests.integration.gpu_bench import PRODUCT, GpuBench
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, outcome
from tests.integration.operator_thread import OperatorThread, Swallowed

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmission"


@pytest.fixture
def bench(gpu_bench: GpuBench) -> GpuBench:
    return gpu_bench


def test_a_gang_waits_for_its_gpus_and_starts_when_they_are_freed(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("two", 2)
    holder = bench.wait_running("two")
    assert holder[0]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    bench.want("eight", 8, nodes=2)
    bench.wait_phase("Queued", "eight")
    message = (
        f"needs 8 × {PRODUCT} on 2 nodes; 6 free, 2 held by {bench.namespace}/two; 1st of 1 "
        "in the queue"
    )
    assert bench.condition("Scheduled", "eight") == ("False", "WaitingForGPUs", message)
    assert bench.children("eight") == []
    bench.end(holder[0], message=outcome("Succeeded"))
    pods = bench.wait_running("eight")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2


def test_two_gangs_of_three_on_four_gpus_run_one_after_the_other(bench: GpuBench) -> None:
    bench.foreign_pod("notebook", 4)
    with bench.operating():  # it lists the foreign pod before it admits anybody
        bench.want("a", 3)
        bench.want("b", 3)
        first = bench.wait(
            "one to run",
            lambda: next((n for n in "ab" if bench.status(n).get("phase") == "Running"), ""),
        )
        second = "b" if first == "a" else "a"
        bench.wait_phase("Queued", second)
        assert bench.children(second) == []
        bench.end(bench.pods(first)[0], message=outcome("Succeeded"))
        bench.wait_running(second)


def refuse_jobs(bench: GpuBench, prefix: str) -> str:
    """Has the API server refuse Jobs of this namespace whose name begins so; returns the policy's
    name."""
    name = f"{bench.namespace}-jobs"
    rule = {
        "apiGroups": ["batch"],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["jobs"],
    }
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [
            {
                "expression": f"!object.metadata.name.startsWith('{prefix}')",
                "message": "not this team",
            }
        ],
    }
    here = {"matchLabels": {"kubernetes.io/metadata.name": bench.namespace}}
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": here},
    }
    bench.post(f"{POLICIES}policies", {"metadata": {"name": name}, "spec": policy})
    bench.post(f"{POLICIES}policybindings", {"metadata": {"name": name}, "spec": binding})
    containers = [{"name": "c", "image": "x"}]
    probe = {"template": {"spec": {"restartPolicy": "Never", "containers": containers}}}

    def refused() -> bool:
        try:
            bench.post(
                f"{JOBS}?dryRun=All", {"metadata": {"name": f"{prefix}-probe"}, "spec": probe}
            )
        except ApiStatusError as error:
            return "not this team" in str(error)
        return False

    bench.wait("the policy", refused)
    return name


def test_a_gang_whose_job_the_api_server_refuses_gives_its_gpus_back(bench: GpuBench) -> None:
    policy = refuse_jobs(bench, "refused")
    with bench.operating(limits=Limits(release_pause_seconds=3600)):
        bench.want("refused", 8, nodes=2)
        bench.wait(
            "the release",
            lambda: bench.condition("Admitted", "refused")[1] == "PodsNotCreated",
            hurry=True,
        )
        assert "not this team" in bench.condition("Admitted", "refused")[2]
        bench.want("other", 8, nodes=2)
        bench.wait_running("other")
        assert bench.status("refused")["phase"] == "Queued"
    for kind in ("policybindings", "policies"):
        bench.delete(f"{POLICIES}{kind}", policy)


def test_a_deleted_job_gives_its_gpus_back_although_a_stranger_s_finalizer_keeps_it(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("held", 8, nodes=2)
    bench.wait_running("held")
    bench.want("next", 8, nodes=2)
    bench.patch(GRPOJOBS, "held", {"metadata": {"finalizers": ["example.com/archive"]}})
    bench.delete(GRPOJOBS, "held")
    bench.wait_running("next")
    assert bench.job("held")["metadata"]["deletionTimestamp"]
    bench.patch(GRPOJOBS, "held", {"metadata": {"finalizers": None}})
    bench.wait("it to be gone", lambda: not bench.exists(GRPOJOBS, "held"))


def test_a_restart_keeps_its_place_and_its_plan(bench: GpuBench, operator: OperatorThread) -> None:
    bench.want("runs", 8, nodes=2)
    pods = bench.wait_running("runs")
    plan = bench.status("runs")["plan"]
    bench.want("waits", 8, nodes=2)
    bench.wait_phase("Queued", "waits")
    bench.end(pods[1], 137)
    bench.wait_running("runs", 2)
    assert bench.status("runs")["plan"] == plan
    assert bench.children("waits") == []


@pytest.mark.slow
def test_an_operator_that_dies_between_commit_and_start_admits_nothing_twice(
    bench: GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    swallowed = Swallowed()
    with monkeypatch.context() as patched:
        swallowed.patch(patched)
        with bench.operating():
            bench.want("first", 8, nodes=2)
            assert wait_for_event(swallowed, 30)
    bench.want("second", 8, nodes=2)
    with bench.operating():
        bench.wait_running("first")
        bench.wait_phase("Queued", "second")
    assert (bench.children("first"), bench.children("second")) == (["first-1"], [])


def test_a_foreign_pod_that_was_faster_makes_the_gang_give_everything_back(
    bench: GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    swallowed = Swallowed()
    with monkeypatch.context() as patched:
        swallowed.patch(patched)
        with bench.operating():
            bench.want("gang", 8, nodes=2)
            assert wait_for_event(swallowed, 30)
    bench.foreign_pod("notebook", 1)
    limits = Limits(scheduling_timeout_seconds=60.0, release_pause_seconds=5.0)
    with bench.operating(limits=limits):
        bench.wait("the release", lambda: "SchedulingTimeout" in bench.ends("gang"), hurry=True)
        bench.wait("no pod", lambda: not bench.pods("gang"))
        bench.wait(
            "its turn",
            lambda: bench.condition("Admitted", "gang")[1] == "WaitingForGPUs",
            hurry=True,
        )
        bench.delete(PODS, "notebook")
        bench.wait_running("gang", 2)
    assert bench.status("gang")["restarts"] == 0


def test_what_can_never_fit_is_refused_with_numbers(
    bench: GpuBench, operator: OperatorThread
) -> None:
    bench.want("huge", 64, nodes=8)
    bench.wait("the reason", lambda: bench.condition("Planned", "huge")[0] == "False")
    assert "8" in bench.condition("Planned", "huge")[2]
    assert bench.children("huge") == []
    bench.want("nowhere", 1, placement={"nodeSelector": {"bench": "nowhere"}})
    bench.wait("the reason", lambda: bench.condition("Planned", "nowhere")[0] == "False")
    assert bench.condition("Admitted", "nowhere")[1] == "NoGPUs"


def test_a_higher_priority_goes_first(bench: GpuBench, operator: OperatorThread) -> None:
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    bench.client.request("POST", path, {"metadata": {"name": bench.namespace}, "value": 1000})
    bench.want("runs", 8, nodes=2)
    holders = bench.wait_running("runs")
    bench.want("old", 8, nodes=2)
    bench.wait_phase("Queued", "old")
    bench.want("urgent", 8, nodes=2, placement={"priorityClassName": bench.namespace})
    bench.wait_phase("Queued", "urgent")
    for pod in holders:
        bench.end(pod, message=outcome("Succeeded"))
    bench.wait_running("urgent")
    assert bench.children("old") == []
    assert bench.condition("Admitted", "old")[0] == "False"
