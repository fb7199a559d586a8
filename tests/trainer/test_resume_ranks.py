"""Exact resume with several ranks, to which accelerate deals the batches, and after a real kill
amid a step.

The generated cases of test_resume_exact.py are cut between two steps, in one process; these are few
and whole.
"""

import random
from dataclasses import asdict
from pathlib import Path

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Result
from grpo_api.text.contract import DATA_MOUNT_ENV
from grpo_trainer.telemetry.observer import translate_logs
from harness.controlplane import free_port
from tests.generated import cases
from tests.support.facts.resume_cases import ADAPTIVE, Case, plan, train, write_data
from tests.support.ranks import demo_model
from tests.support.ranks.gang import run_gang
from tests.support.ranks.pods import Gang

pytestmark = pytest.mark.realtime

PARALLEL = [
    ("Clone", 0),
    ("Offload", 0),
    ("Adapter", 0),
    ("Clone", 2),
    ("None", 2),
    ("Sharded", 3),
    ("Adapter", 3),
]
"""Strategies and ZeRO stages; 0 is DDP."""


def drawn(chance: random.Random, strategy: str, zero: int) -> Case:
    """A run of two to three passes, killed in a later pass than the first."""
    ahead, accumulation, iterations = (
        chance.randint(1, 3),
        chance.randint(1, 2),
        chance.randint(1, 2),
    )
    generations = chance.randint(1, 2)
    in_pass = -(-generations * ahead * iterations // accumulation)
    steps = in_pass * 2 + chance.randint(0, in_pass)
    return Case(
        rows=2 * generations * ahead + chance.randint(0, 2 * ahead - 1),
        steps=steps,
        save=chance.randint(1, steps),
        kill=chance.randint(in_pass, steps),
        accumulation=accumulation,
        ahead=ahead,
        iterations=iterations,
        sync=chance.randint(1, 3) if strategy in ("Clone", "Sharded") else 0,
        strategy=strategy,
        zero=zero,
        training=chance.choice([{}, ADAPTIVE]),
    )


@pytest.mark.seeded
@pytest.mark.slow
def test_two_ranks_resume_exactly(
    chance: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    demo_model.save_policy(tmp_path / "model")
    kinds = [("Clone", 0), ("Sharded", 3), *(chance.choice(PARALLEL) for _ in range(cases(1)))]
    stories = [drawn(chance, *kind) for kind in kinds]
    found = run_gang(
        "tests.support.facts.resume_cases:several",
        tmp_path,
        world_size=2,
        cases=[asdict(case) for case in stories],
    )
    for case, *differences in zip(stories, *found, strict=True):
        assert differences == [[], []], case


KILLED = [
    Case(rows=8, epochs=3.0, save=3, kill=7, accumulation=2),
    Case(rows=6, steps=12, save=4, kill=6, ahead=3, iterations=2, sync=2),
    Case(rows=5, epochs=6.0, save=5, kill=7, accumulation=3, ahead=2, strategy="Adapter"),
]


def pod(case: Case, folder: Path, attempt: int) -> TrainingPlan:
    """The case's plan with a port of its own."""
    made = plan(case, folder, attempt)
    return made.model_copy(
        update={"rendezvous": made.rendezvous.model_copy(update={"port": free_port()})}
    )


@pytest.mark.parametrize(
    "case", KILLED, ids=["in the third pass", "amid a generation", "a pass ends within a step"]
)
@pytest.mark.slow
def test_a_process_killed_anywhere_goes_on_exactly(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    demo_model.save_policy(tmp_path / "model")
    write_data(case, tmp_path)
    with Gang(pod(case, tmp_path, 1), tmp_path, tmp_path / "pods-1") as gang:
        gang.until(lambda: case.kill in gang.steps())
        gang.pods[0].kill()
        gang.wait()
        killed = gang.steps()
    with Gang(pod(case, tmp_path, 2), tmp_path, tmp_path / "pods-2") as gang:
        gang.wait()
        resumed, result = gang.steps(), gang.outcome().result
    assert result is Result.SUCCEEDED
    assert min(resumed) > case.save
    (tmp_path / "runs").rename(tmp_path / "killed")
    whole = train(case, tmp_path, 1).logged
    assert max(resumed) == max(whole)
    for step, values in {**killed, **resumed}.items():
        assert values.items() >= translate_logs(whole[step]).items(), step
