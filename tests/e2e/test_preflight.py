"""Mistakes in jobs on GPUs, found by a real pod with the trainer's image before any GPU is held.

The nodes' GPUs exist only in the API; the preflight, its volumes and what the kubelet says are
real. Each test prints how long the right sentence took.
"""

import json
import shutil
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


def reward(function: str, config_map: str) -> Object:
    """A reward function in the module `rewards` of a ConfigMap."""
    return {"python": {"function": f"rewards:{function}", "configMap": {"name": config_map}}}


def in_claim(folder: str) -> Object:
    """A model in a folder of the first job's claim."""
    return {"name": f"/models/{folder}", "parameters": "77K", "volume": {"claimName": "first-job"}}


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


ROOT_FOLDERS = {"no-weights": 0o755, "locked": 0o555}
"""Folders of the claim, with their modes; the pods' user is not root."""
RAISING = "def score(completions, **_):\n    raise ValueError('no such unit: furlong')\n"
SAVED = {"claimName": "first-job", "subPath": "checkpoints"}
MISTAKES: dict[str, tuple[str, Object]] = {
    "claim": ("no-such-claim", {"checkpoint": {"volume": {"claimName": "no-such-claim"}}}),
    "map": ("no-such-map", {"rewards": [reward("score", "no-such-map")]}),
    "account": (
        "no-such-account",
        {"podTemplate": {"spec": {"serviceAccountName": "no-such-account"}}},
    ),
    "priority": ("no-such-class", {"placement": {**ON_GPUS, "priorityClassName": "no-such-class"}}),
    "image": ("nowhere.invalid/none:1", {"image": "nowhere.invalid/none:1"}),
    "function": ("misspelt", {"rewards": [reward("misspelt", "rewards")]}),
    "raises": ("no such unit: furlong", {"rewards": [reward("score", "rewards")]}),
    "weights": ("safetensors", {"model": in_claim("no-weights")}),
    "locked": ("can't be written", {"checkpoint": {"volume": {**SAVED, "subPath": "locked"}}}),
}
"""By name, what a sentence must quote, and the part of the spec that is wrong."""


@pytest.fixture(scope="module")
def wrong_inputs(jobs: Jobs) -> None:
    """What the mistakes refer to: folders of the claim, and a ConfigMap."""
    volume = jobs.checkpoints.parent
    for name, mode in ROOT_FOLDERS.items():
        folder = volume / name
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    shutil.copy(volume / "model" / "config.json", volume / "no-weights")
    jobs.kubectl("create", "configmap", "rewards", f"--from-literal=rewards.py={RAISING}")


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_inputs")
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_named_before_a_gpu_is_held(jobs: Jobs, name: str) -> None:
    words, spec = MISTAKES[name]
    begin = time.monotonic()
    jobs.create(f"wrong-{name}", **{"placement": ON_GPUS, "resources": {}, **spec})

    def names_it(job: Object) -> bool:
        conditions = job.get("status", {}).get("conditions", [])
        return any(words in condition["message"] for condition in conditions)

    job = jobs.wait(f"wrong-{name}", f"told of {words}", names_it)
    told = job["status"].get("reason")
    print(f"{name}: {told} after {time.monotonic() - begin:.1f} s, 0 GPU-seconds")
    assert told
    assert job["status"].get("attempt", 0) == 0
