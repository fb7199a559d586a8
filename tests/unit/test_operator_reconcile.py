"""One reconcile of a GRPOJob: what it asks of the API server, in which order, and when the next one is due."""

import pytest

from grpo_kube.objects.errors import Conflict
from grpo_kube.objects.resources import JOBS
from tests.unit.operator_world import SERVED_GPU_PLAN, active_status, at, child_object, condition
from tests.unit.reconcile_world import Cluster

STATUS = "PATCH grpojobs/status run"


async def test_a_new_job_is_committed_before_it_is_started() -> None:
    cluster = Cluster()
    assert await cluster.reconcile() == 5.0, "when the pods of the new Job must be there"
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
    cluster.suspend(is_watched=False)
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
    await cluster.reconcile()
    assert "POST jobs run-1" not in cluster.requests


async def test_a_job_whose_time_to_live_is_over_is_deleted_and_nothing_else_is_written() -> None:
    ended = {"completionTime": at(-10), "conditions": [condition("Succeeded")]}
    cluster = Cluster({"ttlSecondsAfterFinished": 5}, ended)
    assert await cluster.reconcile() is None
    assert cluster.requests == ["DELETE grpojobs run"]


async def test_engines_follow_their_gang_in_the_same_reconcile_where_they_need_no_nodes_of_others() -> None:
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
