"""The outcome of a run whose engine does not start, or computes other numbers than the trainer.

vLLM's part is played by a class that fails at one place; what real vLLM says of settings that it
can't start with, and of numbers that are wrong, engine_starts.py tells.
"""

import itertools
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_api.plan.plan import MISMATCH_LIMITS, TrainingPlan
from grpo_api.report.report import Outcome, Result, Standstill
from grpo_api.report.root_cause import blame_engine_of_gang, is_engine_start
from grpo_api.report.training_metrics import COMPLETION_LENGTH, ENGINE_MISMATCH
from grpo_api.spec.generation import EngineArguments, EnginePlan
from grpo_trainer.engine_pod.vllm_arguments import engine_environment, vllm_arguments
from grpo_trainer.generation.colocated import ColocatedGeneration
from grpo_trainer.generation.generation_base import EngineSetup
from grpo_trainer.process.watchdog import (
    Stacks,
    add_standstill,
    blame_engine,
    crash_frames,
)
from grpo_trainer.runtime.errors import EngineMismatch, classify_error, engine_cause
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.training.guard import LEAST_TOKENS, EngineGuard, largest_mean_difference
from grpo_trainer.training.training_run import requested_bytes
from tests.support.ranks import demo_model, runs
from tests.trainer.engine_runs import engine_run
from tests.trainer.test_engine_colocated import FakeEngine

ENGINE: dict[str, Any] = {
    "kind": "Colocated",
    "memoryShare": 0.1,
    "maxModelLength": 64,
    "maxSequences": 4,
}
PROMPTS = [[3, 4, 5], [6]]


class FailingEngine(FakeEngine):
    """vLLM that raises an error at one place, or tells numbers that are none."""

    fails_at = ""
    error: Exception = RuntimeError()
    logprob = -0.5
    tokens: tuple[int, ...] = (7,)

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self._reach("constructor")

    def _reach(self, place: str) -> None:
        if place == self.fails_at:
            raise self.error

    def weights_learn(self, *arguments: Any) -> Any:
        """Fails, has problems, or learns."""
        self._reach("weights_learn")
        sources, _ = super().weights_learn(*arguments)
        return sources, ["an expert"] if self.fails_at == "layout" else []

    def sleep(self, *, level: int) -> None:
        """Sleeps without its weights."""
        assert level == 2
        self._reach("sleep")

    def wake_up(self) -> None:
        """Wakes."""
        self._reach("wake_up")

    def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
        """The same tokens for each prompt."""
        self._reach("generate")
        steps = [{token: SimpleNamespace(logprob=self.logprob)} for token in self.tokens]
        output = SimpleNamespace(token_ids=self.tokens, logprobs=steps, finish_reason="stop")
        return [SimpleNamespace(outputs=[output]) for _ in prompts]


def make_plan(folder: Path, **generation: Any) -> TrainingPlan:
    """A plan with an engine that sleeps, which the planner has chosen."""
    execution = {"engine": ENGINE | {"sleep": True}}
    plan = runs.plan(folder, "None", training={"beta": 0.0}, execution=execution)
    spec = plan.generation.model_copy(update=generation)
    return plan.model_copy(update={"generation": spec})


