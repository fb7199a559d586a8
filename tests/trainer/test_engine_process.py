"""An engine pod's process around its engine: what it takes from the plan, and every end with words.
Without vLLM."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.plan.plan import EngineAddresses, TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.spec.generation import EngineArguments, EnginePlan, GenerationSpec
from grpo_api.text.contract import (
    ENGINE_BIND_ENV,
    PLAN_ENV,
    PROGRESS_BIND_ENV,
    TERMINATION_LOG_ENV,
)
from grpo_trainer.engine_pod import __main__ as program
from grpo_trainer.engine_pod.__main__ import engine_settings, model_folder
from grpo_trainer.engine_pod.vllm_arguments import (
    ENGINE_ENVIRONMENT,
    attention_backend,
    engine_environment,
    require_visible_segments,
    vllm_arguments,
)
from grpo_trainer.gang.placement import Placement
from grpo_trainer.generation.colocated import ColocatedGeneration
from grpo_trainer.generation.generation_base import EngineSetup
from grpo_trainer.hub.repositories import CONFIG_FILES, Hub
from grpo_trainer.process.compile_cache import CompileCache
from grpo_trainer.process.process_setup import set_defaults
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.errors import BadInput, EngineMissing, Transient
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.training import build_run
from harness.controlplane import free_port
from tests.support.ranks import runs
from tests.support.ranks.fork_servers import ISOLATED
from tests.trainer.test_phases import Counters
from tests.virtual_time import virtually

pytestmark = pytest.mark.realtime


def plan(folder: Path, kind: Any = "Servers", **execution: Any) -> TrainingPlan:
    """One with an engine."""
    engine = EnginePlan(
        kind=kind,
        replicas=1,
        tensor_parallel=2,
        memory_share=0.9,
        max_model_length=300,
        max_sequences=9000,
    )
    job = runs.plan(folder)
    changed = job.execution.model_copy(update={"engine": engine, **execution})
    return job.model_copy(
        update={"execution": changed, "engines": EngineAddresses(hosts=["127.0.0.1"])}
    )


def ended(folder: Path, job: TrainingPlan) -> tuple[int, Outcome]:
    """How the process of such a pod ends where there is no vLLM."""
    (folder / "plan.json").write_text(job.model_dump_json())
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        PLAN_ENV: str(folder / "plan.json"),
        TERMINATION_LOG_ENV: str(folder / "termination"),
        **ISOLATED,
    }
    done = subprocess.run(
        [sys.executable, "-m", "grpo_trainer.engine_pod"], env=environment, check=False, cwd=folder
    )
    return done.returncode, Outcome.model_validate_json((folder / "termination").read_text())


def test_an_image_without_vllm_is_named_with_the_way_out(tmp_path: Path) -> None:
    code, outcome = ended(tmp_path, plan(tmp_path))
    assert (code, outcome.result) == (EXIT_CODES[Result.ENGINE_FAILED], Result.ENGINE_FAILED)
    assert outcome.engine_cause == "Missing"
    assert "spec.image: this image has no vLLM" in outcome.message
    assert "generation.engine to Transformers" in outcome.message


def test_a_trainer_without_vllm_says_the_same_and_would_have_told_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "vllm", None)
    engine = EnginePlan(kind="Colocated", memory_share=0.1, max_model_length=300, max_sequences=8)
    job = plan(tmp_path, engine=engine)
    setup = EngineSetup(job, tmp_path, PhaseClock(lambda: 0.0), lambda _: None, lambda: None)
    with pytest.raises(
        EngineMissing,
        match=r"spec\.image: this image has no vLLM.*generation.engine to Transformers",
    ):
        ColocatedGeneration(setup, nn.Linear(1, 1), [])
    assert os.environ == ENGINE_ENVIRONMENT


def test_an_engine_gets_the_plans_settings_and_the_users_own(tmp_path: Path) -> None:
    arguments = EngineArguments(max_num_seqs=7, block_size=32)
    job = plan(tmp_path, autocast=True).model_copy(
        update={"generation": GenerationSpec(engine_arguments=arguments)}
    )
    settings = engine_settings(job, tmp_path, None)
    assert settings["worker_extension_cls"].endswith(".ReceivingWorker")
    assert (settings["load_format"], settings["tensor_parallel_size"]) == ("dummy", 2)
    assert (settings["dtype"], settings["max_model_len"]) == ("bfloat16", 300)
    assert (settings["max_num_seqs"], settings["block_size"]) == (7, 32)
    assert engine_settings(plan(tmp_path), tmp_path, None)["dtype"] == "float32"


@given(
    sequences=st.none() | st.integers(1, 65536),
    tokens=st.none() | st.integers(16, 1048576),
    in_parts=st.none() | st.booleans(),
)
def test_vllm_starts_with_every_size_of_a_pass(
    sequences: int | None, tokens: int | None, in_parts: bool | None
) -> None:
    """By its own rules (config/scheduler.py, verify_max_model_len)."""
    arguments = EngineArguments(
        max_num_seqs=sequences, max_num_batched_tokens=tokens, enable_chunked_prefill=in_parts
    )
    job = plan(Path("/models/demo")).model_copy(
        update={"generation": GenerationSpec(engine_arguments=arguments)}
    )
    settings = engine_settings(job, Path("/models/demo"), None)
    assert settings["max_num_batched_tokens"] >= settings["max_num_seqs"]
    # Its sampler counts a vocabulary for each, for which the plan has room for 9000.
    assert settings["max_num_seqs"] == min(sequences or 9000, 9000)
    if in_parts is False:
        assert settings["max_num_batched_tokens"] >= settings["max_model_len"]


CAPABILITIES = st.one_of(st.none(), st.tuples(st.integers(8, 12), st.integers(0, 9)))
CACHES = st.sampled_from([None, "auto", "fp8", "fp8_e4m3", "fp8_e5m2"])


def vllms_backends(capability: tuple[int, int], cache: str | None) -> list[str]:
    """vLLM 0.30's attention backends for this GPU and cache, in bfloat16, its first choice first
    (platforms/cuda.py, fa_utils.py)."""
    major = capability[0]
    order = ["FLASHINFER", "FLASH_ATTN"] if major == 10 else ["FLASH_ATTN", "FLASHINFER"]
    reads_cache = cache in (None, "auto") or (cache != "fp8_e5m2" and major in (9, 10))
    return [name for name in [*order, "TRITON_ATTN"] if name != "FLASH_ATTN" or reads_cache]


@given(dtype=st.sampled_from(["bfloat16", "float32"]), capability=CAPABILITIES, cache=CACHES)
def test_no_engine_takes_an_attention_that_has_to_be_compiled_by_nvcc(
    dtype: str, capability: tuple[int, int] | None, cache: Any
) -> None:
    wanted = attention_backend(dtype, capability, cache)
    if capability is None or dtype == "float32":
        # Neither FlashAttention nor FlashInfer has float32.
        assert wanted is None
    else:
        able = vllms_backends(capability, cache)
        assert (wanted or able[0]) in set(able) - {"FLASHINFER"}
    arguments = EngineArguments(kv_cache_dtype=cache)
    job = plan(Path("/models/demo"), autocast=dtype == "bfloat16").model_copy(
        update={"generation": GenerationSpec(engine_arguments=arguments)}
    )
    for settings in (
        vllm_arguments(job, Path("/models/demo"), capability),
        engine_settings(job, Path("/models/demo"), capability),
    ):
        assert (settings["dtype"], settings["attention_backend"]) == (dtype, wanted)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_construction_of_a_colocated_engine_is_a_stage_of_its_own(
    local_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(1, Placement(0, local_rank, 2, 1), 0.0)
    stages, published = [], []
    monkeypatch.setattr(
        build_run, "ColocatedGeneration", lambda *_: stages.append(recorder.current_stage)
    )
    monkeypatch.setattr(CompileCache, "publish", lambda _: published.append(local_rank))
    parts: Any = SimpleNamespace(folder=tmp_path, clock=PhaseClock(lambda: 0.0))
    make = build_run.engine_maker(plan(tmp_path, "Colocated"), parts, parts, recorder)
    assert make is not None
    make(nn.Linear(1, 1), [])
    assert stages == ["Compiling"]
    assert recorder.current_stage == "Proving"
    assert "engine" in recorder.progress.startup_seconds
    assert published == [0] * (local_rank == 0), "one process of a pod writes the archive"


def test_what_an_engine_takes_at_its_start_is_of_a_generation_and_not_of_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts awake, also where it sleeps while the policy is trained."""
    now = iter(range(99))
    counters, clock = Counters(monkeypatch), PhaseClock(lambda: float(next(now)))
    counters.use(30, left=20)
    monkeypatch.setattr(build_run, "ColocatedGeneration", lambda *_: counters.use(80, left=20))
    monkeypatch.setattr(CompileCache, "publish", lambda _: None)
    parts: Any = SimpleNamespace(folder=tmp_path, clock=clock)
    recorder = Recorder(1, Placement(0, 0, 2, 1), 0.0)
    make = build_run.engine_maker(plan(tmp_path, "Colocated"), parts, parts, recorder)
    assert make is not None
    make(nn.Linear(1, 1), [])
    counters.use(40, left=20)
    with clock.phase("forward"):
        pass
    assert (clock.peaks["load"], clock.peaks["generate"]) == (40, 80)
    assert clock.take_seconds()["generate"] == 0


