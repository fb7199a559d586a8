"""What a run shows of itself: logs by our keys, the recorder of several threads, /metrics, phases,
rows of steps."""

import json
import math
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from transformers import TrainerState

from grpo_api.plan.plan import MemoryPhases, MemoryPrediction
from grpo_api.report.artifacts import Checkpoint
from grpo_api.report.report import Finding, Progress
from grpo_api.report.training_metrics import WEIGHTS_VERSION
from grpo_api.spec.training import ReferenceSync
from grpo_api.text.contract import PROGRESS_BIND_ENV
from grpo_api.text.timing import Beginning
from grpo_codegen.stories.logged_runs import Noisy, logged_steps, ramp
from grpo_trainer.gang.placement import Placement
from grpo_trainer.history.run_history import RunHistory
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.errors import Diverged
from grpo_trainer.telemetry.observer import (
    PublishLogs,
    translate_logs,
)
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.telemetry.progress_server import (
    ProgressCollector,
    _handler,
    limits_of,
    serve,
)
from grpo_trainer.training.guard import LossGuard
from harness.controlplane import free_port
from tests.support.ranks import runs

pytestmark = pytest.mark.realtime

PLAN = runs.plan(Path("/models/demo"))
NO_HISTORY = RunHistory(None, 1, PLAN.samples)
PREDICTION = MemoryPrediction(
    phases=MemoryPhases(load=1, generate=2, reference=3, forward=4, backward=5, step=6),
    peak_phase="step",
    peak_allocated_bytes=6,
    device_bytes=8,
    usable_bytes=10,
    host_bytes_per_node=1,
)


def test_logs_are_translated_and_absent_stays_absent() -> None:
    logs = {
        "kl": 0.5,
        "reward": None,
        "loss": math.inf,
        "rewards/tall/mean": 1.0,
        "rewards/tall/std": 0.1,
        "x": 2,
    }
    assert translate_logs(logs) == {
        "kl": 0.5,
        "loss": math.inf,
        "reward_by_function/tall": 1.0,
        "reward_std_by_function/tall": 0.1,
    }


def test_a_clock_that_is_set_while_a_process_starts_costs_no_progress() -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time() + 3600.0)
    recorder.record_startup_point("imports")
    text = recorder.progress.model_dump_json()
    assert Progress.model_validate_json(text).startup_seconds["imports"] < 60.0


def test_all_that_several_threads_publish_at_once_is_kept() -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    began = threading.Barrier(4)

    def publish(thread: int) -> None:
        began.wait()
        for number in range(200):
            recorder.record_startup(f"{thread}-{number}", 1.0)
            recorder.record_metrics({f"{thread}-{number}": 1.0})
            recorder.record_memory_peaks({f"{thread}-{number}": 1})

    threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    progress = recorder.progress
    assert [
        len(found) for found in (progress.startup_seconds, progress.metrics, progress.memory)
    ] == [800] * 3


def test_server_answers_and_a_taken_port_costs_only_telemetry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    monkeypatch.setenv(PROGRESS_BIND_ENV, f"127.0.0.1:{port}")
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    serve(limits_of(PLAN), recorder)
    serve(limits_of(PLAN), recorder)
    assert "telemetry is off" in caplog.text
    recorder.record_metrics({"kl": 0.25, "loss": 1.5, "reward_by_function/tall": 2.5})
    recorder.record_metrics({"loss": math.nan, "reward_by_function/tall": -math.inf})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert "grpo_training_kl 0.25" in text
    assert "grpo_training_reward " not in text
    assert "grpo_training_loss NaN" in text, "the last number in its place would hide it"
    assert 'grpo_training_reward_by_function{reward="tall"} -Inf' in text
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=60) as answer:
        progress = answer.read().decode()
    assert json.loads(progress)["metrics"] == {
        "kl": 0.25,
        "loss": "NaN",
        "reward_by_function/tall": "-Infinity",
    }
    read = Progress.model_validate_json(progress).metrics
    assert (read.pop("reward_by_function/tall"), str(read)) == (
        -math.inf,
        "{'kl': 0.25, 'loss': nan}",
    )
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)


@pytest.mark.parametrize(
    ("bind", "asked"), [("[::1]:{}", "[::1]"), (":{}", "[::1]"), (":{}", "127.0.0.1")]
)
def test_rank_0_answers_over_ipv6_and_on_both_families(
    bind: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv(PROGRESS_BIND_ENV, bind.format(port))
    serve(limits_of(PLAN), Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time()))
    with urllib.request.urlopen(f"http://{asked}:{port}/healthz", timeout=60) as answer:
        assert answer.read() == b"ok\n"


def test_who_gives_up_asking_leaves_no_traceback_in_the_log() -> None:
    asking, answering = socket.socketpair()
    asking.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
    asking.close()
    with answering:
        _handler({"/healthz": lambda _: ("text/plain", b"ok")})(answering, ("", 0), Mock())