def generated(plan: TrainingPlan, folder: Path) -> ColocatedGeneration:
    """An engine that has been made, and has sampled once."""
    policy: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    setup = EngineSetup(plan, folder, PhaseClock(lambda: 0.0), lambda _: None, lambda: None)
    generation = ColocatedGeneration(setup, policy, [1])
    generation.generate(PROMPTS, None, 1)
    return generation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model."""
    return demo_model.save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[FailingEngine]:
    """vLLM for this process, on a machine that seems to have a GPU."""

    class Engine(FailingEngine):
        pass

    played = SimpleNamespace(LLM=Engine, SamplingParams=lambda **_: None)
    platform = SimpleNamespace(get_device_capability=lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "vllm", played)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return Engine


def told(run: Callable[[], object]) -> tuple[Result, str | None, str]:
    """The result, its cause and its message."""
    with pytest.raises(Exception) as ended:  # noqa: PT011 - which one is what is asked
        run()
    result, message = classify_error(ended.value)
    return result, engine_cause(ended.value), message


STARTS: dict[str, tuple[str, Exception]] = {
    "no room for the cache": ("constructor", ValueError("No available memory for cache blocks")),
    "graphs can't be captured": (
        "constructor",
        RuntimeError("CUDA error: operation not permitted"),
    ),
    "the core does not come": ("constructor", TimeoutError("Timed out waiting for engine core")),
    "the GPU lacks the dtype": ("constructor", ValueError("Bfloat16 is only supported on GPUs")),
    "a kernel does not compile": ("constructor", OSError("Could not find nvcc")),
    "the worker lacks a method": ("weights_learn", AttributeError("no attribute 'model'")),
    "it can't sleep": ("sleep", RuntimeError("cumem allocator error")),
    "it can't wake": ("wake_up", RuntimeError("cumem allocator error")),
    "it can't sample": ("generate", RuntimeError("Triton Error [CUDA]: invalid device function")),
}


@pytest.mark.parametrize("cause", STARTS)
def test_an_error_until_the_first_completions_is_a_failed_start(
    cause: str, folder: Path, vllm: type[FailingEngine]
) -> None:
    vllm.fails_at, vllm.error = STARTS[cause]
    result, why, message = told(lambda: generated(make_plan(folder), folder))
    assert (result, why) == (Result.ENGINE_FAILED, "NotStarted")
    assert f"vLLM did not start: {type(vllm.error).__name__}: {vllm.error}" in message


class Unloadable(ModuleType):
    """vLLM whose libraries don't load: it imports its parts when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.usefixtures("vllm")
def test_vllm_that_does_not_load_is_a_failed_start(folder: Path) -> None:
    sys.modules["vllm"] = Unloadable("vllm")  # the fixture puts it back
    result, why, message = told(lambda: generated(make_plan(folder), folder))
    assert (result, why) == (Result.ENGINE_FAILED, "NotStarted")
    assert "vLLM did not start: OSError: libcuda.so.1" in message


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "OutOfMemory"),
        (RuntimeError("Connection closed by peer [10.0.0.1]:1"), "Error"),
    ],
)
def test_a_start_that_fails_for_another_known_cause_keeps_it(
    error: Exception, result: str, folder: Path, vllm: type[FailingEngine]
) -> None:
    vllm.fails_at, vllm.error = "constructor", error
    assert told(lambda: generated(make_plan(folder), folder))[:2] == (result, None)


def test_a_gpu_without_room_for_the_engine_is_a_shortage_and_no_failed_start(
    folder: Path, vllm: type[FailingEngine]
) -> None:
    """vLLM looks before it allocates, and raises a ValueError."""
    words = (
        "Free memory on device cuda:0 (3.13/79.18 GiB) on startup is less than desired GPU memory "
        "utilization (0.4, 31.5 GiB). Decrease GPU memory utilization or reduce GPU memory used by "
        "other processes."
    )
    vllm.fails_at, vllm.error = "constructor", ValueError(words)
    result, why, message = told(lambda: generated(make_plan(folder), folder))
    assert (result, why) == (Result.OUT_OF_MEMORY, None)
    assert words in message
    assert requested_bytes(message) == 31.5 * 2**30


def test_an_error_after_the_first_completions_is_no_failed_start(
    folder: Path, vllm: type[FailingEngine]
) -> None:
    generation = generated(make_plan(folder), folder)
    vllm.fails_at, vllm.error = "generate", RuntimeError("CUDA error: an illegal memory access")
    result, why, _ = told(lambda: generation.generate(PROMPTS, None, 1))
    assert (result, why) == (Result.ERROR, None)