def test_both_kinds_of_engines_keep_flashinfers_sampler_off_unless_the_job_wants_it() -> None:
    engine = plan(Path("/models/demo")).execution.engine
    assert engine is not None
    of_both = engine_environment(engine)
    for variables in (of_both, program.ENVIRONMENT | of_both):
        environment = {"VLLM_NO_USAGE_STATS": "0"}
        set_defaults(environment, variables)
        assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert environment["VLLM_NO_USAGE_STATS"] == "0"


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, True),
        (
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
            },
            True,
        ),
    ],
)
def test_an_engine_that_sleeps_is_refused_segments_that_it_would_not_see(
    environment: dict[str, str], visible: bool
) -> None:
    """torch reads PYTORCH_CUDA_ALLOC_CONF first."""
    if visible:
        require_visible_segments(environment)
        return
    with pytest.raises(BadInput, match=r"vLLM sees expandable segments only in"):
        require_visible_segments(environment)


def test_an_engine_needs_of_a_model_its_configuration_alone(tmp_path: Path) -> None:
    fetched: list[list[str]] = []

    class Fetching(Hub):
        def snapshot(self, _: Any, choose: Any) -> tuple[Path, str]:
            def fetch(names: list[str]) -> Path:
                fetched.append(names)
                return tmp_path

            return choose(fetch), "commit"

    assert model_folder(plan(tmp_path).model, Hub()) == tmp_path
    named = plan(tmp_path)
    named = named.model_copy(update={"model": named.model.model_copy(update={"name": "org/model"})})
    assert model_folder(named.model, Fetching()) == tmp_path
    assert fetched == [CONFIG_FILES]
    assert not any("safetensors" in name for name in CONFIG_FILES)
    with pytest.raises(BadInput, match="does not exist in the engine's pod"):
        model_folder(plan(tmp_path / "nowhere").model, Hub())


