"""What the operator's integration tests stand on: a namespace with pods that only pretend, and an
operator for it.

The API server, the Job controller and the scheduler are real while training is not: kwok moves the
pods, and a test ends them with the exit code and the termination message that it wants.
"""

import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

from grpo_api.text.contract import API_VERSION, KIND
from grpo_operator.records.names import LABEL_ATTEMPT, LABEL_JOB
from harness.client import ApiClient, ApiStatusError
from harness.cluster import Cluster
from harness.fixtures import AnyCluster
from harness.programs.processes import ClusterError, until
from tests.integration.operator_thread import SECONDS, OperatorThread, operating
from tests.integration.steered_time import SteeredClock

T = TypeVar("T")
Object = dict[str, Any]
MERGE = "application/merge-patch+json"
JOBS = "/apis/batch/v1/namespaces/{}/jobs"
GRPOJOBS = f"/apis/{API_VERSION}/namespaces/{{}}/grpojobs"
PODS = "/api/v1/namespaces/{}/pods"
LONGEST_PAUSE = 120.0
"""Seconds of an operator's clock. Less than a gang has to be bound, by default."""

SPEC: Object = {
    "model": {"name": "/models/tiny", "parameters": "77K"},
    "dataset": {"name": "x/y"},
    "rewards": [{"format": {"pattern": "a.*"}}],
    "placement": {"accelerator": "CPU", "nodes": 2},
    "export": {"to": "None"},
}


def outcome(result: str, **more: Any) -> str:
    """A termination message."""
    return json.dumps({"result": result, **more})