@pytest.mark.parametrize(
    ("generation", "result"),
    [
        ({}, "EngineFailed"),
        ({"engine": "Colocated"}, "EngineFailed"),
        ({"fallback": "Never"}, "BadInput"),
    ],
)
@pytest.mark.parametrize("cause", ["Missing", "Unprovable"])
def test_what_every_engine_lacks_is_the_users_to_answer_where_nothing_else_may_sample(
    cause: str,
    generation: dict[str, Any],
    result: str,
    folder: Path,
    vllm: type[FailingEngine],
) -> None:
    vllm.fails_at = "layout"
    if cause == "Missing":
        sys.modules["vllm"] = None  # type: ignore[assignment]  # the fixture puts it back
    found, why, message = told(lambda: generated(make_plan(folder, **generation), folder))
    assert (found, why) == (result, cause if result == "EngineFailed" else None)
    assert ("has no vLLM" if cause == "Missing" else "an expert") in message


@pytest.mark.parametrize(
    ("stage", "waiting", "result"),
    [("Compiling", False, "EngineFailed"), ("Compiling", True, "Hang"), ("Proving", False, "Hang")],
)
def test_a_rank_that_hangs_in_the_start_of_its_engine_says_so(
    stage: str, waiting: bool, result: str
) -> None:
    still = Standstill(silent_seconds=1800, waiting=waiting)
    outcome = blame_engine(Outcome(result=Result.HANG, rank=3, standstill=still), stage, "")
    cause = "NotStarted" if result == "EngineFailed" else None
    assert (outcome.result, outcome.engine_cause) == (result, cause)
    assert ("vLLM on rank 3 hangs" in outcome.message) == (result == "EngineFailed")
    assert blame_engine(Outcome(result=Result.HANG), stage, "").result is Result.HANG


@pytest.mark.parametrize("place", ["constructor", "weights_learn", "wake_up", "generate"])
def test_a_hang_and_a_crash_are_the_engines_until_it_has_sampled_once(
    place: str, folder: Path, vllm: type[FailingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []

    def take_stack(_: FailingEngine, name: str) -> None:
        if name == place:
            stacks = Stacks().take()
            placed = add_standstill(Outcome(result=Result.HANG), 1800, stacks)
            results = blame_engine(placed, "Training", stacks).result
            dump = stacks.replace("Current", "Fatal Python error: Segmentation fault\n\nCurrent")
            taken.append(is_engine_start(crash_frames(dump)))
            assert taken[-1] == (results is Result.ENGINE_FAILED)
            # By another thread, as the watchdog takes them: this one's would have its own frames.
            with ThreadPoolExecutor(1) as thread:
                seen = thread.submit(Stacks().take).result()
            hang = add_standstill(Outcome(result=Result.HANG), 1800, seen)
            of_gang = blame_engine_of_gang(hang, [hang], is_repeated=True).result
            assert of_gang is (Result.HANG if taken[-1] else Result.ENGINE_FAILED)

    monkeypatch.setattr(FailingEngine, "_reach", take_stack)
    generation = generated(make_plan(folder), folder)
    generation.release_memory()
    generation.generate(PROMPTS, None, 1)
    assert taken[0]
    assert taken[1:] == ([] if place in {"constructor", "weights_learn"} else [False])


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_log_probabilities_that_are_no_numbers_are_a_mismatch(
    logprob: float, folder: Path, vllm: type[FailingEngine]
) -> None:
    vllm.logprob = logprob
    result, _, message = told(lambda: generated(make_plan(folder), folder))
    assert result is Result.ENGINE_MISMATCH
    assert "2 of the engine's log-probabilities" in message


@pytest.mark.parametrize("tokens", [(7, 1, 7), (1, 1), (7,) * (runs.COMPLETION + 1)])
def test_completions_that_do_not_end_as_they_should_are_a_mismatch(
    tokens: tuple[int, ...], folder: Path, vllm: type[FailingEngine]
) -> None:
    """Token 1 ends a completion."""
    plan = make_plan(folder)
    for right in ((7, 1), (1,), (7,) * runs.COMPLETION):
        vllm.tokens = right
        assert generated(plan, folder).failures == 0
    vllm.tokens = tokens
    result, _, message = told(lambda: generated(plan, folder))
    assert result is Result.ENGINE_MISMATCH
    assert "2 completions of generation 0 go on after a token that ends them" in message


def test_model_runner_v1_has_no_graphs_and_no_sleep_whatever_the_job_says(folder: Path) -> None:
    plan = make_plan(folder, engine_arguments=EngineArguments(enforce_eager=False))
    for runner, eager in (("Auto", False), ("V1", True)):
        engine = EnginePlan.model_validate(ENGINE | {"modelRunner": runner})
        on_gpu = {"accelerator": "GPU", "engine": engine}
        made = plan.model_copy(update={"execution": plan.execution.model_copy(update=on_gpu)})
        assert vllm_arguments(made, folder, None)["enforce_eager"] is eager
        assert engine_environment(engine).get("VLLM_USE_V2_MODEL_RUNNER") == (
            "0" if eager else None
        )


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, None), (None, None)])
def test_an_engine_leaves_the_trainer_the_precision_that_it_asks_for(
    tf32: bool | None, precision: str | None, folder: Path
) -> None:
    """vLLM's worker sets that of the process, which is the trainer's, too, to this variable."""
    plan = make_plan(folder)
    overrides = plan.training.overrides.model_copy(update={"tf32": tf32})
    training = plan.training.model_copy(update={"overrides": overrides})
    generated(plan.model_copy(update={"training": training}), folder)
    assert os.environ.get("VLLM_FLOAT32_MATMUL_PRECISION") == precision


