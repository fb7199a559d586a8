"""What may go wrong around the operator: it dies between two steps, misses events, loses the API
server.

The claim of the design is that nothing is lost and nothing happens twice. A crash between commit
and start is made by an API that swallows the start; everything else is real.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kopf
import pytest

from grpo_kube.cache import Cache
from grpo_kube.client import Client
from grpo_kube.objects import resources
from grpo_kube.objects.resources import Object, ObjectKey, Resource
from grpo_operator.decide.decisions import Limits
from harness.cluster import Cluster
from harness.controlplane import free_port
from harness.programs.patience import run_to_end, wait_for_event, wait_for_exit
from tests.generated import gated
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, Bench, outcome
from tests.integration.operator_thread import Swallowed, operating

ROOT = Path(__file__).parents[2]


def test_an_operator_that_dies_between_commit_and_start_starts_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    swallowed = Swallowed()
    with monkeypatch.context() as patched:
        swallowed.patch(patched)
        with bench.operating():
            bench.submit()
            assert wait_for_event(swallowed, 30)
    assert bench.status()["attempt"] == 1
    assert bench.children() == []
    with bench.operating():
        bench.wait_running()
    assert bench.children() == ["run-1"]


def test_orphans_of_a_start_that_was_not_recorded_end_before_the_next_attempt(
    bench: Bench,
) -> None:
    with bench.operating():
        bench.submit()
        bench.wait_running()
    bench.patch(GRPOJOBS, "run/status", {"status": {"jobUid": None}})
    bench.delete(JOBS, "run-1", propagationPolicy="Orphan")
    bench.wait("no Job", lambda: bench.children() == [])
    with bench.operating():
        bench.wait_running(attempt=2)
        bench.wait(
            "no orphan",
            lambda: all(pod["status"]["phase"] != "Running" for pod in bench.pods(attempt=1)),
        )
    assert bench.status()["restarts"] == 0


def test_a_job_deleted_before_its_creation_is_answered_is_not_made_again_under_its_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, discard, uids, heard = Client.create, Cache.discard, list[str](), asyncio.Event()

    async def late(cluster: Client, resource: Resource, namespace: str, body: Object) -> Object:
        answer = await create(cluster, resource, namespace, body)
        if resource is not resources.JOBS or uids:
            return answer
        uids.append(answer["metadata"]["uid"])
        # by another, who doesn't ask whether the Job controller has written meanwhile
        await asyncio.to_thread(bench.delete, JOBS, answer["metadata"]["name"])
        await heard.wait()
        return answer

    def told(cache: Cache[Any], key: ObjectKey, uid: str, *version: float) -> Any:
        if uid in uids:
            heard.set()
        return discard(cache, key, uid, *version)

    monkeypatch.setattr(Client, "create", late)
    monkeypatch.setattr(Cache, "discard", told)
    with bench.operating():
        bench.submit()
        bench.wait_running(attempt=2)
    assert bench.children() == ["run-2"]
    assert [end["reason"] for end in bench.status()["ends"]] == ["Preempted"]


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes operators that begin from now on miss all events of GRPOJobs, those of their own writes
    too."""

    async def unheard(**_: Any) -> None:
        pass

    def stop_listening() -> None:
        on_event = kopf.on.event
        monkeypatch.setattr(
            kopf.on, "event", lambda *args, **kwargs: lambda _: on_event(*args, **kwargs)(unheard)
        )

    return stop_listening


def test_survivors_of_a_success_end_although_no_event_of_the_job_is_heard(
    bench: Bench, deaf: Callable[[], None]
) -> None:
    with bench.operating():
        bench.submit()
        done, survivor = bench.wait_running()
    bench.end(done, message=outcome("Succeeded"))
    bench.wait("the Job's status", lambda: bench.get(JOBS, "run-1")["status"].get("succeeded") == 1)
    deaf()
    with bench.operating():
        bench.wait_phase("Succeeded")
        name = survivor["metadata"]["name"]
        gone = partial(is_gone, bench, name)
        bench.wait("no survivor", gone, hurry=True)


def test_what_gives_its_place_back_starts_again_although_no_event_of_the_job_is_heard(
    bench: Bench, deaf: Callable[[], None]
) -> None:
    container = {"name": "c", "image": "x"}
    strangers = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    bench.post(
        JOBS, {"metadata": {"name": "run-1"}, "spec": {"suspend": True, "template": strangers}}
    )
    with bench.operating():
        bench.submit()
        bench.wait("the reason", lambda: bench.condition("Scheduled")[1] == "NameTaken", hurry=True)
    deaf()
    bench.clock.advance(Limits().scheduling_timeout_seconds)
    with bench.operating():
        bench.wait("the next attempt", lambda: bench.status()["attempt"] > 1, hurry=True)
    assert bench.status()["ends"][0]["reason"] == "SchedulingTimeout"


def is_gone(bench: Bench, pod: str) -> bool:
    """Whether a pod was deleted, or is about to be."""
    return not bench.exists(PODS, pod) or "deletionTimestamp" in bench.get(PODS, pod)["metadata"]


def test_what_a_quota_forbids_is_told_and_tried_again(bench: Bench) -> None:
    quotas = "/api/v1/namespaces/{}/resourcequotas"
    bench.post(quotas, {"metadata": {"name": "none"}, "spec": {"hard": {"count/jobs.batch": "0"}}})
    bench.wait("the quota", lambda: "used" in bench.get(quotas, "none").get("status", {}))
    with bench.operating():
        bench.submit()
        bench.wait(
            "the reason", lambda: bench.condition("Scheduled")[1] == "FailedCreate", hurry=True
        )
        status, _, message = bench.condition("Scheduled")
        assert status == "False"
        assert "exceeded quota: none" in message
        bench.delete(quotas, "none")
        bench.patch(GRPOJOBS, "run", {"metadata": {"annotations": {"look": "again"}}})
        bench.wait_running()
    assert bench.status()["attempt"] == 1


