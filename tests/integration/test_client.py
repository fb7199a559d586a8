"""The Python client against a real API server."""

import shlex
from typing import Any

import pytest

from grpo.client import GRPOClient, GRPOError, Kubernetes
from harness.programs.build import component
from tests.integration.operator_bench import GRPOJOBS, SPEC, Bench
from tests.samples import job


@pytest.fixture
def client(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> GRPOClient:
    """For the bench's namespace, in which no operator runs."""
    monkeypatch.setenv("KUBECTL", shlex.join(map(str, component("kubectl"))))
    monkeypatch.setenv("KUBECONFIG", str(bench.cluster.kubeconfig))
    return GRPOClient(Kubernetes(namespace=bench.namespace))


def spec_of(bench: Bench) -> dict[str, Any]:
    """What the API server has of the job's spec."""
    spec: dict[str, Any] = bench.job("tiny")["spec"]
    return spec


def test_a_job_is_created_patched_watched_and_deleted(client: GRPOClient, bench: Bench) -> None:
    assert client.train(job("tiny", SPEC)) == "tiny"
    (listed,) = client.list_jobs()
    assert (listed.name, listed.namespace, listed.phase) == ("tiny", bench.namespace, "Pending")
    client.suspend("tiny")
    assert spec_of(bench)["suspend"] is True
    client.resume("tiny")
    with pytest.raises(GRPOError, match="tiny is Pending; only a job that has failed"):
        client.retry("tiny")
    failed = {"phase": "Failed", "observedGeneration": 1, "retry": 4}
    bench.patch(GRPOJOBS, "tiny/status", {"status": failed})
    client.retry("tiny")
    assert (spec_of(bench)["suspend"], spec_of(bench)["retry"]) == (False, 5)
    status = {"phase": "Succeeded", "observedGeneration": 1}
    bench.patch(GRPOJOBS, "tiny/status", {"status": status})
    assert client.wait_for_job_status("tiny").spec.retry == 5
    own_uid = bench.job("tiny")["metadata"]["uid"]
    # the first one was a job of the same name, which is deleted
    for uid, reason in (("gone", "Preempted"), (own_uid, "Hang")):
        about = {"kind": "GRPOJob", "name": "tiny", "namespace": bench.namespace, "uid": uid}
        event = {
            "metadata": {"name": f"tiny.{reason.lower()}"},
            "involvedObject": about,
            "type": "Warning",
            "reason": reason,
            "message": "rank 1 is silent",
            "lastTimestamp": "2026-01-31T12:00:00Z",
        }
        bench.post("/api/v1/namespaces/{}/events", event)
    assert client.get_job_events("tiny") == [
        ("Warning", "Hang", "rank 1 is silent", "2026-01-31T12:00:00Z")
    ]
    with pytest.raises(GRPOError, match="no pod of attempt 1 on node 0"):
        list(client.get_job_logs("tiny"))
    with pytest.raises(GRPOError, match="tiny kept no model"):
        client.export("tiny", "/nowhere")
    client.delete_job("tiny")
    with pytest.raises(GRPOError, match='"tiny" not found'):
        client.get_job("tiny")
