"""GRPOJobs in one namespace of a real cluster, as the end-to-end tests make, watch and break them.

With these verbs a test reads as what a user does.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .access import Access, CommandError
from .programs.patience import Patience

Object = dict[str, Any]
TIMEOUT = 240.0
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Jobs:
    """The GRPOJobs of one namespace; `checkpoints` is the folder behind the claim that they save
    to."""

    access: Access
    namespace: str
    template: Object
    checkpoints: Path

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """kubectl in this namespace."""
        return self.access.kubectl("--namespace", self.namespace, *arguments, input=stdin)

    def create(self, name: str, training: Object | None = None, **spec: Any) -> None:
        """Applies the template under another name, with parts of its spec replaced."""
        job = json.loads(json.dumps(self.template))
        job["metadata"] = {"name": name, "namespace": self.namespace}
        job["spec"] |= spec
        job["spec"]["training"] |= training or {}
        self.kubectl("apply", "--filename", "-", stdin=json.dumps(job))

    def get(self, name: str) -> Object:
        """The job as the API server has it."""
        result: Object = json.loads(self.kubectl("get", "grpojob", name, "--output", "json"))
        return result

    def step_lines(self, job: Object) -> list[Object]:
        """What rank 0 of the job's current attempt has logged by step."""
        pod = next(pod["name"] for pod in job["status"]["pods"] if pod["index"] == 0)
        return [
            json.loads(line)
            for line in self.kubectl("logs", pod).splitlines()
            if line.startswith("{") and '"totalSteps"' in line
        ]

    def list(self, kind: str, name: str) -> list[Object]:
        """Children of the kind that carry the job's label."""
        text = self.kubectl("get", kind, *selected(name), "--output", "json")
        items: list[Object] = json.loads(text)["items"]
        return items

    def wait(
        self, name: str, what: str, probe: Callable[[Object], Any], timeout: float = TIMEOUT
    ) -> Object:
        """Polls the job until the probe is true of it.

        Raises:
            AssertionError: the time is over; shows the status and the operator's log.
        """
        patience = Patience(timeout)
        job: Object = {}
        while not patience.is_over:
            try:
                job = self.get(name)
            except CommandError as error:  # the API server may be away on purpose
                if "NotFound" in error.stderr:
                    raise
            else:
                if probe(job):
                    return job
            time.sleep(POLL_SECONDS)
        raise AssertionError(
            f"{name} is not {what} after {timeout:.0f} s: {json.dumps(job.get('status'), indent=1)}"
        )

    def wait_step(self, name: str, step: int) -> Object:
        """Waits until the job has finished at least that many steps."""
        return self.wait(name, f"at step {step}", lambda job: progress(job)["step"] >= step)

    def wait_succeeded(self, name: str) -> Object:
        """Waits for success; a failure ends the wait at once."""
        job = self.wait(
            name, "ended", lambda job: is_true(job, "Succeeded") or is_true(job, "Failed")
        )
        assert is_true(job, "Succeeded"), json.dumps(job["status"], indent=1)
        return job

    def wait_pod_ready(self, name: str) -> None:
        """Waits until a pod is ready; `kubectl wait` would count a busy machine's seconds, too."""
        patience = Patience(TIMEOUT)
        pod: Object = {}
        while not is_true(pod, "Ready"):
            assert not patience.is_over, f"{name} is not ready: {json.dumps(pod.get('status'))}"
            time.sleep(POLL_SECONDS)
            pod = json.loads(self.kubectl("get", "pod", name, "--output", "json"))

    def wait_ended(self, name: str) -> int:
        """How many pods the job has once none runs and none is being deleted: then `kubectl logs
        job/…` finds logs.

        Of a failed gang, the Job controller deletes the ranks that still run, and their containers
        go first.
        """
        patience = Patience(TIMEOUT)
        pods = self.list("pods", name)
        while not all(map(_ended, pods)):
            assert not patience.is_over, f"pods of {name} have not ended after {TIMEOUT:.0f} s"
            time.sleep(POLL_SECONDS)
            pods = self.list("pods", name)
        return len(pods)


def _ended(pod: Object) -> bool:
    return (
        pod["status"]["phase"] in ("Succeeded", "Failed")
        and "deletionTimestamp" not in pod["metadata"]
    )


def selected(name: str) -> tuple[str, str]:
    """The flags that select a job's children."""
    return "--selector", f"grpo.dev/job-name={name}"


def condition(job: Object, kind: str) -> Object:
    """The condition of type `kind`; an empty object if the job does not have it."""
    conditions: list[Object] = job.get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind), {})


def is_true(job: Object, kind: str) -> bool:
    """Whether the condition is True."""
    return condition(job, kind).get("status") == "True"


def progress(job: Object) -> Object:
    """status.progress, with step 0 before there is any."""
    return {"step": 0, **job.get("status", {}).get("progress", {})}


def attempt(job: Object) -> int:
    """status.attempt, 0 before the first."""
    return int(job.get("status", {}).get("attempt", 0))