def test_an_operator_that_dies_after_the_start_takes_its_job_up_again(bench: Bench) -> None:
    with bench.operating(status_interval=3600.0):
        bench.submit()
        bench.wait("the Job", lambda: bench.children() == ["run-1"])
    uid = bench.get(JOBS, "run-1")["metadata"]["uid"]
    with bench.operating():
        bench.wait_running()
        bench.wait("the Job's uid", lambda: bench.status().get("jobUid") == uid)
    assert bench.status()["attempt"] == 1


def test_what_happened_while_the_operator_was_away_is_answered_when_it_is_back(
    bench: Bench,
) -> None:
    with bench.operating():
        for name in ("ends", "fails", "loses", "goes"):
            bench.submit(name)
        pods = {name: bench.wait_running(name) for name in ("ends", "fails", "loses", "goes")}
    bench.end(pods["ends"][0], message=outcome("Succeeded", step=3))
    bench.end(pods["fails"][1], 137, reason="OOMKilled")
    bench.delete(JOBS, "loses-1")
    bench.delete(GRPOJOBS, "goes")
    bench.wait("the failure", lambda: bench.get(JOBS, "fails-1")["status"].get("failed"))
    with bench.operating():
        bench.wait_phase("Succeeded", "ends")
        bench.wait_running("fails", 2)
        bench.wait_running("loses", 2)
        bench.wait("no child of the deleted job", lambda: not bench.children("goes"))
    assert bench.status("fails")["restarts"] == 1
    assert bench.status("loses")["restarts"] == 0


def test_a_list_heals_what_the_watch_did_not_tell(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any) -> Any:
        await asyncio.sleep(1)
        nothing: tuple[str, Object]
        for nothing in ():
            yield nothing

    monkeypatch.setattr(Client, "watch", silent)
    with bench.operating(resync=1.5):
        bench.submit()
        bench.wait_running()
        bench.delete(JOBS, "run-1")
        bench.wait_running(attempt=2)
        bench.end(bench.pods(attempt=2)[0], message=outcome("Succeeded"))
        bench.wait_phase("Succeeded")


def test_the_api_server_may_go_away_for_a_while(
    bench: Bench, grpo_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with bench.operating() as operator:
        bench.submit()
        bench.wait_running()
        grpo_cluster.stop_apiserver()
        bench.clock.advance(30.0)
        assert operator.page("healthz")[0] == 200
        grpo_cluster.start_apiserver()
        pods = bench.wait("the pods", bench.pods)
        bench.end(pods[1], 137, reason="OOMKilled")
        bench.wait_running(attempt=2)
        assert operator.error is None
    assert bench.children() == ["run-1", "run-2"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_status_that_somebody_else_changed_is_read_again(bench: Bench) -> None:
    with bench.operating():
        for name in ("a", "b", "c"):
            bench.submit(name)
            for number in range(5):
                bench.patch(GRPOJOBS, name, {"metadata": {"annotations": {"touched": str(number)}}})
        for name in ("a", "b", "c"):
            bench.wait_running(name)
            assert bench.children(name) == [f"{name}-1"]


@pytest.mark.parametrize("scope", gated(["cluster", "namespace"]))
def test_the_process_watches_what_it_is_told_to_and_ends_cleanly_on_sigterm(
    bench: Bench, grpo_cluster: Cluster, tmp_path: Path, scope: str
) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "grpo_operator", "--kubeconfig", str(grpo_cluster.kubeconfig)]
    command += [
        "--trainer-image",
        "example/trainer:1",
        "--metrics-address",
        "127.0.0.1",
        "--metrics-port",
        str(port),
    ]
    command += ["--namespace", bench.namespace] if scope == "namespace" else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "operator")}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stderr=output)
    try:
        bench.submit()
        bench.wait_running()
        process.send_signal(signal.SIGTERM)
        ended = wait_for_exit(process, 60)
    finally:
        process.kill()
        process.wait()
    assert ended == 0
    text = log.read_text()
    assert '"message": "stopped"' in text
    assert "Traceback" not in text
    assert all(line.startswith("{") for line in text.splitlines())


def test_a_taken_port_ends_the_process_with_a_sentence(grpo_cluster: Cluster) -> None:
    with operating(grpo_cluster, namespaces=("default",)) as operator:
        port = str(operator.settings.metrics_port)
        command = [
            sys.executable,
            "-m",
            "grpo_operator",
            "--kubeconfig",
            str(grpo_cluster.kubeconfig),
        ]
        command += [
            "--metrics-address",
            "127.0.0.1",
            "--metrics-port",
            port,
            "--namespace",
            "default",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "operator")}
        done = run_to_end(command, 60, env=environment)
    assert done.returncode == 2
    assert f"--metrics-port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lost_node_moves_the_gang_without_counting(bench: Bench) -> None:
    with bench.operating():
        bench.submit()
        pod = bench.wait_running()[1]
        target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        bench.patch(
            f"{PODS}", f"{pod['metadata']['name']}/status", {"status": {"conditions": [target]}}
        )
        bench.delete(PODS, pod["metadata"]["name"])
        bench.wait_running(attempt=2)
    assert bench.status()["restarts"] == 0
