"""What a run shows of itself: logs by our keys, the recorder of several threads, /metrics, phases, samples."""

import json
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from grpo_api.contract import PROGRESS_BIND_ENV
from grpo_api.report import Progress
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.telemetry.logs import translate
from grpo_trainer.telemetry.observer import SAMPLE_CHARACTERS, StepObserver
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.telemetry.server import serve
from harness.ranks import runs
from harness.ranks.pods import free_port

PLAN = runs.plan(Path("/models/demo"))


def test_logs_are_translated_and_absent_stays_absent() -> None:
    logs = {"kl": 0.5, "reward": None, "loss": math.inf, "rewards/tall/mean": 1.0, "rewards/tall/std": 0.1, "x": 2}
    assert translate(logs) == {"kl": 0.5, "loss": math.inf, "reward_by_function/tall": 1.0}


def test_all_that_several_threads_publish_at_once_is_kept() -> None:
    recorder = Recorder(PLAN, Placement(0, 0, 1, 1), time.time())
    began = threading.Barrier(4)

    def publish(thread: int) -> None:
        began.wait()
        for number in range(200):
            recorder.startup(f"{thread}-{number}", 1.0)
            recorder.logged({f"{thread}-{number}": 1.0})
            recorder.memory({f"{thread}-{number}": 1})

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
    assert [len(found) for found in (progress.startup_seconds, progress.metrics, progress.memory)] == [800] * 3


def test_server_answers_and_a_taken_port_costs_only_telemetry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setenv(PROGRESS_BIND_ENV, f"127.0.0.1:{port}")
    recorder = Recorder(PLAN, Placement(0, 0, 1, 1), time.time())
    serve(recorder)
    serve(recorder)
    assert "telemetry is off" in capsys.readouterr().out
    recorder.logged({"kl": 0.25, "loss": 1.5, "reward_by_function/tall": 2.5})
    recorder.logged({"loss": math.nan, "reward_by_function/tall": -math.inf})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "grpo_training_kl 0.25" in text
    assert "grpo_training_reward " not in text
    assert "grpo_training_loss NaN" in text, "the last number in its place would hide it"
    assert 'grpo_training_reward_by_function{reward="tall"} -Inf' in text
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=10) as answer:
        progress = answer.read().decode()
    assert json.loads(progress)["metrics"] == {"kl": 0.25, "loss": None, "reward_by_function/tall": None}
    assert Progress.model_validate_json(progress).metrics == {"kl": 0.25}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)


def test_phases_interrupt_each_other() -> None:
    now = iter([0.0, 1.0, 4.0, 9.0, 9.0, 9.0])
    clock = PhaseClock(lambda: next(now))
    with clock.phase("forward"), clock.phase("reference"):
        pass
    taken = clock.take()
    assert (taken["forward"], taken["reference"]) == (1.0 + 5.0, 3.0)
    assert set(clock.take().values()) == {0.0}


def test_samples_are_bounded_and_leave_out_missing_rewards() -> None:
    observer = StepObserver()
    rewards = torch.tensor([[1.0, math.nan]]).repeat(9, 1)
    observer.completed(["p" * 5000] * 9, [[{"role": "assistant", "content": "c"}]] * 9, rewards, ["a", "b"])
    assert len(observer.samples) == 3
    assert len(str(observer.samples[0]["prompt"])) < SAMPLE_CHARACTERS + 10
    assert observer.samples[0] | {"prompt": ""} == {"prompt": "", "completion": "c", "a": 1.0}
