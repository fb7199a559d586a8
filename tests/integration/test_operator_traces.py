"""One trace per attempt at an OTLP receiver, over two attempts on a real API server and two
restarts of the operator.

What rank 0 says comes from the trainer's own recorder and server; only the training is played.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.contract import PLAN_ANNOTATION, PROGRESS_BIND_ENV, PROGRESS_PORT
from grpo_api.text.timing import Beginning
from grpo_operator.process.settings import Tracing
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.telemetry.progress_server import limits_of, serve
from harness.cluster import Cluster
from harness.controlplane import free_port
from tests.integration.operator_bench import MERGE, PODS, Bench, Object, outcome
from tests.integration.operator_thread import OperatorThread
from tests.integration.web_server import in_a_thread, listening
from tests.otlp_receiver import Received, Receiver

EVERY = 5
START = ["queued", "bound", "started", "loaded", "proven", "first step"]
PART = 0.02
"""Seconds that each part of a step takes."""


class Rank0:
    """The trainer's recorder and server at an address of this machine, which the pod gets as its
    own."""

    def __init__(
        self, bench: Bench, pod: Object, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = TrainingPlan.model_validate_json(pod["metadata"]["annotations"][PLAN_ANNOTATION])
        self.recorder = Recorder(plan.job.attempt, Placement(0, 0, 1, 1), time.time())
        monkeypatch.setenv(PROGRESS_BIND_ENV, f"{address}:{PROGRESS_PORT}")
        serve(limits_of(plan), self.recorder)
        path = f"{PODS.format(bench.namespace)}/{pod['metadata']['name']}/status"
        bench.client.request(
            "PATCH", path, {"status": {"podIP": address, "podIPs": [{"ip": address}]}}, MERGE
        )

    def start(self, after: int) -> None:
        """Loads and proves, then goes on after so many steps."""
        self.recorder.enter_stage("Loading")
        with self.recorder.measure_part("load"):
            time.sleep(0.1)
        self.recorder.enter_stage("Proving")
        self.recorder.record_resume(after, time.time(), Beginning(attempt=int(after > 0)))
        time.sleep(0.05)
        self.recorder.begin_training(after, 100)

    def train(self, first: int, last: int) -> None:
        """Makes these steps."""
        for step in range(first, last + 1):
            for phase in ("generate", "reward", "forward"):
                self.recorder.enter_phase(phase)
                time.sleep(PART)
            self.recorder.record_step(step, None, 3 * PART)
        self.recorder.enter_phase("generate")


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    """One that runs, and its endpoint."""
    receiver, port = Receiver(), free_port()
    with in_a_thread(listening(("127.0.0.1",), port, receiver.handle)):
        yield receiver, f"http://127.0.0.1:{port}"


@pytest.fixture
def started(
    grpo_cluster: Cluster, bench: Bench, receiver: tuple[Receiver, str]
) -> Iterator[Callable[[], OperatorThread]]:
    """Ends the operator, if there is one, and starts another."""
    with ExitStack() as running:
        tracing = Tracing(endpoint=receiver[1], every=EVERY)

        def begin_anew() -> OperatorThread:
            running.pop_all().close()
            chosen: dict[str, Any] = {
                "progress_interval": 0.2,
                "status_interval": 0.2,
                "tracing": tracing,
            }
            return running.enter_context(bench.operating(**chosen))

        yield begin_anew


def of_attempt(receiver: Receiver, attempt: int) -> list[Received]:
    """The spans of its trace, in the order of their ends."""
    found = [one for one in receiver.spans if one.resource["grpo.attempt"] == attempt]
    assert len({one.span.trace_id for one in found}) == 1
    return sorted(found, key=lambda one: one.span.end_time_unix_nano)


def test_each_attempt_has_one_trace_however_often_the_operator_begins_anew(
    bench: Bench,
    receiver: tuple[Receiver, str],
    started: Callable[[], OperatorThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces, _ = receiver
    began = time.time_ns()
    started()
    bench.submit()
    first = bench.wait_running()
    rank0 = Rank0(bench, first[0], "127.7.7.1", monkeypatch)
    rank0.start(after=0)
    rank0.train(1, 7)
    bench.wait("the fifth step", lambda: traces.named("step"))
    bench.wait("the status", lambda: bench.status().get("progress", {}).get("step") == 7)
    started()  # attempt 1 goes on under another operator, which tells nothing again
    rank0.train(8, 10)
    bench.wait("the tenth step", lambda: len(traces.named("step")) == 2)
    gone = outcome("RewardError", attempt=1, step=10, message="the service is gone")
    with bench.kubelets_standing_still():
        for pod in first:
            bench.end(pod, 1, gone)
    second = bench.wait_running(attempt=2, hurry=False)
    rank0 = Rank0(bench, second[0], "127.7.7.2", monkeypatch)
    rank0.start(after=5)
    rank0.train(6, 11)
    bench.wait("the tenth step again", lambda: len(traces.named("step")) == 3)
    for pod in second:
        bench.end(pod, message=outcome("Succeeded", attempt=2, step=11))
    bench.wait_phase("Succeeded")
    # The span of an attempt is made once the API server has taken the status that ends it: an
    # operator that is stopped between the two makes none.
    bench.wait("the end of attempt 2", lambda: len(traces.named("attempt")) == 2)
    operator = started()
    ended = time.time_ns()

    assert len({one.key for one in traces.spans}) == len(traces.spans)
    assert len({one.span.trace_id for one in traces.spans}) == 2
    for attempt, steps in ((1, [5, 10]), (2, [10])):
        spans = of_attempt(traces, attempt)
        (root,) = [one for one in spans if not one.span.parent_span_id]
        children = [one.span for one in spans if one.span.parent_span_id == root.span.span_id]
        assert sorted(one.name for one in children) == sorted([*START, *["step"] * len(steps)])
        assert [one.attributes["grpo.step"] for one in spans if one.span.name == "step"] == steps
        assert began - 10**9 <= root.span.start_time_unix_nano, (
            "the API server's times have whole seconds"
        )
        assert root.span.end_time_unix_nano <= ended
        for one in spans:
            assert (
                root.span.start_time_unix_nano
                <= one.span.start_time_unix_nano
                <= one.span.end_time_unix_nano
            )
            assert one.span.end_time_unix_nano <= root.span.end_time_unix_nano
            assert one.resource["k8s.job.name"] == f"run-{attempt}"
            assert one.resource["k8s.namespace.name"] == bench.namespace
        for step in (one.span for one in spans if one.span.name in ("step", "first step")):
            parts = [one.span for one in spans if one.span.parent_span_id == step.span_id]
            assert [one.name for one in parts] == ["generating", "scoring", "training"]
            assert all(
                one.end_time_unix_nano - one.start_time_unix_nano >= 0.9 * PART * 10**9
                for one in parts
            )
    check_ends(traces)
    assert operator.page("metrics")[0] == 200


def check_ends(traces: Receiver) -> None:
    """The first attempt failed and says why; the second has a link to it."""
    failed, done = traces.named("attempt")
    assert (failed.span.status.code, failed.span.status.message) == (2, "the service is gone")
    assert failed.attributes["error.type"] == failed.attributes["grpo.result"] == "RewardError"
    assert (done.span.status.code, done.attributes["grpo.result"]) == (0, "Succeeded")
    assert [link.span_id for link in done.span.links] == [failed.span.span_id]
    assert [done.attributes["grpo.step"], done.attributes["grpo.nodes"]] == [11, 2]