class FakeSampler:
    """An engine that goes on until it dies."""

    def __init__(self, *, dead: bool = False) -> None:
        self.dead = dead

    async def check(self) -> None:
        """Says that its process has died."""
        if self.dead:
            raise RuntimeError("EngineCore died")


def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: FakeSampler
) -> tuple[Exception, float]:
    """Why an engine ends that nobody talks to, and after how many seconds of its event loop."""
    monkeypatch.setenv(ENGINE_BIND_ENV, f"127.0.0.1:{free_port()}")
    monkeypatch.setenv(PROGRESS_BIND_ENV, "127.0.0.1:0")

    async def until_the_end() -> tuple[Exception, float]:
        end = await program.serve(plan(tmp_path), sampler)  # type: ignore[arg-type]
        return end, asyncio.get_running_loop().time()

    return virtually(until_the_end())


def test_an_engine_without_a_trainer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = plan(tmp_path)
    limit = 2 * hang_timeout_seconds("Training", job.guard, job.execution)
    end, seconds = served(tmp_path, monkeypatch, FakeSampler())
    assert isinstance(end, Transient)
    assert str(end).startswith("no word from rank 0 at 127.0.0.1 for ")
    assert limit < seconds <= limit + 2 * program.CHECK_SECONDS


def test_an_engine_whose_process_died_ends_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="EngineCore died"):
        served(tmp_path, monkeypatch, FakeSampler(dead=True))


class Child:
    """A process of vLLM's that is listed; one that has ended meanwhile can't be killed."""

    def __init__(self, *, ended: bool) -> None:
        self.ended = ended
        self.killed = False

    def kill(self) -> None:
        """As psutil does it."""
        if self.ended:
            raise psutil.NoSuchProcess(7)
        self.killed = True


def test_a_child_that_ends_by_itself_changes_neither_the_exit_code_nor_the_end_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children, codes = [Child(ended=True), Child(ended=False)], list[int]()
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: children)
    monkeypatch.setattr(os, "_exit", codes.append)
    program.exit_process(143)
    assert codes == [143]
    assert children[1].killed
