"""The time model against published runs, and what must hold of it whatever the constants are."""

from dataclasses import asdict, replace
from itertools import pairwise
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import Learned, LearnedPrompts, MeasuredStep
from grpo_codegen.calibration import fit as fitting
from grpo_codegen.calibration.__main__ import main
from grpo_codegen.calibration.fit import errors_of, expected_share, fit, stored_errors
from grpo_codegen.calibration.rows import NODE, predictions, published_runs
from grpo_planner.hardware.products import Product, lookup_product
from grpo_planner.memory.engine import cached_blocks
from grpo_planner.memory.phases import predict
from grpo_planner.memory.setup import Engine, Setup
from grpo_planner.model.catalogue import lookup_shape
from grpo_planner.model.shapes import Shape
from grpo_planner.plan import plan_job
from grpo_planner.time.constants import FITTED, Constants, stored_fit
from grpo_planner.time.lengths import longest, thinning
from grpo_planner.time.sampling import PLANNED_ENGINE, SEVERAL_NODES, generation_seconds
from grpo_planner.time.step_time import step_time
from grpo_planner.time.training import (
    expert_seconds,
    micro_batch_seconds,
    pass_seconds,
    trained_length,
)
from tests.generated import cases
from tests.unit.planning import H100, QWEN_7B, inventory, nodes, spec

_, ROWS = published_runs()
STEPS = [row for row in ROWS if "step" in row.seconds]


def test_every_run_has_a_source_and_no_source_is_without_runs() -> None:
    sources, rows = published_runs()
    assert {row.source for row in rows} == set(sources)
    assert len(rows) >= 60
    assert len(STEPS) >= 25
    assert len({(row.model, row.gpu, row.gpus) for row in STEPS}) >= 8


def test_the_stored_constants_are_the_fit_of_the_stored_runs() -> None:
    """Fails when calibration.yaml or the model has changed since the last fit."""
    refitted = asdict(fit(ROWS, FITTED))
    for name, value in asdict(FITTED).items():
        assert abs(log(refitted[name] / value)) < 0.02, f"{name}: run the fit again"
    assert stored_fit().share == expected_share(ROWS)
    assert len(Constants.meanings()) <= 12


def test_unseen_steps_are_predicted_as_well_as_promised() -> None:
    errors = stored_errors()
    assert set(errors.left_out) == {row.key for row in ROWS}
    whole = errors.parts["step"]
    assert whole.count == len(STEPS)
    assert whole.near >= 0.8
    assert whole.worst <= 2.5
    assert errors.parts["training"].median <= 1.3
    assert errors.parts["generation"].median <= 1.3
    seen = errors_of([each for row in STEPS for each in predictions(row, FITTED)])
    assert seen.near >= 0.7


def test_a_source_can_be_left_out_and_is_then_predicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "ROUNDS", 1)  # that it converges is shown above
    monkeypatch.setattr("sys.argv", ["calibration", "fit", "--without", "trl-5892"])
    main()
    assert "trl-5892 Qwen/Qwen3-0.6B 1 x NVIDIA-H100-80GB-HBM3 sync" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["calibration", "fit", "--without", "nobody"])
    with pytest.raises(SystemExit, match="no source begins with nobody: there are nemo-959"):
        main()


LIMITS = st.integers(2, 65536)
MEANS = st.floats(0.001, 1.0)
RUNAWAYS = st.floats(0.0, 0.3)


@settings(max_examples=cases(200))
@given(limit=LIMITS, share=MEANS, runaway=RUNAWAYS, count=st.integers(1, 4096))
def test_a_batch_thins_out_within_its_limit_and_has_its_mean(
    limit: int, share: float, runaway: float, count: int
) -> None:
    mean = share * limit
    stretches = thinning(mean, limit, runaway)
    assert sum(stretch.tokens for stretch in stretches) == pytest.approx(limit)
    survivors = [stretch.survivors for stretch in stretches]
    assert survivors == sorted(survivors, reverse=True)
    counted = sum(stretch.tokens * stretch.survivors for stretch in stretches)
    assert counted == pytest.approx(mean, rel=0.1, abs=0.01 * limit)
    last = longest(mean, limit, runaway, count)
    assert 0 < last <= limit * (1 + 1e-9)
    assert longest(mean, limit, runaway, count + 1) >= last


