"""What the operator's integration tests stand on: an operator in a thread, and a namespace with pods that only pretend.

The API server, the Job controller and the scheduler are real while training is not: kwok moves the pods, and a test
ends them with the exit code and the termination message that it wants. The operator runs in this process, so that its
coverage is measured; it has only its kubeconfig, as any other.
"""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from grpo_api.contract import API_VERSION, KIND
from grpo_operator.__main__ import run
from grpo_operator.cluster import api, client
from grpo_operator.names import LABEL_ATTEMPT, LABEL_JOB
from grpo_operator.pod_defaults import PodDefaults
from grpo_operator.settings import Settings
from harness.client import ApiClient, ApiStatusError
from harness.controlplane import free_port
from harness.fixtures import AnyCluster
from harness.programs.processes import ClusterError, until
from tests.integration.steered_time import SteeredClock

T = TypeVar("T")
Object = dict[str, Any]
MERGE = "application/merge-patch+json"
JOBS = "/apis/batch/v1/namespaces/{}/jobs"
GRPOJOBS = f"/apis/{API_VERSION}/namespaces/{{}}/grpojobs"
PODS = "/api/v1/namespaces/{}/pods"
SECONDS = 60.0
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


class OperatorThread:
    """An operator in a thread of this process."""

    def __init__(self, cluster: AnyCluster, clock: SteeredClock | None = None, **chosen: Any) -> None:
        """`clock` is its time; keywords are fields of Settings."""
        defaults = Settings(
            kubeconfig=str(cluster.kubeconfig),
            pods=PodDefaults(image="example/trainer:1"),
            metrics_address="127.0.0.1",
            metrics_port=free_port(),
            log_format="text",
        )
        self.settings = replace(defaults, **chosen)
        self.clock = clock or SteeredClock()
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self.clock.loop) as runner:
                runner.run(run(self.settings, self._stop, wall=self.clock.wall))
        except BaseException as error:
            self.error = error

    def begin(self) -> None:
        """Starts it."""
        self._thread.start()

    def start(self) -> "OperatorThread":
        """Starts it and waits until it is ready; raises what it failed with."""
        self.begin()
        until("the operator to be ready", self._ready, SECONDS)
        return self

    def _ready(self) -> bool:
        if self.error:
            raise self.error
        status, text = self.page("readyz")
        if status != 200:
            raise OSError(f"{status} {text}")
        return True

    def stop(self) -> None:
        """Ends it as SIGTERM would, and raises what it failed with."""
        self._stop.set()
        self._thread.join(SECONDS)
        if self.error:
            raise self.error

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of /healthz, /readyz or /metrics; status 0 while nothing listens."""
        url = f"http://127.0.0.1:{self.settings.metrics_port}/{name}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def requests(self) -> dict[tuple[str, str], int]:
        """Requests to the API server so far, by method and resource."""
        counts: dict[tuple[str, str], int] = {}
        for line in self.page("metrics")[1].splitlines():
            if line.startswith("rest_client_requests_total{"):
                labels, value = line.split("{")[1].split("} ")
                parts = dict(pair.split("=") for pair in labels.replace('"', "").split(","))
                key = (parts["method"], parts["resource"])
                counts[key] = counts.get(key, 0) + int(float(value))
        return counts

    def writes(self) -> int:
        """Requests that change something, so far."""
        return sum(count for (verb, _), count in self.requests().items() if verb in ("POST", "PATCH", "DELETE"))


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
        until("the service account", lambda: self.get("/api/v1/namespaces/{}/serviceaccounts", "default"), SECONDS)

    def operating(self, **chosen: Any) -> AbstractContextManager[OperatorThread]:
        """An operator of this namespace, by this bench's clock, for the length of the block."""
        return operating(self.cluster, self.clock, **{"namespaces": (self.namespace,), **chosen})

    def get(self, path: str, name: str = "") -> Object:
        """An object, or a list; `{}` in the path is the namespace."""
        found: Object = self.client.get(path.format(self.namespace) + (f"/{name}" if name else ""))
        return found

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
        found: Object = self.client.request("POST", path.format(self.namespace), body)
        return found

    def patch(self, path: str, name: str, body: Object) -> Object:
        """Merge-patches an object."""
        found: Object = self.client.request("PATCH", f"{path.format(self.namespace)}/{name}", body, MERGE)
        return found

    def delete(self, path: str, name: str, **options: Any) -> None:
        """Deletes an object in the background."""
        body = {"propagationPolicy": "Background", **options}
        self.client.request("DELETE", f"{path.format(self.namespace)}/{name}", body)

    def submit(self, name: str = "run", **spec: Any) -> Object:
        """Creates a GRPOJob; keywords are fields of its spec."""
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": {**SPEC, **spec}}
        return self.post(GRPOJOBS, body)

    def job(self, name: str = "run") -> Object:
        """The GRPOJob."""
        return self.get(GRPOJOBS, name)

    def status(self, name: str = "run") -> Object:
        """Its status; empty before the operator wrote it."""
        found: Object = self.job(name).get("status", {})
        return found

    def condition(self, kind: str, name: str = "run") -> tuple[str, str, str]:
        """Status, reason and message of a condition; empty before it was written."""
        for found in self.status(name).get("conditions", []):
            if found["type"] == kind:
                return found["status"], found["reason"], found["message"]
        return "", "", ""

    def children(self, name: str = "run") -> list[str]:
        """Names of its Jobs."""
        found = self.get(f"{JOBS}?labelSelector={LABEL_JOB}={name}")["items"]
        return sorted(item["metadata"]["name"] for item in found)

    def pods(self, name: str = "run", attempt: int = 1) -> list[Object]:
        """The pods of an attempt by index."""
        query = f"{PODS}?labelSelector={LABEL_JOB}={name},{LABEL_ATTEMPT}={attempt}"
        index = "batch.kubernetes.io/job-completion-index"
        found: list[Object] = self.get(query)["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["labels"][index])

    def end(self, pod: Object, code: int = 0, message: str = "", reason: str = "") -> None:
        """Ends a running pod with an exit code and a termination message."""
        notes = {"kwok.test/after": "0s", "kwok.test/exit-code": str(code), "kwok.test/message": message}
        if reason:
            notes["kwok.test/reason"] = reason
        self.patch(PODS, pod["metadata"]["name"], {"metadata": {"annotations": notes}})

    def wait(
        self,
        what: str,
        probe: Callable[[], T],
        seconds: float = SECONDS,
        *,
        hurry: bool = False,
    ) -> T:
        """Waits until the probe returns something true, and returns it.

        `hurry` moves the operators' clock on by a second after each look, for what they do only after a pause, and for
        no longer than the longest of these: others take real time for their part, and gangs have limits.
        """
        moves = int(LONGEST_PAUSE) if hurry else 0

        def look() -> T:
            nonlocal moves
            found = probe()
            if moves and not found:
                moves -= 1
                self.clock.advance(1.0)
            return found

        found: T = until(f"{what} in {self.namespace}", look, seconds)
        return found

    def wait_phase(self, phase: str, name: str = "run", *, hurry: bool = False) -> Object:
        """Waits for a phase and returns the status; `hurry` as for `wait`."""
        self.wait(f"{name} to be {phase}", lambda: self.status(name).get("phase") == phase, hurry=hurry)
        return self.status(name)

    def wait_running(self, name: str = "run", attempt: int = 1, *, hurry: bool = True) -> list[Object]:
        """Waits until an attempt runs, and returns its pods; `hurry`: the clock moves over the pause before it."""

        def runs() -> bool:
            status = self.status(name)
            return status.get("phase") == "Running" and status.get("attempt") == attempt

        try:
            if attempt > 1 and hurry:
                # only until it is committed: a gang's start takes real time, for which it has a limit
                made = partial(self._has_attempt, name, attempt)
                self.wait(f"attempt {attempt} of {name}", made, hurry=True)
            self.wait(f"attempt {attempt} of {name} to run", runs)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{json.dumps(self.status(name), indent=1)}") from error
        return self.pods(name, attempt)

    def _has_attempt(self, name: str, attempt: int) -> bool:
        return int(self.status(name).get("attempt", 0)) >= attempt


@contextmanager
def operating(cluster: AnyCluster, clock: SteeredClock | None = None, **chosen: Any) -> Iterator[OperatorThread]:
    """An operator for the length of the block."""
    operator = OperatorThread(cluster, clock, **chosen).start()
    try:
        yield operator
    finally:
        operator.stop()


def quiet_for(operator: OperatorThread, seconds: float) -> dict[tuple[str, str], int]:
    """Requests that the operator makes in that time of its clock, once it has told what happened before."""

    def told() -> bool:
        before = operator.writes()
        operator.clock.advance(2.0)
        time.sleep(0.5)  # events of others come late, in real time
        return operator.writes() == before

    until("the operator to have told everything", told, SECONDS)
    before = operator.requests()
    operator.clock.advance(seconds)
    time.sleep(0.5)
    after = operator.requests()
    return {key: count - before.get(key, 0) for key, count in after.items() if count != before.get(key, 0)}


class Swallowed(threading.Event):
    """Makes the operator hang at the moment when it would POST a Job, as if it died there."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        create = client.HttpCluster.create

        async def hang(cluster: client.HttpCluster, resource: api.Resource, namespace: str, body: Object) -> Object:
            if resource is api.JOBS:
                self.set()
                await asyncio.Event().wait()
            return await create(cluster, resource, namespace, body)

        monkeypatch.setattr(client.HttpCluster, "create", hang)