def test_a_scrape_has_limits_eta_process_and_build_beside_the_run() -> None:
    measured_against = {"memory": PREDICTION, "link_bytes_per_second": 280}
    execution = PLAN.execution.model_copy(update=measured_against)
    guard = PLAN.guard.model_copy(update={"max_kl": 0.5})
    reference = PLAN.reference.model_copy(update={"sync": ReferenceSync(every_steps=64)})
    changes = {
        "execution": execution,
        "guard": guard,
        "reference": reference,
        "checkpoint_directory": "/runs",
    }
    plan = PLAN.model_copy(update=changes)
    told = Progress(
        attempt=2, step=30, total_steps=100, seconds_per_step=2.0, memory={"generate": 9, "host": 7}
    )
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in ProgressCollector(lambda: told, limits_of(plan)).collect()
        for sample in family.samples
    }
    assert found["grpo_training_eta_seconds",] == 140.0
    assert found["grpo_training_guard_max_kl",] == 0.5
    assert found["grpo_training_allreduce_assumed_bytes_per_second",] == 280.0
    assert found["grpo_training_checkpoint_every_steps",] == 3.0
    assert found["grpo_training_reference_sync_every_steps",] == 64.0
    assert found["grpo_training_memory_usable_bytes",] == PREDICTION.usable_bytes
    assert found["grpo_training_memory_predicted_bytes", "backward"] == PREDICTION.phases.backward
    assert found["grpo_training_memory_bytes", "generate"] == 9.0
    assert found["grpo_training_host_memory_bytes",] == 7.0
    assert ("grpo_training_memory_bytes", "host") not in found
    assert (
        found["grpo_trainer_build_info", version("grpo-operator"), version("torch"), version("trl")]
        == 1.0
    )
    bare = ProgressCollector(lambda: Progress(attempt=1), limits_of(PLAN)).collect()
    assert {"grpo_training_guard_max_kl", "grpo_training_eta_seconds"}.isdisjoint(
        family.name for family in bare
    )


def test_a_straggler_is_a_series_with_its_rank_pod_and_node() -> None:
    evidence = {"rank": 3.0, "timesMedian": 1.9}
    slow = Finding(finding="Straggler", since=9, confidence=0.8, evidence=evidence)
    progress = Progress(
        attempt=1, findings=[slow.model_copy(update={"pod": "run-1-3-x7k2p", "node": "gpu-7"})]
    )
    (family,) = [
        family
        for family in ProgressCollector(lambda: progress, {}).collect()
        if family.name == "grpo_training_straggler"
    ]
    labels = {"rank": "3", "rank_pod": "run-1-3-x7k2p", "rank_node": "gpu-7"}
    assert [(sample.labels, sample.value) for sample in family.samples] == [(labels, 1.9)]


def test_a_step_that_is_not_finite_counts_once_whoever_finds_it() -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    recorder.begin_training(0, 9)
    publish, guard = PublishLogs(recorder, NO_HISTORY), LossGuard()
    args: Any = SimpleNamespace(gradient_accumulation_steps=4)
    for step, loss in ((1, 0.5), (2, math.nan), (3, 0.4)):
        logs = {"loss": loss, "kl_overflow_tokens": 0.25, "rewards/other/mean": math.nan}
        for callback in (publish, guard):
            try:
                callback.on_log(args, TrainerState(global_step=step), None, logs=logs)
            except Diverged as error:
                recorder.record_nonfinite_step(error.step)
    assert recorder.progress.metrics["nonfinite_steps"] == 1.0
    recorder.record_nonfinite_step(4)  # by its gradient, before anything of it is logged
    assert recorder.progress.metrics["nonfinite_steps"] == 2.0
    assert recorder.progress.metrics["kl_overflow_tokens"] == 3.0, (
        "one token a step, over four micro-batches"
    )


def test_a_finding_is_published_and_survives_a_restart() -> None:
    args: Any = SimpleNamespace(gradient_accumulation_steps=1)
    steps = logged_steps({"entropy": Noisy(ramp(0.9, 0.01, 120))}, steps=150)

    def trained(first: int, history: list[dict[str, Any]]) -> Recorder:
        """An attempt from this step on, with what its checkpoint says of those before."""
        recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
        publish = PublishLogs(recorder, NO_HISTORY)
        publish.on_train_begin(args, TrainerState(log_history=history), cast(Any, None))
        for logs in steps[first:]:
            state = TrainerState(global_step=logs["step"])
            publish.on_log(args, state, cast(Any, None), logs=logs)
        return recorder

    whole = trained(0, [])
    assert [one.finding for one in whole.progress.findings] == ["EntropyCollapsed"]
    assert whole.progress.metrics["finding/EntropyCollapsed"] == 1.0
    assert whole.progress.metrics["finding/NoReward"] == 0.0
    resumed = trained(130, [*steps[:130], {"step": 130, "train_runtime": 9.0}])
    assert resumed.progress.findings == whole.progress.findings
    assert trained(130, []).progress.findings == [], "its own steps have always been like that"


