"""The memory model against live DeepSpeed engines on two and four gloo ranks: never too low, at
most 2 % too high.

Byte counts, so a small model does. Which memory a buffer is in follows from the function that
allocates it (tests/support/ledger/ledger_sites.py); an unknown one fails here. The benchmark
memory_ranks prints the table of docs/internals/memory-model.md from the same cases.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import plan_job
from tests.generated import cases as so_many
from tests.support.ledger import ledger_sites
from tests.support.ledger.config_shapes import from_config
from tests.support.ledger.ledger_cases import (
    CASES,
    HELD,
    MORE,
    OVER,
    RESIDENT,
    UNDER,
    Case,
    large_config,
    live,
)
from tests.support.ranks.gang import run_gang
from tests.unit.test_planner_properties import GROUPS, jobs

pytestmark = [pytest.mark.no_cover, pytest.mark.realtime]


def held(cases: list[Case], folder: Path) -> None:
    """Asserts that live ranks have what is planned, for cases of one size of a gang."""
    arguments = [asdict(case) for case in cases]
    by_rank = run_gang(
        "tests.support.ledger.rank_ledgers:ledgers", folder, cases[0].world, cases=arguments
    )
    for number, case in enumerate(cases):
        facts = [rank["cases"][number] for rank in by_rank]
        assert all(fact["unknown"] == {} for fact in facts), (case.name, facts[0]["unknown"])
        peaks = [fact["peaks"] for fact in facts]
        device_is_held(case, peaks)
        if case.offload:
            host_is_held(case, peaks)


def device_is_held(case: Case, peaks: list[Any]) -> None:
    planned = case.predicted()
    for phase in peaks[0]:
        there, limit = live(peaks, phase, "device"), planned.phases.get(phase, planned.peak)
        assert there <= limit + UNDER, (case.name, phase, there, limit)
        if phase in HELD:
            assert limit <= there * (1 + OVER) + case.bound(phase), (case.name, phase, there, limit)
    assert (
        live(peaks, "save", "device")
        <= planned.static + 2 * case.setup.weight_bytes * case.shape.largest_module
    )


def host_is_held(case: Case, peaks: list[Any]) -> None:
    for phase in set(HELD) & set(peaks[0]):
        assert case.host() == pytest.approx(live(peaks, phase, "host"), rel=OVER), (
            case.name,
            phase,
        )
    weights = case.setup.weight_bytes * case.shape.parameters
    assert live(peaks, "save", "host") <= case.host() + weights + UNDER


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_live_ranks_hold_what_is_planned(world: int, tmp_path: Path) -> None:
    held([case for case in CASES if case.world == world], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_more_configurations_hold_what_is_planned(world: int, tmp_path: Path) -> None:
    held([case for case in MORE if case.world == world], tmp_path)


def scaled_down(plan: ExecutionPlan) -> Case:
    """A plan's method, stage, offload, accumulation and gather on the small model, with at most
    four ranks."""
    return Case(
        world=min(4, plan.world_size), zero=plan.zero_stage, offload=plan.offload == "CPU",
        micro_batch=1,
        accumulation=min(4, plan.gradient_accumulation), gather=plan.gather_for_generation,
        precision=plan.dtype, checkpointing=plan.gradient_checkpointing,
        reference=plan.strategy if plan.strategy in ("Clone", "Sharded", "Adapter") else "None",
        lora_rank=8 if plan.method == "LoRA" else 0,
    )  # fmt: skip


def sampled(number: int) -> list[Case]:
    """So many different ZeRO plans of random jobs on random clusters, scaled down."""
    found: dict[Case, None] = {}

    @settings(max_examples=so_many(100))
    @given(jobs(), GROUPS)
    def plan(job: GRPOJobSpec, group: Node) -> None:
        chosen = plan_job(job, Inventory((group,))).chosen
        if (
            chosen
            and chosen.zero_stage
            and chosen.world_size in (2, 4, 8, 16, 32)
            and len(found) < number
        ):
            found[scaled_down(chosen)] = None

    plan()
    return list(found)


@pytest.mark.soak
def test_plans_of_random_jobs_hold_on_live_ranks(tmp_path: Path) -> None:
    plans = sampled(8)
    assert len(plans) == 8
    for world in (2, 4):
        if alike := [case for case in plans if case.world == world]:
            held(alike, tmp_path / str(world))


@pytest.mark.soak
def test_a_large_models_resident_memory_is_within_five_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned bytes and what the process takes without them are what the kernel counts."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    for rank in run_gang(
        "tests.support.ledger.resident_facts:peaks", tmp_path, RESIDENT.world, fresh=True
    ):
        process = rank["tiny"] - RESIDENT.resident()
        assert process < rank["large"] / 3
        assert RESIDENT.resident(from_config(large_config().to_dict())) + process == pytest.approx(
            rank["large"], rel=0.05
        )


def test_an_unknown_site_is_told() -> None:
    table = ledger_sites.Table(offload=True)
    table.place(("engine.py:forward", "stage3.py:new_in_this_version"), "aten::empty", 1 << 20)
    assert table.unknown == {"stage3.py:new_in_this_version aten::empty": 1 << 20}
