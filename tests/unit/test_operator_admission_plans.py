"""The planner's answers that the queue keeps: the same bytes, for the specs asked for last, and
made only once."""

import pytest

from grpo_operator.admission.plan_cache import Plans
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import Planner, plan_job
from tests.unit.planning import H100, L4, LLAMA_1B, LLAMA_70B, QWEN_7B, inventory, nodes, spec

SPECS = [
    spec(LLAMA_1B),
    spec(QWEN_7B, placement__gpus__min=4),
    spec(LLAMA_70B, adapter__use="Never"),
]
CLUSTERS = [inventory(nodes(2, 8, H100)), inventory(nodes(4, 1, L4)), Inventory()]


def test_answers_are_the_planners_own() -> None:
    plans = Plans(most=2)
    for _ in range(2):
        for there in CLUSTERS:
            for job in SPECS:
                whole = plan_job(job, there)
                without_rivals = whole.model_copy(update={"candidates": [], "rule": ""})
                assert plans.plan(job, there) == without_rivals


def test_what_has_not_been_asked_for_is_forgotten() -> None:
    plans = Plans(most=2)
    for job in SPECS:
        plans.plan(job, CLUSTERS[0])
    assert len(plans) == 2


def test_a_job_for_which_nothing_is_free_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, taken = Plans(), inventory(nodes(2, 8, H100, gpus_free=0))
    first = plans.plan(SPECS[0], taken)
    assert first.chosen is not None
    assert not first.fits_now

    def planned_again(*_: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("grpo_planner.plan._result", planned_again)
    # other GPUs are free, none of which would do; and another object of the same spec asks
    almost = inventory(
        nodes(1, 8, H100, gpus_free=0, host_memory_free=0), nodes(1, 8, H100, gpus_free=0)
    )
    assert plans.plan(spec(LLAMA_1B), almost) is first


def test_planner_and_plan_job_are_one() -> None:
    assert Planner(SPECS[0]).plan(CLUSTERS[0]) == plan_job(SPECS[0], CLUSTERS[0])