def guard(limit: float | None = 0.01, tokens: int = 8) -> EngineGuard:
    """The guard over an engine in float32 whose generations have 8 completions."""
    engine = EnginePlan.model_validate(ENGINE | {"maxMismatch": limit})
    return EngineGuard(engine, "float32", completions=tokens)


generations = itertools.count()


def log(judge: EngineGuard, mean: float | None, length: float = 100.0) -> None:
    """A new generation has this mean difference, of completions of this length."""
    metrics = {"kl": [0.1]}
    if mean is not None:
        metrics |= {ENGINE_MISMATCH.trl: [mean], COMPLETION_LENGTH.trl: [length]}
    judge.judge(next(generations), 7, metrics)


@pytest.mark.parametrize("found", [0.02, math.nan, math.inf])
def test_an_engine_that_computes_otherwise_ends_the_run(found: float) -> None:
    for mean in (0.01, None):
        log(guard(), mean)
    with pytest.raises(EngineMismatch, match=r"at step 7 .* 0\.01 are allowed"):
        log(guard(), found)


@pytest.mark.parametrize("wrong", [0.09, 0.15])
def test_an_engine_that_computes_otherwise_for_one_prompt_of_many_ends_the_run(
    wrong: float,
) -> None:
    """The mean over 128 completions hides one that is 0.15 nats apart."""
    sampled = torch.full((128, 200), -1.0)
    trained = sampled.clone()
    trained[77] += wrong
    trained[5, 0] += 0.99 * LEAST_TOKENS * 0.1
    trained[100, 0] = math.nan  # which the loss shows
    mask = torch.ones(128, 200)
    mask[77, 150:] = 0
    trained[:, 190:] = math.nan
    mask[:, 190:] = 0
    names = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
    whole = (trained, sampled, mask)
    generation = [
        {name: part[first : first + 64] for name, part in zip(names, whole, strict=True)}
        for first in (0, 64)
    ]
    metrics = {ENGINE_MISMATCH.trl: [0.001], COMPLETION_LENGTH.trl: [200.0]}

    def read_largest() -> float:
        return largest_mean_difference(generation)

    if wrong < 0.1:
        guard().judge(1, 7, metrics, read_largest)
        return
    with pytest.raises(EngineMismatch, match=r"one completion's .* 10 times .* \(0\.01\)"):
        guard().judge(1, 7, metrics, read_largest)


