"""Mistakes in jobs on GPUs, found by a real pod with the trainer's image before any GPU is held.

The nodes' GPUs exist only in the API; the preflight, its volumes and what the kubelet says are
real. Each test prints how long the right sentence took.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.jobs import Jobs, Object, condition

ON_GPUS: Object = {"gpus": {"min": 1, "max": 1}, "nodes": 1}


@pytest.fixture(autouse=True)
def room(jobs: Jobs) -> Iterator[None]:
    """Leaves no job behind: the next test needs the machine."""
    yield
    jobs.kubectl("delete", "grpojobs", "--all")
    jobs.kubectl(
        "wait", "--for=delete", "pods", "--timeout", "120s", "--selector", "grpo.dev/job-name"
    )


def refused(jobs: Jobs, name: str, reason: str, sentence: str, **spec: Any) -> Object:
    """Creates a job on GPUs and waits for the reason and the sentence of Checked; no GPU was
    held."""
    begin = time.monotonic()
    jobs.create(name, placement=ON_GPUS, resources={}, **spec)

    def is_told(job: Object) -> bool:
        checked = condition(job, "Checked")
        return checked.get("reason") == reason and sentence in checked["message"]

    job = jobs.wait(name, f"{reason}: {sentence}", is_told)
    print(f"{name}: {reason} after {time.monotonic() - begin:.1f} s, 0 GPU-seconds")
    assert job["status"].get("attempt", 0) == 0
    assert job["status"].get("usage", {}).get("attempts", []) == []
    return job


def test_mistakes_fail_a_job_together_before_it_holds_a_gpu(jobs: Jobs) -> None:
    dataset = {**jobs.template["spec"]["dataset"], "promptColumn": "promt"}
    reward = {"python": {"function": "no_such_module:score"}}
    job = refused(jobs, "typos", "PreflightFailed", "promt", dataset=dataset, rewards=[reward])
    assert "no_such_module" in json.dumps(job["status"]["preflight"]["report"]["problems"])
    failed = jobs.wait("typos", "failed", lambda job: condition(job, "Failed").get("reason"))
    assert condition(failed, "Failed")["reason"] == "BadInput"
    assert failed["status"]["outcome"]["result"] == "BadInput"


@pytest.mark.slow
def test_a_missing_secret_is_named_and_waited_for(jobs: Jobs) -> None:
    model = {
        **jobs.template["spec"]["model"],
        "tokenSecretRef": {"name": "no-such-secret", "key": "token"},
    }
    refused(jobs, "secretless", "PreflightBlocked", "no-such-secret", model=model)
    jobs.wait(
        "secretless",
        "out of its place in the queue",
        lambda job: condition(job, "Admitted").get("reason") == "PreflightBlocked",
    )


@pytest.mark.slow
def test_a_hub_that_can_t_be_reached_is_named_and_waited_for(jobs: Jobs) -> None:
    model = {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"}
    nobody = [{"name": "HF_ENDPOINT", "value": "http://127.0.0.1:9"}]
    job = refused(jobs, "hubless", "WaitingForHub", "127.0.0.1", model=model, env=nobody)
    assert job["status"]["phase"] == "Queued"
