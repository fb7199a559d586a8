"""The planner's closed form against fake-tensor accounts of the real code: within 1 % of the total
peak.

An upgrade of transformers, PEFT, TRL or torch that moves memory fails here, and not on a GPU.
Widths are those of real models; most have few layers, since each further layer adds the same bytes,
and the terms around the head, which are the harder ones, weigh more then. The benchmark
memory_truth runs whole models.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.memory import states
from grpo_planner.plan import plan_job
from grpo_trainer.weights import proof
from tests.generated import cases as so_many
from tests.support.ledger.accounting import account
from tests.support.ledger.config_shapes import from_config
from tests.support.ledger.fake_models import Case
from tests.support.ledger.memory_cases import CASES, GATE, UNFUSED, case, counted, predicted
from tests.unit.test_planner_properties import GROUPS, jobs

TOLERANCE = 0.01
UNFUSED_TOLERANCE = 0.03
"""Of mixtures of experts and of attention without a kernel; too low by TOLERANCE at the most."""
pytestmark = (
    pytest.mark.no_cover
)  # fake tensors are all Python: a tracer takes a fifth of their time


def marked(cases: Iterable[Case]) -> list[ParameterSet]:
    """Those outside GATE are slow."""
    return [
        pytest.param(one, id=one.name, marks=[] if one in GATE else [pytest.mark.slow])
        for one in cases
    ]


@pytest.mark.parametrize("case", marked(CASES))
def test_the_total_peak_is_within_one_percent(case: Case) -> None:
    truth = account(case)
    adapter = truth.trained if case.lora_rank else 0
    assert truth.parameters == case.shape.parameters + adapter
    for accumulation in (1, 2):
        assert predicted(case, accumulation).peak == pytest.approx(
            counted(truth, accumulation), rel=TOLERANCE
        )


@pytest.mark.slow
def test_an_entropy_bonus_takes_no_more_than_its_entropies() -> None:
    small = replace(GATE[0], shape=replace(GATE[0].shape, layers=2))
    plain, bonus = account(small), account(replace(small, entropy_bonus=True))
    per_token = 16 * small.micro_batch * small.completion
    for accumulation in (1, 2):
        extra = counted(bonus, accumulation) - counted(plain, accumulation)
        assert 0 <= extra <= per_token


def test_the_gate_has_cases_of_the_lists() -> None:
    assert set(GATE) < {*CASES, *UNFUSED}


@pytest.mark.parametrize("case", marked(UNFUSED))
def test_experts_and_eager_attention_are_within_three_percent(case: Case) -> None:
    truth = account(case)
    adapter = truth.trained if case.lora_rank else 0
    assert truth.parameters == case.shape.parameters + adapter
    for accumulation in (1, 2):
        error = predicted(case, accumulation).peak / counted(truth, accumulation) - 1
        assert -TOLERANCE <= error <= UNFUSED_TOLERANCE, f"{error:+.2%}"


def as_planned(like: Case, job: GRPOJobSpec, plan: ExecutionPlan) -> Case:
    """One GPU's part of a plan, on a case's model; long texts and large batches are cut to what an
    account can make."""
    at_once = plan.generation_sub_batch or plan.micro_batch * plan.steps_per_generation
    return replace(
        like,
        precision="bfloat16"
        if plan.dtype == "bfloat16"
        else "mixed"
        if plan.autocast
        else "float32",
        micro_batch=min(8, plan.micro_batch),
        generation_batch=min(32, at_once),
        prompt=min(512, job.training.max_prompt_length),
        completion=min(1024, job.training.max_completion_length),
        checkpointing=plan.gradient_checkpointing,
        lora_rank=job.adapter.rank if plan.method == "LoRA" else 0,
        eight_bit=plan.optimizer == "AdamW8bit",
    )


def sampled(number: int) -> list[Case]:
    """So many different plans of random jobs on random clusters."""
    found: dict[Case, None] = {}

    @settings(max_examples=so_many(100))
    @given(jobs(), GROUPS, st.sampled_from([*CASES, *UNFUSED]))
    def plan(job: GRPOJobSpec, group: Node, like: Case) -> None:
        chosen = plan_job(job, Inventory((group,))).chosen
        if chosen and len(found) < number:
            found[as_planned(like, job, chosen)] = None

    plan()
    return list(found)


def most_over(one: Case) -> float:
    """By which share the prediction of a case may be too high."""
    return TOLERANCE if one.shape in {dense.shape for dense in CASES} else UNFUSED_TOLERANCE


@pytest.mark.soak
def test_plans_of_random_jobs_have_the_peaks_that_are_counted() -> None:
    cases, wrong = sampled(40), []
    assert len(cases) == 40
    for one in cases:
        truth, most = account(one), most_over(one)
        for accumulation in (1, 2):
            error = predicted(one, accumulation).peak / counted(truth, accumulation) - 1
            if not -TOLERANCE <= error <= most:
                wrong.append(f"{one.name}, accumulation {accumulation}: {error:+.2%}")
    assert not wrong, "\n".join(wrong)


def test_adapters_of_experts_count_as_peft_makes_them() -> None:
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16, vocab_size=100, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    adapted = get_peft_model(
        Qwen3MoeForCausalLM(config), LoraConfig(r=8, target_modules="all-linear")
    )
    assert adapted.get_nb_trainable_parameters()[0] == from_config(
        config.to_dict()
    ).adapter_parameters(8)


def test_the_plan_knows_the_proofs_chunk() -> None:
    assert states.PROOF_CHUNK == proof.CHUNK


@pytest.mark.slow
def test_an_account_is_the_same_every_time() -> None:
    small = case("smollm2-360m", "llama", lora_rank=8, layers=1)
    assert account(small) == account(small)
