"""References on two ranks under DDP, ZeRO-2 and ZeRO-3, against one process: the same KL, proven
weights, exact resume, TRL's sync, an overflow that stays harmless, averaged gradients, every
injected fault answered, and a slow rank named.

The parallelism changes nothing but where things live. One launch of two ranks measures a reduced
set of cells; The benchmark strategy_matrix measures all of them for strategy-measurements.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_api.report.root_cause import PERMANENT
from grpo_trainer.runtime.errors import DriftedApart, classify_error
from grpo_trainer.training import finite_loss
from tests.generated import gated
from tests.support.facts import reference_facts, step_facts, straggler_facts
from tests.support.facts.gang_facts import PARALLELISMS, STRIKES
from tests.support.ranks import runs
from tests.support.ranks.gang import run_gang
from tests.trainer import kl
from tests.trainer.strikes import stopped_in_time

pytestmark = pytest.mark.realtime

GATE: dict[str, Any] = {
    "cells": {"DDP": ["Clone", "Adapter"], "ZeRO-2": ["Offload"], "ZeRO-3": ["Sharded"]},
    "faults": ["DDP", "ZeRO-3"],
    "overflow": ["DDP"],
    "strikes": [0, 3, 4],
    "drift": ["DDP"],
    "straggler": [],
}
"""What `make test` measures, beside a step and the memory savers: each strategy once."""
MORE: dict[str, Any] = {
    "cells": {"ZeRO-3": ["Adapter"]},
    "faults": ["ZeRO-2"],
    "overflow": ["ZeRO-2", "ZeRO-3"],
    "strikes": [1, 2, 5, 6, 7],
    "drift": ["ZeRO-2"],
    "straggler": ["DDP", "ZeRO-2", "ZeRO-3"],
}
"""What `make test-all` has besides."""
FULL = ["Clone", "Offload", "Sharded"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gang")


@pytest.fixture(scope="module")
def gang(folder: Path) -> list[dict[str, Any]]:
    return run_gang("tests.support.facts.gang_facts:everything", folder, 2, **GATE)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    none: dict[str, Any] = {"step": [], "savers": False}
    return run_gang(
        "tests.support.facts.gang_facts:everything",
        tmp_path_factory.mktemp("more"),
        2,
        **none,
        **MORE,
    )


def of_both(fact: str) -> pytest.MarkDecorator:
    """Parametrizes `launch`, the fixture, and `key` by what GATE and MORE have of a fact."""
    gate = [pytest.param("gang", key, id=named(key)) for key in GATE[fact]]
    slow = [pytest.param("more", key, id=named(key), marks=pytest.mark.slow) for key in MORE[fact]]
    return pytest.mark.parametrize(("launch", "key"), [*gate, *slow])


of_either = pytest.mark.parametrize("launch", gated(["gang", "more"]))
"""Parametrizes `launch` by the fixtures whose cells are measured."""


def named(key: str | int) -> str:
    """A parallelism, or what is struck."""
    return " ".join(map(str, STRIKES[key].values())) if isinstance(key, int) else key


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("alone")
    yield reference_facts.measure(folder, {"1 process": ["Clone", "Adapter"]})["1 process"]
    runs.reset()


def cells(gang: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for facts in gang:
        for strategies in facts["cells"].values():
            yield from strategies.items()


@of_either
def test_the_kl_is_the_same_bits_everywhere(
    request: pytest.FixtureRequest, launch: str, alone: dict[str, dict[str, Any]]
) -> None:
    policy, reference = alone["Clone"]["policy"], alone["Clone"]["reference"]
    expected = kl.k3(torch.tensor(policy), torch.tensor(reference))
    assert expected.min() >= 0
    assert expected.mean() > 0.01
    assert alone["Adapter"]["reference"] == reference
    for strategy, facts in cells(request.getfixturevalue(launch)):
        assert facts["reference"] == reference, strategy
        assert facts["policy"] == (policy if strategy in FULL else alone["Adapter"]["policy"]), (
            strategy
        )
        assert torch.equal(kl.k3(torch.tensor(policy), torch.tensor(facts["reference"])), expected)


@of_either
def test_policy_and_reference_are_proven_before_the_first_step(
    request: pytest.FixtureRequest, launch: str
) -> None:
    for strategy, facts in cells(request.getfixturevalue(launch)):
        proven = [what for what, *_ in facts["proofs"]]
        assert proven == (["policy", "reference"] if strategy in FULL else ["policy"])
        assert all(parameters == 26 for _, parameters, _, _ in facts["proofs"])


@of_either
def test_a_resumed_run_logs_the_same_digits(
    request: pytest.FixtureRequest, launch: str, alone: dict[str, dict[str, Any]]
) -> None:
    for strategy, facts in [*cells(request.getfixturevalue(launch)), *alone.items()]:
        assert facts["resumed"] == facts["uninterrupted"], strategy
        assert "resumed policy" in facts["proven"]
        assert all(row["kl"] > 0 for row in facts["resumed"])


def test_the_sync_is_trls_to_the_bit(
    gang: list[dict[str, Any]], alone: dict[str, dict[str, Any]]
) -> None:
    expected = alone["Clone"]["synced_by_trl"]
    for strategy, facts in cells(gang):
        if strategy in FULL:
            assert facts["synced"] == facts["synced_by_trl"] == expected, strategy


@of_both("overflow")
def test_an_overflow_on_one_rank_is_answered_by_all(
    request: pytest.FixtureRequest, launch: str, key: str
) -> None:
    for facts in request.getfixturevalue(launch):
        measured = facts["overflow"][key]
        assert [row[finite_loss.KL_OVERFLOW_METRIC] for row in measured["rows"]] == [
            0.0,
            1.0,
            0.0,
            0.0,
        ]
        assert all(row["finite"] for row in measured["rows"])
        assert measured["rows"][1]["kl"] > 1e6
        assert all(row["kl"] < 1 for row in measured["rows"][2:])
        assert "not finite" in measured["ended"]


@pytest.fixture(scope="module")
def whole_batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of one process that took a step on the whole batch, and its gradient norm."""
    folder = tmp_path_factory.mktemp("whole-batch")
    return folder, step_facts.stepped(folder, ["1 process"])["1 process"]