class Bench:
    """A namespace of its own, and what tests do in it."""

    def __init__(self, cluster: AnyCluster, client: ApiClient) -> None:
        """Creates the namespace."""
        self.cluster = cluster
        self.client = client
        self.clock = SteeredClock()
        """The time of this bench's operators, which a test moves on."""
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        client.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        until(
            "the service account",
            lambda: self.get("/api/v1/namespaces/{}/serviceaccounts", "default"),
            SECONDS,
        )

    def operating(self, **chosen: Any) -> AbstractContextManager[OperatorThread]:
        """An operator of this namespace, by this bench's clock, for the length of the block."""
        return operating(self.cluster, self.clock, **{"namespaces": (self.namespace,), **chosen})

    def get(self, path: str, name: str = "") -> Object:
        """An object, or a list; `{}` in the path is the namespace."""
        item: Object = self.client.get(path.format(self.namespace) + (f"/{name}" if name else ""))
        return item

    def exists(self, path: str, name: str) -> bool:
        """Whether the object is there."""
        try:
            self.get(path, name)
        except ApiStatusError as error:
            if error.status != 404:
                raise
            return False
        return True

    def post(self, path: str, body: Object) -> Object:
        """Creates an object."""
        created: Object = self.client.request("POST", path.format(self.namespace), body)
        return created

    def patch(self, path: str, name: str, body: Object) -> Object:
        """Merge-patches an object."""
        patched: Object = self.client.request(
            "PATCH", f"{path.format(self.namespace)}/{name}", body, MERGE
        )
        return patched

    def delete(self, path: str, name: str, **options: Any) -> None:
        """Deletes an object in the background."""
        body = {"propagationPolicy": "Background", **options}
        self.client.request("DELETE", f"{path.format(self.namespace)}/{name}", body)

    def submit(self, name: str = "run", **spec: Any) -> Object:
        """Creates a GRPOJob; keywords are fields of its spec."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {**SPEC, **spec},
        }
        return self.post(GRPOJOBS, body)

    def job(self, name: str = "run") -> Object:
        """The GRPOJob."""
        return self.get(GRPOJOBS, name)

    def status(self, name: str = "run") -> Object:
        """Its status; empty before the operator wrote it."""
        status: Object = self.job(name).get("status", {})
        return status

    def condition(self, kind: str, name: str = "run") -> tuple[str, str, str]:
        """Status, reason and message of a condition; empty before it was written."""
        for condition in self.status(name).get("conditions", []):
            if condition["type"] == kind:
                return condition["status"], condition["reason"], condition["message"]
        return "", "", ""

    def ends(self, name: str = "run") -> list[str]:
        """Why its attempts have ended, oldest first. It stays, while a condition may say so for a
        moment only."""
        return [end["reason"] for end in self.status(name).get("ends", [])]

    def children(self, name: str = "run") -> list[str]:
        """Names of its Jobs."""
        jobs = self.get(f"{JOBS}?labelSelector={LABEL_JOB}={name}")["items"]
        return sorted(item["metadata"]["name"] for item in jobs)

    def pods(self, name: str = "run", attempt: int = 1) -> list[Object]:
        """The pods of an attempt by index."""
        query = f"{PODS}?labelSelector={LABEL_JOB}={name},{LABEL_ATTEMPT}={attempt}"
        index = "batch.kubernetes.io/job-completion-index"
        pods: list[Object] = self.get(query)["items"]
        return sorted(pods, key=lambda pod: pod["metadata"]["labels"][index])

    def end(self, pod: Object, code: int = 0, message: str = "", reason: str = "") -> None:
        """Ends a running pod with an exit code and a termination message."""
        notes = {
            "kwok.test/after": "0s",
            "kwok.test/exit-code": str(code),
            "kwok.test/message": message,
        }
        if reason:
            notes["kwok.test/reason"] = reason
        self.patch(PODS, pod["metadata"]["name"], {"metadata": {"annotations": notes}})

    @contextmanager
    def kubelets_standing_still(self) -> Iterator[None]:
        """While the block runs no pod begins, ends or goes away: what it asks of several pods
        comes about at one moment, after it.

        The Job controller deletes the other pods of a gang a second after the first has failed.
        What these were to end with is never told then.
        """
        assert isinstance(self.cluster, Cluster)
        kubelets = self.cluster.processes.find("kwok")
        for kubelet in kubelets:
            os.kill(kubelet, signal.SIGSTOP)
        try:
            yield
        finally:
            for kubelet in kubelets:
                os.kill(kubelet, signal.SIGCONT)

    def wait(
        self,
        what: str,
        probe: Callable[[], T],
        seconds: float = SECONDS,
        *,
        hurry: bool = False,
    ) -> T:
        """Waits until the probe returns something true, and returns it.

        `hurry` moves the operators' clock on by a second after each look, for what they do only
        after a pause, and for no longer than the longest of these: others take real time for their
        part, and gangs have limits.
        """
        moves = int(LONGEST_PAUSE) if hurry else 0

        def look() -> T:
            nonlocal moves
            result = probe()
            if moves and not result:
                moves -= 1
                self.clock.advance(1.0)
            return result

        result: T = until(f"{what} in {self.namespace}", look, seconds)
        return result

    def wait_phase(self, phase: str, name: str = "run", *, hurry: bool = False) -> Object:
        """Waits for a phase and returns the status; `hurry` as for `wait`."""
        self.wait(
            f"{name} to be {phase}", lambda: self.status(name).get("phase") == phase, hurry=hurry
        )
        return self.status(name)

    def wait_running(
        self, name: str = "run", attempt: int = 1, *, hurry: bool = True
    ) -> list[Object]:
        """Waits until an attempt runs, and returns its pods; `hurry`: the clock moves over the
        pause before it."""

        def runs() -> bool:
            status = self.status(name)
            return status.get("phase") == "Running" and status.get("attempt") == attempt

        try:
            if attempt > 1 and hurry:
                # only until it is committed: a gang's start takes real time, for which it has a
                # limit
                made = partial(self._has_attempt, name, attempt)
                self.wait(f"attempt {attempt} of {name}", made, hurry=True)
            self.wait(f"attempt {attempt} of {name} to run", runs)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{json.dumps(self.status(name), indent=1)}") from error
        return self.pods(name, attempt)

    def _has_attempt(self, name: str, attempt: int) -> bool:
        return int(self.status(name).get("attempt", 0)) >= attempt
