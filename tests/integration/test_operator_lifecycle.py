"""One GRPOJob's way through on a real API server: start, end, restart, suspend, deadline, time to
live, deletion.

kwok plays the kubelet; everything else is real. The end-to-end tests do the same with real
training.
"""

import pytest

from grpo_operator.decide.decisions import Limits
from grpo_operator.records.names import RENDEZVOUS_SERVICE
from tests.generated import gated
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, Bench, outcome
from tests.integration.operator_thread import OperatorThread, quiet_for

SERVICES = "/api/v1/namespaces/{}/services"
EVENTS = "/api/v1/namespaces/{}/events"
CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"


def test_a_job_runs_and_succeeds_by_rank_0s_outcome(bench: Bench, operator: OperatorThread) -> None:
    bench.submit()
    pods = bench.wait_running()
    assert [pod["spec"]["nodeName"] for pod in pods] != [pods[0]["spec"]["nodeName"]] * 2
    for pod in pods:
        bench.end(pod, message=outcome("Succeeded", step=12, message="trained 12 steps"))
    status = bench.wait_phase("Succeeded")
    assert bench.condition("Succeeded") == ("True", "Succeeded", "trained 12 steps")
    assert status["outcome"]["step"] == 12
    assert status["progress"]["summary"] == "12/12"
    assert status["completionTime"]
    assert bench.children() == ["run-1"]


def said_by_events(bench: Bench) -> list[str]:
    """The conditions that events on GRPOJobs tell of, oldest first: one event tells of two under
    load."""
    found = bench.get(EVENTS + "?fieldSelector=involvedObject.kind=GRPOJob")["items"]
    found.sort(key=lambda one: int(one["metadata"]["resourceVersion"]))
    words = [word for one in found for word in reversed(one["message"].split("; before: "))]
    return [word.partition(":")[0] for word in words]


def test_a_job_starts_with_at_most_six_writes_and_ends_with_three(bench: Bench) -> None:
    # Without those that tell of a start that takes long, as many as it takes time.
    with bench.operating(status_interval=3600.0) as operator:
        bench.submit()
        pods = bench.wait_running()
        bench.wait("the events", lambda: said_by_events(bench) == ["Admitted=True", "Running=True"])
        quiet_for(operator, 1.5)
        started = operator.writes() - operator.requests().get(("POST", "services"), 0)
        assert started <= 6
        for pod in pods:
            bench.end(pod, message=outcome("Succeeded"))
        bench.wait_phase("Succeeded")
        quiet_for(operator, 2.5)
        assert operator.writes() - operator.requests().get(("POST", "services"), 0) - started <= 3


