"""An operator in a thread of the tests' process, which measures its coverage, by a clock that the
test moves on."""

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from grpo_api.report.metrics import ACTIVE_WORKERS, QUEUE_DEPTH
from grpo_kube import client
from grpo_kube.objects import resources
from grpo_operator.__main__ import run
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.process.settings import Settings
from harness.controlplane import free_port
from harness.fixtures import AnyCluster
from harness.programs.patience import rest
from harness.programs.processes import until
from tests.integration.steered_time import SteeredClock

Object = dict[str, Any]
SECONDS = 60.0


class OperatorThread:
    """An operator in a thread of this process."""

    def __init__(
        self, cluster: AnyCluster, clock: SteeredClock | None = None, **chosen: Any
    ) -> None:
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
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def requests(self, code: str = "") -> dict[tuple[str, str], int]:
        """Requests to the API server so far, by method and resource; `code`: those with this
        answer alone."""
        counts: dict[tuple[str, str], int] = {}
        for line in self.page("metrics")[1].splitlines():
            if line.startswith("rest_client_requests_total{"):
                labels, value = line.split("{")[1].split("} ")
                parts = dict(pair.split("=") for pair in labels.replace('"', "").split(","))
                key = (parts["method"], parts["resource"])
                if code and parts["code"] != code:
                    continue
                counts[key] = counts.get(key, 0) + int(float(value))
        return counts

    def writes(self) -> int:
        """Requests that change something, so far."""
        return sum(
            count
            for (verb, _), count in self.requests().items()
            if verb in ("POST", "PATCH", "DELETE")
        )

    def is_idle(self) -> bool:
        """Whether no job is reconciled or waits for it: then each answer that a reconcile waited
        for has been counted."""
        names = (ACTIVE_WORKERS.name, QUEUE_DEPTH.name)
        lines = [line.partition("{") for line in self.page("metrics")[1].splitlines()]
        values = [float(sample.split()[-1]) for name, _, sample in lines if name in names]
        return values == [0.0] * len(names)


@contextmanager
def operating(
    cluster: AnyCluster, clock: SteeredClock | None = None, **chosen: Any
) -> Iterator[OperatorThread]:
    """An operator for the length of the block."""
    operator = OperatorThread(cluster, clock, **chosen).start()
    try:
        yield operator
    finally:
        operator.stop()


def quiet_for(operator: OperatorThread, seconds: float) -> dict[tuple[str, str], int]:
    """Requests that the operator makes in that time of its clock, once it has told what happened
    before."""

    def told() -> bool:
        before = operator.writes()
        operator.clock.advance(2.0)
        rest(0.5)  # events of others come late, in real time
        return operator.is_idle() and operator.writes() == before

    until("the operator to have told everything", told, SECONDS)
    before = operator.requests()
    operator.clock.advance(seconds)
    rest(0.5)
    after = operator.requests()
    return {
        key: count - before.get(key, 0)
        for key, count in after.items()
        if count != before.get(key, 0)
    }


class Swallowed(threading.Event):
    """Makes the operator hang at the moment when it would POST a Job, as if it died there."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        create = client.Client.create

        async def hang(
            cluster: client.Client, resource: resources.Resource, namespace: str, body: Object
        ) -> Object:
            if resource is resources.JOBS:
                self.set()
                await asyncio.Event().wait()
            return await create(cluster, resource, namespace, body)

        monkeypatch.setattr(client.Client, "create", hang)
