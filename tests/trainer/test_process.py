"""The trainer around the training: placement, outcomes, supervisor, watchdog, preemption, telemetry
and settings.

These rules need no training run to be seen.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from errno import EAGAIN
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import Checkpoint, Export, weights_hash
from grpo_api.report.report import EXIT_CODES, Outcome, Progress, Result
from grpo_api.spec.run_policy import GuardSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.contract import (
    INDEX_ENV,
    PLAN_ENV,
    RETURN_FREED_MEMORY,
    TERMINATION_LOG_ENV,
    THREADS_ENV,
)
from grpo_trainer import __main__ as program
from grpo_trainer.gang.placement import LOCAL_RANK_ENV, Placement, placement
from grpo_trainer.process.outcome import ProcessEnd, keep_outcome, make_outcome
from grpo_trainer.process.preemption import Preemption
from grpo_trainer.process.process_setup import (
    hide_unused_libraries,
    threads_per_process,
)
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.supervisor import root_cause
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.runtime.errors import (
    BadInput,
    DivergedKL,
    DriftedApart,
    RewardError,
    classify_error,
)
from grpo_trainer.runtime.hidden_library import FinderWithout
from grpo_trainer.runtime.plan_file import read_plan
from grpo_trainer.training.guard import KLGuard
from grpo_trainer.training.trl_config import (
    config_arguments,
    deepspeed_config,
    engine_arguments,
)
from tests.stepped_clock import SteppedClock
from tests.support.ranks import runs
from tests.support.ranks.checkpoint_plans import finished_attempt
from tests.support.ranks.fork_servers import ISOLATED

pytestmark = pytest.mark.realtime

PLAN = runs.plan(Path("/models/demo"))


def changed(**execution: object) -> TrainingPlan:
    """The plan with another execution."""
    return PLAN.model_copy(update={"execution": PLAN.execution.model_copy(update=execution)})


def test_rank_follows_from_pod_index_and_local_rank() -> None:
    place = placement(
        changed(nodes=3, processes_per_node=4).execution, {INDEX_ENV: "2", LOCAL_RANK_ENV: "1"}
    )
    assert (place.rank, place.world_size, place.is_main) == (9, 12, False)


@pytest.mark.parametrize("index", ["", "3", "-1", "x"])
def test_wrong_pod_index_is_rejected(index: str) -> None:
    with pytest.raises(BadInput, match=r"JOB_COMPLETION_INDEX is .*allows 0 to 2"):
        placement(changed(nodes=3).execution, {INDEX_ENV: index})


def test_plan_errors_come_all_at_once_with_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = json.loads(PLAN.model_dump_json())
    raw["schemaVersion"] = 2
    raw["execution"]["microBatch"] = 0
    raw["surprise"] = 1
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(raw))
    monkeypatch.setenv(PLAN_ENV, str(path))
    with pytest.raises(BadInput) as rejected:
        read_plan()
    assert all(
        part in str(rejected.value)
        for part in ("schemaVersion", "execution.microBatch", "surprise")
    )


def test_plan_that_is_no_utf_8_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe{}")
    monkeypatch.setenv(PLAN_ENV, str(path))
    with pytest.raises(BadInput, match=r"plan.json doesn't fit this trainer: .*Invalid JSON"):
        read_plan()


def test_bad_plan_ends_as_bad_input_before_torch_is_imported(tmp_path: Path) -> None:
    environment = ISOLATED | {
        PLAN_ENV: str(tmp_path / "none"),
        TERMINATION_LOG_ENV: str(tmp_path / "end"),
    }
    command = [sys.executable, "-X", "importtime", "-m", "grpo_trainer"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == EXIT_CODES[Result.BAD_INPUT]
    assert Outcome.model_validate_json((tmp_path / "end").read_text()).result is Result.BAD_INPUT
    assert "grpo_api.plan.plan" in ended.stderr
    assert " torch\n" not in ended.stderr


@pytest.mark.parametrize("failing", ["set_defaults", "supervise"])
def test_any_error_before_training_is_told_with_attempt_and_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError(EAGAIN, "Resource temporarily unavailable")

    plan, end = changed(nodes=2, processes_per_node=2), tmp_path / "end"
    (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    environment = {PLAN_ENV: str(tmp_path / "plan.json"), INDEX_ENV: "1"}
    monkeypatch.setattr(os, "environ", environment | {TERMINATION_LOG_ENV: str(end)})
    monkeypatch.setattr(program, "end_on_sigterm", lambda *_: None)
    monkeypatch.setattr(program, failing, fail)
    assert program.main() == EXIT_CODES[Result.ERROR]
    outcome = Outcome.model_validate_json(end.read_bytes())
    assert (outcome.result, outcome.attempt, outcome.rank) == (Result.ERROR, plan.job.attempt, 2)
    assert "Resource temporarily unavailable" in outcome.message


def test_a_process_that_gets_no_thread_for_its_durable_outcome_ends_as_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    monkeypatch.setattr(Thread, "start", fail)
    end = ProcessEnd(PLAN, lambda _: None)
    code = end.finish(Outcome(result=Result.REWARD_ERROR))
    assert code == EXIT_CODES[Result.REWARD_ERROR]


@pytest.mark.parametrize("given", [{}, {THREADS_ENV: "3"}], ids=["unset", "the user's"])
def test_a_process_computes_on_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(changed(processes_per_node=2).model_dump_json(by_alias=True))
    environment = {PLAN_ENV: str(path), LOCAL_RANK_ENV: "1", **given}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(program, "run_worker", lambda *_: 0)
    assert program.main() == 0
    assert environment[THREADS_ENV] == given.get(THREADS_ENV, str(threads_per_process(2)))


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (RewardError("reward 'a'"), Result.REWARD_ERROR),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            Result.OUT_OF_MEMORY,
        ),
        (MemoryError(), Result.OUT_OF_MEMORY),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            Result.OUT_OF_MEMORY,
        ),
        (RuntimeError("Connection closed by peer [10.0.0.1]:1"), Result.ERROR),
        (KeyError("kl"), Result.ERROR),
        (DriftedApart("policy"), Result.ERROR),
    ],
)
def test_exceptions_become_results(error: BaseException, result: Result) -> None:
    assert classify_error(error)[0] is result


@pytest.mark.parametrize(
    "words",
    [
        "[pair.cc:534] Connection closed by peer [10.0.0.1]:41522",
        "[pair.cc:317] writev [10.0.0.1]:41522: Broken pipe",
        "[pair.cc:921] Socket closed [10.0.0.1]:41522",
        "sendBytes failed on SocketImpl(fd=19): Broken pipe",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown "
        "or crash?",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_lost_peer_is_not_blamed_before_the_error_that_it_ended_with(words: str) -> None:
    result, message = classify_error(RuntimeError(words))
    symptom = Outcome(result=result, rank=0, message=f"Training: {message}")
    cause = Outcome(result=Result.ERROR, rank=1, message="Training: KeyError: 'kl'")
    assert root_cause([symptom, cause]) is cause


def test_an_outcome_carries_the_last_numbers_also_those_that_are_none() -> None:
    reached = Progress(attempt=2, step=5, total_steps=9).model_copy(
        update={
            "metrics": {
                "kl": 0.25,
                "reward": math.nan,
                "loss": math.inf,
                "reward_by_function/tall": 1.0,
            }
        }
    )
    outcome = make_outcome(3, Result.ERROR, "gone", reached)
    told = {"kl": 0.25, "reward": "NaN", "loss": "Infinity"}
    assert json.loads(outcome.model_dump_json())["metrics"] == told
    assert outcome.model_copy(update={"metrics": {}}) == Outcome(
        result=Result.ERROR, rank=3, step=5, total_steps=9, attempt=2, message="gone"
    )


def test_an_outcome_is_durable_where_the_termination_message_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path)
    (tmp_path / "attempt-1").mkdir()
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path))  # as on a full disk: an OSError
    outcome = make_outcome(0, Result.SUCCEEDED, "done", Progress(attempt=1, step=6))
    assert ProcessEnd(plan, lambda _: None).finish(outcome) == 0
    assert finished_attempt(plan) == outcome


def test_durable_success_is_found_by_the_next_attempt(tmp_path: Path) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path)
    (tmp_path / "attempt-1").mkdir()
    assert finished_attempt(plan) is None
    keep_outcome(plan, make_outcome(0, Result.ERROR, "no", Progress(attempt=1, step=3)))
    assert finished_attempt(plan) is None
    for number, content in enumerate((b"", b"{", b"\xff", b'{"result": "Error", "new": 1}')):
        (tmp_path / f"attempt-{number}").mkdir(exist_ok=True)
        (tmp_path / f"attempt-{number}" / "outcome-rank-0.json").write_bytes(content)
        assert finished_attempt(plan) is None
    export = Export(
        to="Volume",
        path="/checkpoints/x/export",
        format="Model",
        bytes=9,
        weights_hash=weights_hash({}),
    )
    kept = Checkpoint(step=5, time=1.7e9, bytes=9, where="/checkpoints/x/attempt-1/checkpoint-5")
    keep_outcome(
        plan,
        make_outcome(
            0, Result.SUCCEEDED, "done", Progress(attempt=1, step=6, checkpoint=kept), export=export
        ),
    )
    (tmp_path / "export").mkdir()
    found = finished_attempt(plan)
    assert found is not None
    assert (found.result, found.step) == (Result.SUCCEEDED, 6)
    recorder = Recorder(plan.job.attempt, Placement(0, 0, 1, 1), 0.0)
    recorder.adopt_outcome(found)
    told = make_outcome(0, Result.SUCCEEDED, "done", recorder.progress, export=recorder.export)
    assert (told.export, told.checkpoint) == (export, kept)
    own_time = {"account": told.account}
    assert told == found.model_copy(update=own_time)


@pytest.mark.parametrize(
    ("results", "cause"),
    [
        ([Result.SUCCEEDED, Result.SUCCEEDED], Result.SUCCEEDED),
        ([Result.ERROR, Result.OUT_OF_MEMORY], Result.OUT_OF_MEMORY),
        ([Result.PREEMPTED, Result.ERROR], Result.ERROR),
        ([Result.PREEMPTED, Result.SUCCEEDED], Result.PREEMPTED),
        ([Result.SUCCEEDED, Result.PREEMPTED], Result.SUCCEEDED),
        ([Result.HANG, Result.REWARD_ERROR], Result.REWARD_ERROR),
    ],
)
def test_supervisor_reports_the_cause_not_the_symptom(results: list[Result], cause: Result) -> None:
    outcomes = [Outcome(result=result, rank=rank) for rank, result in enumerate(results)]
    assert root_cause(outcomes).result is cause


def test_a_success_is_told_by_the_first_rank_whoever_ends_first() -> None:
    assert (
        root_cause([Outcome(result=Result.SUCCEEDED, rank=rank) for rank in (3, 0, 1, 2)]).rank == 0
    )


def test_libraries_without_use_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # An earlier test of this process may have run a training, which hides some for good.
    plain = [finder for finder in sys.meta_path if not isinstance(finder, FinderWithout)]
    monkeypatch.setattr(sys, "meta_path", [*plain, FinderWithout(())])
    for name in ("bitsandbytes", "deepspeed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    hide_unused_libraries(changed(zero_stage=2, optimizer="AdamW8bit").execution)
    assert importlib.util.find_spec("bitsandbytes") is not None
    assert importlib.util.find_spec("deepspeed") is not None
    hide_unused_libraries(changed(zero_stage=0, optimizer="AdamW").execution)
    for name in ("trackio", "wandb", "bitsandbytes", "deepspeed"):
        assert importlib.util.find_spec(name) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


PAGE_FAULTS = """
import os, resource, sys
from grpo_trainer.process.process_setup import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        bytearray(2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

page_faults()
before = page_faults()
keep_freed_memory(os.environ)
page_faults()
print(before, page_faults())
"""


@pytest.mark.realtime
@pytest.mark.parametrize("changed", [{}, {"MALLOC_TRIM_THRESHOLD_": "65536"}])
def test_training_on_cpus_keeps_freed_memory_unless_the_job_has_settings_of_its_own(
    changed: dict[str, str],
) -> None:
    environment = os.environ | RETURN_FREED_MEMORY | changed
    command = [sys.executable, "-c", PAGE_FAULTS]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after = shown.stdout.split()
    pages = 50 * 2**20 // os.sysconf("SC_PAGESIZE")
    assert int(before) >= pages // 2, "each block is mapped and returned"
    assert (int(after) < pages // 50) is not bool(changed)


def test_watchdog_ends_a_run_without_steps() -> None:
    clock = SteppedClock()
    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), 0.0, clock.now)
    recorder.begin_training(3, 10)
    watchdog = Watchdog(
        PLAN.guard,
        PLAN.execution,
        PLAN.grace_period_seconds,
        recorder,
        lambda *_: None,
        now=clock.now,
    )
    assert watchdog.verdict() is None
    clock.advance(PLAN.guard.hang_timeout_seconds + 5)
    outcome = watchdog.verdict()
    assert outcome is not None
    assert (outcome.result, outcome.step) == (Result.HANG, 3)
    assert "Training after step 3" in outcome.message


@pytest.mark.parametrize(
    ("waited", "step_seconds", "decision"),
    [(0.0, 1.0, "save"), (50.0, 5.0, "stop"), (54.0, 1.0, "stop")],
)
def test_preemption_saves_if_time_allows(waited: float, step_seconds: float, decision: str) -> None:
    assert Preemption(60.0, can_save=True).decide(waited, step_seconds) == decision
    assert Preemption(60.0, can_save=False).decide(waited, step_seconds) == "stop"


@given(ratio=st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1), steps=st.integers(1, 10**8))
@example(ratio=1.0, steps=10**8)
def test_the_warm_up_is_the_declared_share_of_the_steps(ratio: float, steps: int) -> None:
    training = PLAN.training.model_copy(update={"warmup_ratio": ratio})
    words = config_arguments(PLAN.model_copy(update={"training": training}))
    arguments = TrainingArguments(
        "unused", use_cpu=True, report_to="none", warmup_steps=words["warmup_steps"]
    )
    assert arguments.get_warmup_steps(steps) == math.ceil(ratio * steps)


@given(
    mode=st.sampled_from(["mask", "truncate", "none"]),
    level=st.sampled_from(["token", "sequence"]),
    low=st.none() | st.floats(0.001, 1, exclude_max=True),
    high=st.floats(1, 1e9),
    cut=st.sampled_from([{}, {"top_p": 0.9, "temperature": 0.7}]),
)
def test_the_correction_for_an_engine_is_trls(
    mode: str, level: str, low: float | None, high: float, cut: dict[str, float]
) -> None:
    """TRL's own constructor takes the arguments; it refuses bounds and modes that make no sense."""
    correction = {"mode": mode, "level": level, "clip": {"min": low, "max": high}}
    training = TrainingSpec.model_validate({"importance_sampling": correction, **cut})
    arguments = engine_arguments(training)
    config = GRPOConfig("unused", use_cpu=True, bf16=False, report_to="none", **arguments)
    assert config.vllm_importance_sampling_correction == (mode != "none")
    if mode != "none":
        assert config.vllm_importance_sampling_mode == f"{level}_{mode}"
    assert config.vllm_importance_sampling_clip_min == low
    assert config.vllm_importance_sampling_clip_max == high


def test_the_default_correction_is_trls_default() -> None:
    plain = GRPOConfig("unused", use_cpu=True, bf16=False, report_to="none")
    ours = engine_arguments(TrainingSpec())
    for name, value in ours.items():
        if name.startswith("vllm_importance"):
            assert getattr(plain, name) == value, name


def test_kl_guard_counts_consecutive_steps(tmp_path: Path) -> None:
    guard = KLGuard(GuardSpec(max_kl=1.0, max_kl_steps=2))
    log = (
        TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"),
        TrainerState(global_step=7),
        TrainerControl(),
    )
    for kl in (2.0, 0.5, math.nan):
        guard.on_log(*log, logs={"kl": kl})
    guard.on_log(*log, logs={"loss": 0.0})
    with pytest.raises(
        DivergedKL, match=r"above guard.maxKL = 1.0 for 2 steps, 3 at step 7"
    ) as end:
        guard.on_log(*log, logs={"kl": 3.0})
    assert end.value.step == 5, "the last step before the KL was above"


def test_plan_fields_reach_the_configurations() -> None:
    arguments = config_arguments(
        changed(
            zero_stage=3,
            strategy="Sharded",
            gather_for_generation=False,
            gradient_checkpointing=True,
        )
    )
    assert arguments["ds3_gather_for_generation"] is False
    assert arguments["gradient_checkpointing"] is True
    assert arguments["logging_nan_inf_filter"] is False
    assert arguments["save_total_limit"] is None
    assert arguments["deepspeed"]["zero_optimization"]["stage"] == 3
    assert config_arguments(changed(optimizer="AdamW8bit"))["optim"] == "adamw_8bit"
    assert config_arguments(changed(strategy="None"))["beta"] == 0.0
    offloaded = deepspeed_config(changed(zero_stage=2, offload="CPU", accelerator="GPU").execution)
    assert offloaded["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
    }
    apart = deepspeed_config(changed(zero_stage=3, gather_for_generation=False).execution)[
        "zero_optimization"
    ]
    assert (apart["stage3_prefetch_bucket_size"], apart["stage3_max_reuse_distance"]) == (0, 0)