def test_nothing_is_asked_of_the_api_server_while_nothing_changes(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.wait_running()
    quiet_for(operator, 3)
    assert quiet_for(operator, 6) == {}


def test_a_failed_rank_brings_a_new_gang_and_keeps_the_old_ones_logs(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    for attempt in (1, 2, 3):
        pods = bench.wait_running(attempt=attempt)
        bench.end(pods[1], 137, reason="OOMKilled")
    bench.wait_running(attempt=4)
    assert bench.status()["restarts"] == 3
    assert bench.status()["outcome"]["result"] == "OutOfMemory"
    bench.wait(
        "only the last failed Job to be kept", lambda: bench.children() == ["run-3", "run-4"]
    )
    kept = [pod["status"]["phase"] for pod in bench.pods(attempt=3)]
    assert "Failed" in kept
    bench.end(bench.pods(attempt=4)[0], 40, outcome("OutOfMemory", message="CUDA out of memory"))
    bench.wait_phase("Failed", hurry=True)
    _, reason, message = bench.condition("Failed")
    assert reason == "RestartLimit"
    assert message.startswith(
        "OutOfMemory after 3 of 3 restarts: CUDA out of memory. The job ran out of memory with 4"
    )
    bench.wait(
        "no survivor",
        lambda: all(pod["status"]["phase"] != "Running" for pod in bench.pods(attempt=4)),
    )


def test_what_the_same_input_would_give_again_is_not_tried_again(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    pods = bench.wait_running()
    with bench.kubelets_standing_still():
        bench.end(pods[0], 1, outcome("Error", message="connection closed by peer"))
        bench.end(pods[1], 43, outcome("BadInput", rank=1, message="row 7 has no answer"))
    bench.wait_phase("Failed")
    assert bench.condition("Failed") == ("True", "BadInput", "row 7 has no answer")
    assert bench.children() == ["run-1"]


@pytest.mark.parametrize("grace", gated([30, 0]))
def test_a_deleted_pod_brings_a_new_attempt_that_does_not_count(
    bench: Bench, operator: OperatorThread, grace: int
) -> None:
    bench.submit()
    pods = bench.wait_running()
    bench.delete(PODS, pods[1]["metadata"]["name"], gracePeriodSeconds=grace)
    bench.wait_running(attempt=2)
    assert bench.status()["restarts"] == 0
    bench.wait(
        "no survivor",
        lambda: all(pod["status"]["phase"] != "Running" for pod in bench.pods(attempt=1)),
    )


@pytest.mark.parametrize("propagation", gated(["Background", "Foreground", "Orphan"]))
def test_a_deleted_job_brings_a_new_attempt_under_a_new_name(
    bench: Bench, operator: OperatorThread, propagation: str
) -> None:
    bench.submit()
    bench.wait_running()
    bench.delete(JOBS, "run-1", propagationPolicy=propagation)
    bench.wait_running(attempt=2)
    assert bench.status()["restarts"] == 0
    assert bench.status()["jobUid"] == bench.get(JOBS, "run-2")["metadata"]["uid"]
    bench.wait(
        "no old pod",
        lambda: all(pod["status"]["phase"] != "Running" for pod in bench.pods(attempt=1)),
    )


def test_the_rendezvous_service_comes_back(bench: Bench, operator: OperatorThread) -> None:
    bench.submit()
    bench.wait_running()
    service = bench.get(SERVICES, RENDEZVOUS_SERVICE)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    bench.delete(SERVICES, RENDEZVOUS_SERVICE)
    bench.wait("the Service", lambda: bench.exists(SERVICES, RENDEZVOUS_SERVICE))
    assert bench.get(SERVICES, RENDEZVOUS_SERVICE)["metadata"]["uid"] != service["metadata"]["uid"]
    assert bench.status()["attempt"] == 1


def test_suspend_ends_the_pods_and_resume_goes_on_in_a_new_attempt(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    bench.wait_running()
    bench.patch(GRPOJOBS, "run", {"spec": {"suspend": True}})
    bench.wait_phase("Suspended")
    bench.wait("no Job and no pod", lambda: not bench.children() and not bench.pods())
    assert bench.condition("Suspended")[:2] == ("True", "Suspended")
    assert "attemptStartTime" not in bench.status()
    bench.patch(GRPOJOBS, "run", {"spec": {"suspend": False}})
    bench.wait_running(attempt=2)
    assert bench.status()["restarts"] == 0
    assert bench.condition("Suspended")[0] == "False"


def test_a_job_that_is_created_suspended_starts_nothing(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit(suspend=True)
    status = bench.wait_phase("Suspended")
    assert status.get("attempt", 0) == 0
    assert bench.children() == []


def test_the_deadline_fails_a_job_and_ends_its_pods(bench: Bench, operator: OperatorThread) -> None:
    bench.submit(activeDeadlineSeconds=60)
    bench.wait_running()
    bench.wait_phase("Failed", hurry=True)
    assert bench.condition("Failed")[1] == "DeadlineExceeded"
    bench.wait(
        "no survivor", lambda: all(pod["status"]["phase"] != "Running" for pod in bench.pods())
    )


def test_a_finished_job_is_deleted_after_its_time_to_live(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit(ttlSecondsAfterFinished=60)
    bench.end(bench.wait_running()[0], message=outcome("Succeeded"))
    bench.wait("the job to be gone", lambda: not bench.exists(GRPOJOBS, "run"), hurry=True)
    bench.wait("its children to be gone", lambda: not bench.children() and not bench.pods())


def test_deleting_a_job_takes_its_children_along(bench: Bench, operator: OperatorThread) -> None:
    bench.submit()
    bench.wait_running()
    bench.delete(GRPOJOBS, "run")
    bench.wait("no children", lambda: not bench.children() and not bench.pods())


def test_a_job_made_again_under_its_name_gets_children_of_its_own(
    bench: Bench, operator: OperatorThread
) -> None:
    bench.submit()
    old = {pod["metadata"]["uid"] for pod in bench.wait_running()}
    bench.delete(GRPOJOBS, "run")
    uid = bench.submit()["metadata"]["uid"]
    bench.wait_running()
    owners = bench.get(JOBS, "run-1")["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [uid]
    bench.wait("only new pods", lambda: len(bench.pods()) == 2)
    assert old.isdisjoint(pod["metadata"]["uid"] for pod in bench.pods())
    assert bench.status()["attempt"] == 1


def test_a_strangers_job_of_the_same_name_is_waited_for_and_never_touched(
    bench: Bench, operator: OperatorThread
) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}
    stranger = bench.post(
        JOBS, {"metadata": {"name": "run-1"}, "spec": {"template": template, "suspend": True}}
    )
    bench.submit()
    bench.wait("the reason", lambda: bench.condition("Scheduled")[1] == "NameTaken", hurry=True)
    found = bench.get(JOBS, "run-1")
    assert (found["metadata"]["uid"], found["spec"]) == (
        stranger["metadata"]["uid"],
        stranger["spec"],
    )
    assert "ownerReferences" not in found["metadata"]
    bench.delete(JOBS, "run-1")
    bench.wait("the job's own", lambda: bench.exists(JOBS, "run-1"), hurry=True)
    bench.wait_running()


def test_a_claim_is_made_from_the_template_and_outlives_the_job(
    bench: Bench, operator: OperatorThread
) -> None:
    template = {"size": "1Gi", "accessMode": "ReadWriteMany"}
    bench.submit(checkpoint={"volumeClaimTemplate": template})
    claim = bench.wait("the claim", lambda: bench.get(CLAIMS)["items"])[0]
    assert claim["metadata"]["name"] == "run-checkpoints"
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    assert bench.condition("Recoverable")[0] == "True"
    bench.delete(GRPOJOBS, "run")
    bench.wait("no Job", lambda: not bench.children())
    assert bench.exists(CLAIMS, "run-checkpoints")


def test_a_gang_that_can_not_be_bound_whole_is_released_and_queued_again(bench: Bench) -> None:
    with bench.operating(limits=Limits(scheduling_timeout_seconds=60.0)):
        bench.submit(
            placement={"accelerator": "CPU", "nodes": 2, "nodeSelector": {"only": bench.namespace}}
        )
        bench.wait("the release", lambda: "SchedulingTimeout" in bench.ends(), hurry=True)
        bench.wait("nothing left", lambda: not bench.children() and not bench.pods())
        bench.wait("the next try", lambda: bench.status().get("attempt") == 2, hurry=True)
        assert bench.status()["restarts"] == 0


def test_events_tell_the_story_once(bench: Bench, operator: OperatorThread) -> None:
    bench.submit()
    bench.end(bench.wait_running()[0], 43, outcome("BadInput", message="row 7 has no answer"))
    bench.wait_phase("Failed")
    story = ["Admitted=True", "Running=True", "Failed=True"]
    bench.wait("its events", lambda: said_by_events(bench) == story)
