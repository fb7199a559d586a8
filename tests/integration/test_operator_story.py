"""A story drawn by chance on the real API server: pods fail, Jobs vanish, jobs are suspended, the
operator begins anew.

The other tests know what they do to the operator; this one doesn't. However the story went, every
job that is left ends, no attempt was made without a cause, and nothing outlives its job.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from grpo_api.spec.run_policy import RestartsSpec
from grpo_operator.records.names import COMPONENT_ENGINE, LABEL_COMPONENT
from harness.client import ApiStatusError
from harness.cluster import Cluster
from tests.generated import cases
from tests.integration.operator_bench import GRPOJOBS, JOBS, PODS, Bench, outcome
from tests.integration.operator_thread import OperatorThread

NAMES = ("a", "b", "c")
SERVED: dict[str, Any] = {"generation": {"engine": "Servers", "servers": {"replicas": 2}}}
SPECS = {"c": SERVED}
"""Of the jobs that have engines in pods of their own."""
EVENTS = 15
LONGEST_PAUSE = 0.4
"""Seconds between two events: shorter and longer than what an attempt takes to start."""
RESTARTS = RestartsSpec().limit


class Story:
    """Three jobs, an operator, and what happens to them."""

    def __init__(self, cluster: Cluster, bench: Bench, chance: random.Random) -> None:
        self.cluster, self.bench, self.chance = cluster, bench, chance
        self.operator = self._started()
        self.causes: Counter[str] = Counter()
        """By job: what may bring it a new attempt."""
        self.failures: Counter[str] = Counter()
        """By job: those of them that count against its limit of restarts."""

    def _started(self) -> OperatorThread:
        return OperatorThread(self.cluster, namespaces=(self.bench.namespace,)).start()

    def submitted(self, name: str) -> None:
        """The job is created."""
        self.bench.submit(name, **SPECS.get(name, {}))

    def happens(self) -> str:
        """One event, to one job where it is a job's; returns what it was."""
        events: list[Callable[[str], None]] = [
            self.a_pod_fails, self.a_pod_fails, self.a_pod_is_deleted, self.the_job_is_deleted,
            self.suspended,
            self.resumed, self.the_operator_begins_anew, self.made_again,
        ]  # fmt: skip
        event, name = self.chance.choice(events), self.chance.choice(NAMES)
        with contextlib.suppress(ApiStatusError):  # what it was meant for has just gone
            event(name)
        time.sleep(self.chance.uniform(0, LONGEST_PAUSE))
        return f"{event.__name__} {name}"

    def _some_pod(self, name: str) -> str | None:
        pods = self.bench.pods(name, self.bench.status(name).get("attempt", 1))
        return self.chance.choice(pods)["metadata"]["name"] if pods else None

    def a_pod_fails(self, name: str) -> None:
        if pod := self._some_pod(name):
            self.causes[name] += 1
            self.failures[name] += 1
            self.bench.end({"metadata": {"name": pod}}, 137, reason="OOMKilled")

    def a_pod_is_deleted(self, name: str) -> None:
        if pod := self._some_pod(name):
            self.causes[name] += 1
            self.bench.delete(PODS, pod, gracePeriodSeconds=0)

    def the_job_is_deleted(self, name: str) -> None:
        if children := self.bench.children(name):
            child = self.chance.choice(children[-2:])
            self.causes[name] += 1
            self.bench.delete(JOBS, child)

    def suspended(self, name: str) -> None:
        self.causes[name] += 1
        self.bench.patch(GRPOJOBS, name, {"spec": {"suspend": True}})

    def resumed(self, name: str) -> None:
        self.bench.patch(GRPOJOBS, name, {"spec": {"suspend": False}})

    def the_operator_begins_anew(self, _: str) -> None:
        self.operator.stop()
        self.operator = self._started()

    def made_again(self, name: str) -> None:
        self.bench.delete(GRPOJOBS, name)
        self.submitted(name)
        self.causes[name] = self.failures[name] = 0

    def ended(self, name: str) -> bool:
        """Whether the job ended; lets the pods succeed that now run."""
        status = self.bench.status(name)
        if status.get("phase") == "Running":
            trains = [pod for pod in self.bench.pods(name, status["attempt"]) if not _serves(pod)]
            for pod in trains:
                with contextlib.suppress(ApiStatusError):
                    self.bench.end(pod, message=outcome("Succeeded"))
        return status.get("phase") in ("Succeeded", "Failed")

    def survivors(self) -> list[str]:
        """Pods that still run."""
        pods = self.bench.get(PODS)["items"]
        return [
            pod["metadata"]["name"]
            for pod in pods
            if pod["status"]["phase"] not in ("Succeeded", "Failed")
        ]


def _serves(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"][LABEL_COMPONENT] == COMPONENT_ENGINE)


@pytest.fixture
def story(grpo_cluster: Cluster, chance: random.Random) -> Iterator[Story]:
    bench = Bench(grpo_cluster, grpo_cluster.control_plane.client())
    story = Story(grpo_cluster, bench, chance)
    yield story
    story.operator.stop()


@pytest.mark.seeded
def test_whatever_happens_every_job_ends_and_nothing_is_started_without_a_cause(
    story: Story,
) -> None:
    bench = story.bench
    for name in NAMES:
        story.submitted(name)
    told = [story.happens() for _ in range(cases(EVENTS, gate=EVENTS // 2))]
    for name in NAMES:
        story.resumed(name)
    for name in NAMES:
        bench.wait(f"{name} to end after {told}", partial(story.ended, name))
        status = bench.status(name)
        assert status["attempt"] <= 1 + story.causes[name], (name, told)
        assert status.get("restarts", 0) <= story.failures[name], (name, told)
        assert status["phase"] == "Succeeded" or story.failures[name] > RESTARTS, (name, told)
    bench.wait("no survivor", lambda: not story.survivors())
    assert story.operator.error is None