@pytest.mark.parametrize("dtype", MISMATCH_LIMITS)
def test_a_single_unlucky_token_ends_no_run(dtype: Any) -> None:
    limit = MISMATCH_LIMITS[dtype]
    judge, unlucky = guard(limit, tokens=4), 0.99 * limit * LEAST_TOKENS
    log(judge, unlucky / 4, length=1.0)
    for _ in range(200):
        log(judge, 0.0, length=1.0)
    log(judge, unlucky / 4, length=1.0)


def test_small_generations_are_judged_together() -> None:
    judge = guard(0.1, tokens=4)
    for _ in range(int(LEAST_TOKENS // 4 / 1.5)):
        log(judge, 0.15, length=1.0)
    with pytest.raises(EngineMismatch):
        log(judge, 0.15, length=1.0)
    with pytest.raises(EngineMismatch):
        log(guard(0.1, tokens=4), 3.0, length=8.0)


def test_a_canary_is_judged_by_its_own_tokens() -> None:
    engine = EnginePlan.model_validate(ENGINE | {"maxMismatch": 0.1})
    judge = EngineGuard(engine, "bfloat16", completions=64, canary_tokens=32)
    log(judge, 0.3)
    with pytest.raises(EngineMismatch):
        log(judge, 0.35)


def test_a_generation_is_judged_once_however_many_steps_are_made_of_it() -> None:
    judge = guard(0.1, tokens=4)
    found = {ENGINE_MISMATCH.trl: [0.15], COMPLETION_LENGTH.trl: [1.0]}
    for step in range(1, LEAST_TOKENS):
        judge.judge(3, step, found)


def test_old_generations_do_not_hide_an_engine_that_goes_wrong() -> None:
    judge = guard(0.1)
    for _ in range(50):
        log(judge, 0.0)
    with pytest.raises(EngineMismatch):
        log(judge, 0.2)


def test_a_plan_without_a_limit_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    judge = guard(None)
    for mean in (0.001, 0.5, 0.5, math.nan):
        log(judge, mean)
    assert caplog.text.count("nats apart from the trainer's") == 1


@pytest.fixture(scope="module")
def facts(vllm_cpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of real engines."""
    found: dict[str, Any] = engine_run("engine_starts", tmp_path_factory.mktemp("starts"), vllm_cpu)
    return found


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("longer than the model", "max_model_len"),
        ("no room for one completion", "No available memory for the cache blocks"),
    ],
)
def test_real_vllm_that_does_not_start_is_named_with_its_words(
    cause: str, words: str, facts: dict[str, Any]
) -> None:
    found = facts[cause]
    assert (found["result"], found["cause"]) == ("EngineFailed", "NotStarted")
    assert found["message"].startswith("vLLM did not start: ")
    assert words in found["message"]


@pytest.mark.realtime
def test_real_vllm_that_finds_no_room_is_a_shortage(facts: dict[str, Any]) -> None:
    found = facts["no free memory"]
    assert (found["result"], found["cause"]) == ("OutOfMemory", None)
    assert requested_bytes(found["message"]) == 40 * 2**30


@pytest.mark.realtime
@pytest.mark.parametrize("cause", ["another dtype", "another temperature"])
def test_a_real_engine_that_computes_otherwise_is_found_at_the_first_step(
    cause: str, facts: dict[str, Any]
) -> None:
    assert facts["right"]["steps"] == 2
    found = facts[cause]
    assert (found["result"], found["steps"]) == ("EngineMismatch", 0)
    assert "at step 1 the log-probabilities" in found["message"]


@pytest.mark.realtime
def test_the_first_rung_is_the_model_runner_that_tests_on_cpus_run(facts: dict[str, Any]) -> None:
    assert facts["right"]["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert facts["vLLM's choice"] == facts["right"]