NAMES = ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"]
SHAPES = [shape for name in NAMES if (shape := lookup_shape(name))]
SETUPS = st.builds(
    Setup,
    precision=st.sampled_from(["bfloat16", "mixed"]),
    prompt=st.integers(1, 2048),
    completion=st.integers(16, 16384),
    expected=st.integers(1, 16384),
    micro_batch=st.integers(1, 16),
    accumulation=st.integers(1, 8),
    generation_batch=st.integers(1, 256),
    world=st.just(8),
    zero=st.sampled_from([2, 3]),
    engine=st.sampled_from(
        [None, Engine(kind="Colocated", length=32768, tensor_parallel=2, sleeps=True)]
    ),
)


@settings(max_examples=cases(200))
@given(setup=SETUPS, calls=st.integers(1, 4), shape=st.sampled_from(SHAPES))
def test_time_rises_with_work_and_falls_with_hardware(
    setup: Setup, calls: int, shape: Shape
) -> None:
    hardware = lookup_product(H100)

    def seconds(other: Setup, gpu: Product = hardware, times: float = calls) -> float:
        return step_time(shape, other, gpu, 1, times).total

    now = seconds(setup) * (1 + 1e-9)
    at_limit = replace(setup, expected=setup.completion)
    longer = replace(setup, expected=setup.mean_completion + 1)
    assert setup.mean_completion <= setup.completion
    assert seconds(setup) <= seconds(longer) * (1 + 1e-9) <= seconds(at_limit) * (1 + 1e-6)
    assert seconds(setup, times=calls + 1) >= seconds(setup)
    assert seconds(replace(setup, accumulation=setup.accumulation + 1)) >= seconds(setup)
    assert seconds(replace(setup, prompt=setup.prompt + 64)) >= seconds(setup)
    assert seconds(setup, replace(hardware, bandwidth=2 * hardware.bandwidth)) <= now
    assert seconds(setup, replace(hardware, link=2 * hardware.link)) <= now
    assert seconds(setup, replace(hardware, teraflops=2 * hardware.teraflops)) <= now
    assert trained_length(setup, FITTED) <= setup.length * (1 + 1e-9)


@settings(max_examples=cases(400))
@given(
    setup=SETUPS,
    places=st.lists(st.integers(1, 512), min_size=2, max_size=6),
    shape=st.sampled_from(SHAPES),
)
def test_no_engine_is_slower_for_sampling_more_at_a_time(
    setup: Setup, places: list[int], shape: Shape
) -> None:
    completions = max(places)
    engine = Engine(kind="Colocated", length=32768)

    def seconds(at_once: int) -> float:
        of_all = replace(engine, most_sequences=at_once)
        sampled = replace(setup, generation_batch=completions, engine=of_all)
        return generation_seconds(shape, sampled, lookup_product(H100), completions / at_once)

    times = [seconds(at_once) for at_once in sorted(places)]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(times))


def test_a_pass_is_never_shorter_than_its_launches_which_gpus_of_one_copy_share() -> None:
    shape, hardware = SHAPES[0], lookup_product(H100)
    assert shape is not None

    def seconds(tokens: int, **shares: int) -> float:
        return micro_batch_seconds(shape, hardware, tokens, 128, FITTED, **shares)

    launched = shape.layers * FITTED.layer_seconds
    assert seconds(1) == pytest.approx(launched)
    assert seconds(1, shared=4) == pytest.approx(4 * launched)
    assert seconds(1, units=15) == pytest.approx(15 * launched)
    many = seconds(65536)
    assert many == pass_seconds(shape, hardware, 65536, 128, FITTED) > launched
    assert seconds(65536, shared=4) == many


def test_experts_are_bound_by_memory_and_dense_models_have_none() -> None:
    dense, experts = SHAPES
    assert dense is not None
    assert experts is not None
    hardware = lookup_product(H100)
    slower = replace(hardware, teraflops=hardware.teraflops / 8)
    assert expert_seconds(dense, hardware, 4096, FITTED) == 0
    seconds = expert_seconds(experts, hardware, 4096, FITTED)
    assert seconds == expert_seconds(experts, slower, 4096, FITTED) > 0
    narrow = replace(hardware, bandwidth=hardware.bandwidth / 2)
    assert expert_seconds(experts, narrow, 4096, FITTED) == pytest.approx(2 * seconds)


def test_a_row_declares_what_its_adapter_and_its_engine_over_nodes_cost() -> None:
    adapted = next(row for row in ROWS if row.adapter)
    assert adapted.units == 15
    assert adapted.overheads.launches > 1
    plain = adapted.model_copy(update={"adapter": False})
    assert (plain.units, plain.overheads) == (1, PLANNED_ENGINE)
    over_nodes = next(row for row in ROWS if row.tensor_parallel > NODE)
    assert over_nodes.overheads == SEVERAL_NODES


