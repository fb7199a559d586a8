"""Every kind of reward inside TRL's own training loop, in one process and in a ZeRO-3 gang of two.

Signatures, names, weights and reward models are agreed with TRL, and TRL changes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import demo_model
from tests.support.ranks.gang import run_gang
from tests.trainer.example_jobs import ROWS as GSM8K_ROWS
from tests.trainer.example_jobs import example
from tests.trainer.faulty_service import Body, serving
from tests.trainer.reward_facts import ROWS, gsm8k_job, job

pytestmark = pytest.mark.realtime

MODULE = """
def constant(completions, question, trainer_state, log_metric, **kwargs):
    assert len(question) == len(completions)
    log_metric("seen_step", trainer_state.global_step)
    return [0.25] * len(completions)

async def sometimes(completions, **kwargs):
    return [0.5 if number % 2 else None for number in range(len(completions))]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return demo_model.save_policy(folder / "policy"), demo_model.save_reward_model(folder / "judge")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ConfigMaps, mounted where rewards 2 and 3 look for theirs."""
    root = tmp_path_factory.mktemp("mounts")
    for position in (2, 3):
        (root / str(position)).mkdir()
        (root / str(position) / "mine.py").write_text(MODULE)
    return root


def all_kinds(url: str, judge: Path) -> list[dict[str, Any]]:
    return [
        {"format": {"pattern": r"[\s\S]*", "score": 0.5}},
        {"accuracy": {"score": 2.0}, "weight": 3.0},
        {"python": {"function": "mine:constant", "configMap": {"name": "mine"}}, "weight": 2.0},
        {"python": {"function": "mine:sometimes", "configMap": {"name": "mine"}}},
        {"name": "service", "http": {"url": url}, "weight": 0.125},
        {
            "name": "judge",
            "model": {"name": str(judge), "dtype": "bfloat16", "batchSize": 3},
            "weight": 0.0,
        },
    ]


def runs_of(
    models: tuple[Path, Path], root: Path, url: str, zero: int, world_size: int
) -> list[dict[str, Any]]:
    """All kinds together; in one process the GSM8K example too, on the real rows where they are at
    hand."""
    policy, judge = models
    plan = job(policy, all_kinds(url, judge), zero, world_size).model_dump(mode="json")
    runs = [{"name": "all kinds", "plan": plan, "data": str(ROWS.parent), "root": str(root)}]
    if world_size > 1:
        return runs
    rows = GSM8K_ROWS[-1]
    gsm8k = gsm8k_job(policy, example("02-gsm8k-llama.yaml")[0], rows).model_dump(mode="json")
    return [*runs, {"name": "gsm8k", "plan": gsm8k, "data": str(rows.parent), "root": str(root)}]


def results_of(
    folder: Path, models: tuple[Path, Path], root: Path, zero: int, world_size: int
) -> list[dict[str, Any]]:
    """What the ranks measured, while a service answers 8 for everything."""

    def eights(_: int, body: Body) -> tuple[int, bytes]:
        return 200, json.dumps({"rewards": [8] * len(body["completions"])}).encode()

    with serving(eights) as service:
        runs = runs_of(models, root, service.url, zero, world_size)
        return run_gang("tests.trainer.reward_facts:measure", folder, world_size, runs_of=runs)


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path], root: Path
) -> dict[str, Any]:
    """Results of one process."""
    return results_of(tmp_path_factory.mktemp("alone"), models, root, 0, 1)[0]


def check_all_kinds(logs: dict[str, float]) -> None:
    """Each reward's mean, and their weighted sum."""
    assert logs["steps"] == 2
    assert logs["rewards/format/mean"] == 0.5
    assert logs["rewards/python/mean"] == 0.25
    assert logs["rewards/python_2/mean"] == 0.5
    assert logs["rewards/service/mean"] == 8.0
    assert logs["seen_step"] == 1.0
    assert "rewards/judge/mean" in logs
    weighted = 0.5 + 3 * logs["rewards/accuracy/mean"] + 2 * 0.25 + 0.5 * 0.5 + 0.125 * 8
    assert logs["reward"] == pytest.approx(weighted, abs=1e-5)


def test_all_kinds_together(alone: dict[str, Any]) -> None:
    check_all_kinds(alone["all kinds"]["logs"])


def test_all_kinds_together_under_zero_3(
    tmp_path: Path, models: tuple[Path, Path], root: Path
) -> None:
    results = [result["all kinds"] for result in results_of(tmp_path, models, root, 3, 2)]
    check_all_kinds(results[0]["logs"])
    for result in results:
        assert result["dtypes"] == ["torch.bfloat16"], "the reward model keeps its dtype"
        assert result["policy_dtypes"] == ["torch.float32"]
        assert result["elements"] == results[0]["elements"] > 80_000, (
            "the reward model is whole on every rank"
        )
        assert set(map(tuple, result["counters"].values())) == {(0, 0)}


def test_the_gsm8k_job_trains_with_the_example_s_settings(alone: dict[str, Any]) -> None:
    """The published recipe's numbers, read from TRL's own arguments."""
    result = alone["gsm8k"]
    assert result["rows"] == len(GSM8K_ROWS[-1].read_text().splitlines())
    assert result["settings"] == {
        "learning_rate": "5e-06",
        "adam_beta1": "0.9",
        "adam_beta2": "0.99",
        "weight_decay": "0.1",
        "lr_scheduler_type": "SchedulerType.COSINE",
        "max_grad_norm": "0.1",
        "num_generations": "4",
        "per_device_train_batch_size": "4",
        "gradient_accumulation_steps": "4",
        "warmup_steps": "0.1",
        "beta": "0.04",
    }
    logs = result["logs"]
    assert logs["steps"] == 2
    assert logs["rewards/format/mean"] == 0.0, "twelve characters contain no reasoning"
    assert 0.0 <= logs["rewards/accuracy/mean"] <= 2.0
    assert logs["reward"] == pytest.approx(
        logs["rewards/format/mean"] + logs["rewards/accuracy/mean"], abs=1e-6
    )