@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_two_halves_on_two_ranks_are_one_batch_on_one(
    gang: list[dict[str, Any]], folder: Path, whole_batch: tuple[Path, float], parallelism: str
) -> None:
    whole, norm = whole_batch
    assert (
        gang[0]["step"][parallelism]
        == gang[1]["step"][parallelism]
        == pytest.approx(norm, rel=1e-5)
    )
    expected = load_file(whole / "1 process.safetensors")
    found = load_file(folder / "step" / f"{parallelism}.safetensors")
    start = load_file(whole / "model" / "model.safetensors")
    moved = max((expected[name] - start[name].view(-1)).abs().max().item() for name in expected)
    apart = max((expected[name] - found[name]).abs().max().item() for name in expected)
    assert moved > 1e-3
    assert apart < 1e-5 * moved


FAULTS = {
    "another file on rank 1": ("WeightsDiffer", "rank 1"),
    "one bit in rank 1's file": ("WeightsDiffer", "down_proj"),
    "one bit in rank 1's memory": ("WeightsDiffer", "down_proj"),
    "another revision on rank 1": (
        "BadInput",
        "rank 1: spec.model.name: demo/model (revision default) can't be fetched",
    ),
    "random weights by rank": ("WeightsDiffer", "ranks 0, 1"),
    "missing shard on rank 1": ("BadInput", "rank 1: "),
    "truncated file on rank 1": ("BadInput", "rank 1: "),
}


@of_both("faults")
@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_answers_a_fault_alike(
    request: pytest.FixtureRequest, launch: str, key: str, fault: str
) -> None:
    error, part = FAULTS[fault]
    first, second = (facts["faults"][key][fault] for facts in request.getfixturevalue(launch))
    assert first == second
    assert first.startswith(f"{error}: ")
    assert part in first


@of_both("faults")
def test_right_weights_are_accepted(request: pytest.FixtureRequest, launch: str, key: str) -> None:
    answers = [facts["faults"][key]["none"] for facts in request.getfixturevalue(launch)]
    assert answers == ["", ""]


@of_both("drift")
def test_ranks_that_drifted_apart_write_no_checkpoint_and_go_back(
    request: pytest.FixtureRequest, launch: str, key: str
) -> None:
    first, second = (facts["drift"][key] for facts in request.getfixturevalue(launch))
    assert first["error"] == second["error"]
    assert first["error"].startswith(
        "DriftedApart: policy: parameter model.layers.1.mlp.down_proj.weight differs"
    )
    assert first["written"] == []
    assert classify_error(DriftedApart(""))[0] not in PERMANENT


@of_both("straggler")
def test_a_rank_of_half_the_speed_is_named_within_20_steps(
    request: pytest.FixtureRequest, launch: str, key: str
) -> None:
    first, second = (facts["straggler"][key] for facts in request.getfixturevalue(launch))
    (finding,) = first["found"]
    evidence = finding["evidence"]
    assert (evidence["rank"], evidence["slowRanks"]) == (straggler_facts.SLOW_RANK, 1)
    assert (finding["pod"], finding["node"]) == ("pod-1", "node-1")
    assert first["step"] <= straggler_facts.STEPS
    assert first["rank_seconds"] == second["rank_seconds"], "all ranks log the same"


@of_both("strikes")
def test_a_rank_that_is_not_finite_stops_all_before_anything_is_sealed(
    request: pytest.FixtureRequest, launch: str, key: int
) -> None:
    first, second = (facts["divergence"][str(key)] for facts in request.getfixturevalue(launch))
    assert first["ended"] == second["ended"]
    for facts in (first, second):
        stopped_in_time(facts)


def test_zero3_s_savers_are_in_force_where_asked(gang: list[dict[str, Any]]) -> None:
    for facts in gang:
        off, on = facts["savers"]["off"], facts["savers"]["on"]
        assert set(off["zero_hooks"]) == {0}, "everything is gathered before the generation"
        assert min(on["zero_hooks"]) > 0, "each module is gathered when it runs"
        assert min(off["live_elements"]) == off["elements"], (
            "the whole model is on every rank while it generates"
        )
        assert max(on["live_elements"]) < sum(on["largest"]), (
            "one matrix, the tied embedding and the small ones"
        )
        assert (off["recomputed"], off["optimizer_offload"]) == ([], False)
        assert (sorted(set(on["recomputed"])), on["optimizer_offload"]) == ([0, 1], True)