STEP = MeasuredStep(
    gpu_product=H100, completion_length=400, generation_seconds=30.0, training_seconds=8.0,
    predicted_generation_seconds=10.0, predicted_training_seconds=8.0,
)  # fmt: skip


def test_the_next_plan_uses_the_length_and_the_seconds_that_were_measured() -> None:
    there = inventory(nodes(1, 8, H100))
    job = spec(QWEN_7B, training__maxCompletionLength=1024, generation__engine="Auto")
    usual = plan_job(job, there).chosen
    measured = plan_job(job, there, learned=Learned(step=STEP)).chosen
    assert usual is not None
    assert measured is not None
    assert usual.expected_completion_length == round(stored_fit().share * 1024)
    assert f"from {len(STEPS)} published runs" in usual.reason
    assert measured.expected_completion_length == 400
    assert "±10%, measured on this cluster" in measured.reason
    declared = job.training.model_copy(update={"expected_completion_length": 77})
    asked = job.model_copy(update={"training": declared})
    chosen = plan_job(asked, there, learned=Learned(step=STEP)).chosen
    assert chosen is not None
    assert chosen.expected_completion_length == 77
    elsewhere = STEP.model_copy(update={"gpu_product": "NVIDIA-L4"})
    other = plan_job(job, there, learned=Learned(step=elsewhere)).chosen
    assert other is not None
    assert other.estimated_step_seconds < measured.estimated_step_seconds  # type: ignore[operator]


def test_prompts_are_as_long_as_the_preflight_measured_in_the_times_of_a_plan() -> None:
    there = inventory(nodes(1, 8, H100))
    for engine in ("Transformers", "Auto"):
        job = spec(QWEN_7B, training__maxPromptLength=8192, generation__engine=engine)
        usual, short, longer = (
            plan_job(job, there, learned=Learned(prompts=prompts)).chosen
            for prompts in (
                None, LearnedPrompts(mean=100, p95=300), LearnedPrompts(mean=9000, p95=20000)
            )
        )  # fmt: skip
        assert usual is not None
        assert short is not None
        assert short.estimated_step_seconds < 0.8 * usual.estimated_step_seconds  # type: ignore[operator]
        # what is longer than maxPromptLength is not trained on
        assert longer == usual


@given(
    prompt=st.integers(1, 4096),
    mean=st.integers(1, 8192),
    p95=st.integers(1, 8192),
    more=st.integers(0, 512),
    engine=st.sampled_from([None, Engine(kind="Colocated", length=8192)]),
)
@settings(max_examples=cases(300))
def test_longer_prompts_never_make_a_step_shorter_and_memory_is_for_the_longest(
    prompt: int, mean: int, p95: int, more: int, engine: Engine | None
) -> None:
    shape, hardware = SHAPES[0], lookup_product(H100)
    assert shape is not None
    assert hardware is not None

    def setup(prompts: LearnedPrompts | None) -> Setup:
        return Setup(
            precision="bfloat16", prompt=prompt, prompts=prompts, completion=512, micro_batch=2,
            generation_batch=8, engine=engine,
        )  # fmt: skip

    def seconds(prompts: LearnedPrompts | None) -> float:
        return step_time(shape, setup(prompts), hardware, 1, 1).total

    now = seconds(measured := LearnedPrompts(mean=mean, p95=p95))
    assert now <= seconds(LearnedPrompts(mean=mean + more, p95=p95 + more)) * (1 + 1e-9)
    assert now <= seconds(None) * (1 + 1e-9)
    # memory is proven for the longest prompt, with a share of an engine's cache for those at a time
    if engine is None:
        assert predict(shape, setup(measured)) == predict(shape, setup(None))
    else:
        assert cached_blocks(setup(measured), 8) <= cached_blocks(setup(None), 8)


@pytest.mark.parametrize(
    ("change", "near"),
    [
        ({"completion_length": 410}, True),
        ({"completion_length": 500}, False),
        ({"generation_seconds": 31.0}, True),
        ({"training_seconds": 12.0}, False),
        ({"gpu_product": "NVIDIA-L4"}, False),
    ],
)
def test_a_step_near_what_is_known_is_not_learned_anew(
    change: dict[str, object], near: bool
) -> None:
    assert STEP.model_copy(update=change).is_near(STEP) is near
    absurd = STEP.model_copy(update={"generation_seconds": 1e9})
    assert absurd.generation_factor == 20.0
    assert STEP.model_copy(update={"predicted_generation_seconds": 0.0}).generation_factor == 1.0
