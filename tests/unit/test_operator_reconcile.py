"""One reconcile of a GRPOJob: what it asks of the API server, in which order, and when the next one
is due."""

import pytest

from grpo_kube.objects.errors import Conflict, Unavailable
from grpo_kube.objects.resources import CLAIMS, JOBS, PODS
from grpo_operator.records.names import GRPOJOBS
from tests.unit.operator_world import (
    SERVED_GPU_PLAN,
    active_status,
    at,
    child_object,
    condition,
    make_pull,
    pod_object,
    said,
    terminated,
)
from tests.unit.reconcile_world import Cluster

STATUS = "PATCH grpojobs/status run"


async def test_a_new_job_is_committed_before_it_is_started() -> None:
    cluster = Cluster()
    assert await cluster.reconcile() == 5.0, "when the pods of the new Job must be there"
    assert cluster.requests == [STATUS, "POST services grpo-rendezvous", "POST jobs run-1"]
    assert cluster.job["status"]["attempt"] == 1


async def test_a_job_whose_watch_is_late_is_committed_and_started_once() -> None:
    cluster = Cluster()
    cluster.watch_is_late = True
    await cluster.reconcile()
    await cluster.reconcile()
    assert cluster.requests == [STATUS, "POST services grpo-rendezvous", "POST jobs run-1"]
    assert cluster.job["status"]["attempt"] == 1


async def test_the_status_after_the_start_waits_for_company() -> None:
    cluster = Cluster()
    await cluster.reconcile()
    cluster.requests.clear()
    await cluster.reconcile()
    assert cluster.requests == []


async def test_a_job_that_changed_since_it_was_read_is_not_committed() -> None:
    cluster = Cluster()
    cluster.watch_is_late = True
    cluster.suspend()
    with pytest.raises(Conflict):
        await cluster.reconcile()
    assert cluster.requests == [STATUS, "GET grpojobs run"]
    await cluster.reconcile()
    assert cluster.requests[2:] == [STATUS]
    assert cluster.job["status"]["phase"] == "Suspended"


async def test_a_suspension_that_comes_while_the_commit_is_answered_starts_no_gang() -> None:
    cluster = Cluster()
    cluster.before_answer = cluster.suspend
    await cluster.reconcile()
    assert "POST jobs run-1" not in cluster.requests
    assert cluster.job["status"]["phase"] == "Suspended"


async def test_a_job_that_is_deleted_while_its_commit_is_answered_is_not_started() -> None:
    cluster = Cluster()
    cluster.before_answer = cluster.remove_job
    with pytest.raises(Conflict):
        await cluster.reconcile()
    assert "POST jobs run-1" not in cluster.requests


async def test_a_job_that_is_gone_at_its_commit_is_looked_at_again_and_forgotten() -> None:
    """The event of its deletion may have been missed."""
    cluster = Cluster()
    cluster.watch_is_late = True
    cluster.remove_job()
    with pytest.raises(Conflict):
        await cluster.reconcile()
    assert cluster.requests == [STATUS, "GET grpojobs run"]
    assert await cluster.reconcile() is None
    assert cluster.requests == [STATUS, "GET grpojobs run"]


async def test_a_claim_for_many_nodes_of_a_disk_is_named_before_any_pod_waits_for_it() -> None:
    cluster = Cluster({"checkpoint": {"volume": {"claimName": "data"}}})
    cluster.storage_classes = {"gp3": ("gp3", "ebs.csi.aws.com")}
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "gp3"}
    claim = {"metadata": {"name": "data", "namespace": "team-a"}, "spec": spec}
    cluster.store(CLAIMS, claim | {"status": {"phase": "Pending"}})
    await cluster.reconcile()
    assert cluster.requests == [
        STATUS,
        "POST services grpo-rendezvous",
        "GET persistentvolumeclaims data",
    ]
    cluster.store(CLAIMS, claim | {"status": {"phase": "Bound"}})
    await cluster.reconcile()
    assert cluster.requests[-1] == "POST jobs run-1"


async def test_a_job_whose_time_to_live_is_over_is_deleted_and_nothing_else_is_written() -> None:
    ended = {"completionTime": at(-10), "conditions": [condition("Succeeded")]}
    cluster = Cluster({"ttlSecondsAfterFinished": 5}, ended)
    assert await cluster.reconcile() is None
    assert cluster.requests == ["DELETE grpojobs run"]


async def test_the_end_of_a_job_that_is_deleted_at_once_is_told_although_its_answer_was_lost() -> (
    None
):
    cluster = Cluster({"ttlSecondsAfterFinished": 0}, active_status())
    cluster.store(JOBS, child_object())
    for index in range(2):
        cluster.store(PODS, pod_object(index, state=terminated(0, said("Succeeded"))))

    def lose() -> None:
        raise Unavailable("no answer")

    cluster.before_answer = lose
    with pytest.raises(Unavailable):
        await cluster.reconcile()
    await cluster.reconcile()
    assert cluster.requests[-1] == "DELETE grpojobs run"
    assert [status.phase for status in cluster.published] == ["Succeeded"]