def test_a_straggler_is_of_the_attempt_that_it_was_found_in() -> None:
    """After a restart its rank is another pod, which must not be blamed, nor its node avoided."""
    args: Any = SimpleNamespace(gradient_accumulation_steps=1)
    steps = [row | {"rank_seconds": [1.0, 2.0]} for row in logged_steps(steps=30)]
    for restart, names in ((0, ["Straggler"]), (20, ["Straggler"]), (26, [])):
        recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
        publish = PublishLogs(recorder, NO_HISTORY)
        state = TrainerState(log_history=steps[:restart])
        publish.on_train_begin(args, state, cast(Any, None))
        for logs in steps[restart:]:
            state = TrainerState(global_step=logs["step"])
            publish.on_log(args, state, cast(Any, None), logs=logs)
        found = recorder.progress.findings
        assert [one.finding for one in found] == names
        assert all(one.since == restart + 5 for one in found)


def test_what_trl_logs_and_nobody_exports_is_judged_after_a_restart_too() -> None:
    args: Any = SimpleNamespace(gradient_accumulation_steps=1)
    steps = logged_steps({"clip_ratio/region_mean": Noisy(ramp(0.01, 0.5, 100))}, steps=120)
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    publish = PublishLogs(recorder, NO_HISTORY)
    publish.on_train_begin(args, TrainerState(log_history=steps[:50]), cast(Any, None))
    for logs in steps[50:]:
        publish.on_log(args, TrainerState(global_step=logs["step"]), cast(Any, None), logs=logs)
    assert [one.finding for one in recorder.progress.findings] == ["StepsTooLarge"]


def test_checkpoints_count_from_zero_and_the_newest_has_its_time() -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    recorder.record_resume(3, 1.7e9, Beginning())
    recorder.begin_training(3, 9)
    resumed = recorder.progress.metrics
    assert (resumed["checkpoint_step"], resumed["checkpoint_timestamp_seconds"]) == (3.0, 1.7e9)
    assert (resumed["checkpoints"], resumed["checkpoint_failures"]) == (0.0, 0.0)
    recorder.record_checkpoint_failure("full")
    recorder.record_checkpoint_failure("full")
    recorder.record_checkpoint(
        Checkpoint(step=6, time=1.8e9, bytes=5, where="/checkpoints/run"), 1.5
    )
    saved = recorder.progress.metrics
    assert (saved["checkpoints"], saved["checkpoint_failures"], saved["checkpoint_step"]) == (
        1.0,
        2.0,
        6.0,
    )
    assert saved["checkpoint_timestamp_seconds"] == 1.8e9


def test_phases_interrupt_each_other() -> None:
    now = iter([0.0, 1.0, 4.0, 9.0, 9.0, 9.0])
    clock = PhaseClock(lambda: next(now))
    with clock.phase("forward"), clock.phase("reference"):
        pass
    taken = clock.take_seconds()
    assert (taken["forward"], taken["reference"]) == (1.0 + 5.0, 3.0)
    assert set(clock.take_seconds().values()) == {0.0}


def test_the_rows_name_the_weights_that_an_engine_sampled_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    publish, args = PublishLogs(recorder, NO_HISTORY), cast(Any, None)
    state = TrainerState(global_step=1)
    for number in (0, 1_000_000_007):
        if number:
            recorder.record_metrics({WEIGHTS_VERSION.key: float(number)})
        state.log_history.append({"loss": 0.5})
        publish.on_log(args, state, None, logs={"loss": 0.5})
    assert [row.get("weights_version") for row in state.log_history] == [None, 1_000_000_007]
    lines = [vars(record) for record in caplog.records if "totalSteps" in vars(record)]
    assert [line.get("weights_version") for line in lines] == [None, 1_000_000_007]


def test_a_row_has_what_trl_logs_the_times_of_the_step_and_new_checkpoints() -> None:
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), time.time())
    publish, args = PublishLogs(recorder, NO_HISTORY), cast(Any, None)
    state = TrainerState()
    for step in (1, 2, 3):
        recorder.record_metrics({"phase_seconds/generate": float(step)})
        logs = {"loss": 0.5, "reward": 1.0, "rewards/tall/std": 0.25}
        logs["attempt"] = 9.0  # as a user's reward function may call its metric
        state.global_step = step
        state.log_history.append({**logs, "step": step})
        publish.on_log(args, state, None, logs=logs)
        if step == 1:
            recorder.record_checkpoint(
                Checkpoint(step=1, time=1.8e9, bytes=5, where="/checkpoints/run"), 1.5
            )
    first, second, third = state.log_history
    assert (first["step"], first["attempt"], first["findings"]) == (1, 1, [])
    assert first["phase_seconds/generate"] == 1.0
    assert first["rewards/tall/std"] == 0.25
    assert (second["checkpoint_step"], second["checkpoint_seconds"]) == (1.0, 1.5)
    assert not any("checkpoint" in key for row in (first, third) for key in row)