async def test_engines_follow_their_gang_in_the_same_reconcile_where_they_need_no_nodes_of_others() -> (  # noqa: E501
    None
):
    status = active_status(plan=SERVED_GPU_PLAN, running=False, jobUid=None)
    placement = {"accelerator": "GPU", "provisioning": "CreatePods", "gpusPerNode": 4}
    product = {"gpuProduct": "NVIDIA-H100-80GB-HBM3", "nodeSelector": {"pool": "h100"}}
    cluster = Cluster({"placement": placement | product}, status)
    await cluster.reconcile()
    jobs = [request for request in cluster.requests if " jobs " in request]
    assert jobs == ["POST jobs run-1", "POST jobs run-1-engine"]


async def test_a_job_that_was_suspended_loses_its_gang_after_the_status_says_so() -> None:
    cluster = Cluster({"suspend": True}, active_status())
    cluster.store(JOBS, child_object())
    assert await cluster.reconcile() is None
    assert cluster.requests[-2:] == [STATUS, "DELETE jobs run-1"]


@pytest.mark.parametrize(("attempt", "step"), [(1, 0), (2, 7)])
async def test_progress_is_that_of_the_current_attempt(attempt: int, step: int) -> None:
    cluster = Cluster(status=active_status(attempt=2))
    cluster.store(JOBS, child_object(attempt=2))
    for index in range(2):
        cluster.store(PODS, pod_object(index, attempt=2))
    # The answer of the first attempt's rank 0 is kept until the puller next looks at the pods.
    cluster.rank0.answer = make_pull(attempt=attempt, step=7)
    await cluster.reconcile()
    assert cluster.requests[-1] == STATUS
    assert cluster.job["status"]["progress"]["step"] == step


async def test_a_job_that_ends_before_its_pods_are_watched_is_judged_by_their_ends() -> None:
    cluster = Cluster(status=active_status())
    cluster.store(JOBS, child_object(ended="Failed", reason="BackoffLimitExceeded"))
    cluster.watch_is_late = True
    cluster.store(PODS, pod_object(state=terminated(139)))
    await cluster.reconcile()
    assert cluster.job["status"]["restarts"] == 1
    (end,) = cluster.job["status"]["ends"]
    assert (end["reason"], end["counted"]) == ("Error", True)


def held_and_deleted(*finalizers: str) -> Cluster:
    """A running job that was deleted, and that finalizers keep."""
    cluster = Cluster(status=active_status())
    cluster.store(JOBS, child_object())
    for index in range(2):
        cluster.store(PODS, pod_object(index))
    deleted = {"deletionTimestamp": at(0), "finalizers": list(finalizers)}
    cluster.store(GRPOJOBS, {**cluster.job, "metadata": {**cluster.job["metadata"], **deleted}})
    cluster.requests.clear()
    return cluster


async def test_a_deleted_job_that_a_finalizer_keeps_ends_its_gang_and_writes_nothing_else() -> None:
    cluster = held_and_deleted("example.com/archive")
    assert await cluster.reconcile() is None
    assert cluster.requests[0] == "DELETE jobs run-1"
    assert all(request.startswith("DELETE") for request in cluster.requests)


async def test_a_job_that_is_deleted_with_cascade_orphan_keeps_its_pods() -> None:
    cluster = held_and_deleted("orphan")
    await cluster.reconcile()
    assert cluster.requests == []


async def test_a_gang_of_a_later_attempt_than_a_restored_status_knows_is_ended() -> None:
    cluster = Cluster(status=active_status(attempt=1))
    cluster.store(JOBS, child_object(attempt=3))
    await cluster.reconcile()
    assert cluster.requests[-1] == "DELETE jobs run-3"
    assert "POST jobs run-4" in cluster.requests, "a name and a number that nobody has had"


async def test_an_attempt_whose_number_pods_have_already_ends_once() -> None:
    """Of a restored status: the Job that made these pods is gone."""
    ran = [condition("Admitted"), condition("Running", since=-700)]
    cluster = Cluster(status=active_status(attempt=1, conditions=ran))
    cluster.store(JOBS, child_object(attempt=1, ended="Failed"))
    cluster.store(PODS, pod_object(attempt=1, state=terminated(139)))
    cluster.store(PODS, pod_object(attempt=2, by=""))
    assert await cluster.reconcile() == 0.0
    await cluster.reconcile()
    assert "POST jobs run-3" in cluster.requests
    ends = [(end["attempt"], end["counted"]) for end in cluster.job["status"]["ends"]]
    assert ends == [(1, True), (2, False)]


async def test_a_gang_of_which_the_watch_does_not_know_yet_is_not_ended() -> None:
    cluster = Cluster(status=active_status(attempt=2))
    cluster.store(JOBS, child_object(attempt=2))
    cluster.store(JOBS, child_object(attempt=3))
    cluster.watch_is_late = True
    cluster.store(GRPOJOBS, {**cluster.job, "status": active_status(attempt=3)})
    with pytest.raises(Conflict):
        await cluster.reconcile()
    await cluster.reconcile()
    assert "DELETE jobs run-3" not in cluster.requests
