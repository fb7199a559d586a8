"""A whole run from the hub: it is down twice, `main` moves between the attempts, and the last one
has no hub at all."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome, Result
from grpo_api.report.revisions import DATASET_FINGERPRINT
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.rewards import RewardSpec
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.outcome import make_outcome
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.training.training_run import run
from tests.stepped_clock import SteppedClock
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import claim_folder
from tests.trainer.hub import HubServer, files_of, hub_server, use

pytestmark = pytest.mark.realtime

ROWS = "".join(f'{{"prompt": "say {number % 10}"}}\n' for number in range(16)).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a policy, a reward model and prompts, and an empty cache."""
    with hub_server() as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        server.add("model", "team/model", files_of(demo_model.save_policy(tmp_path / "model")))
        server.add(
            "model", "team/judge", files_of(demo_model.save_reward_model(tmp_path / "judge"))
        )
        server.add("dataset", "team/rows", {"train.jsonl": ROWS})
        yield server


def trained(folder: Path, attempt: int, revisions: dict[str, str]) -> Outcome:
    """How an attempt ends that is told these commits."""
    runs.reset()
    plan = runs.plan(Path("team/model"), folder=folder)
    judge = RewardSpec.model_validate({"model": {"name": "team/judge", "dtype": "float32"}})
    job = plan.job.model_copy(update={"attempt": attempt})
    changes = {
        "job": job,
        "dataset": DatasetSpec(name="team/rows"),
        "rewards": [judge],
        "revisions": revisions,
    }
    plan = TrainingPlan.model_validate(plan.model_copy(update=changes).model_dump())
    recorder = Recorder(plan.job.attempt, Placement(0, 0, 1, 1), time.time())
    claim_folder(plan)
    watchdog = Watchdog(
        plan.guard, plan.execution, plan.grace_period_seconds, recorder, lambda *_: None
    )
    message = run(plan, recorder, watchdog, SteppedClock())
    assert recorder.progress.resumed_from_step == 3 * (attempt - 1)
    return make_outcome(0, Result.SUCCEEDED, message, recorder.progress)


def test_later_attempts_train_what_the_first_one_found(hub: HubServer, tmp_path: Path) -> None:
    hub.faults = ["503", "503", "", "", "503", "no answer"]
    first = trained(tmp_path / "run", 1, {})
    commits = {
        path: hub.repositories[name].main
        for path, name in (
            ("model", "models/team/model"),
            ("rewards[0].model", "models/team/judge"),
            ("dataset", "datasets/team/rows"),
        )
    }
    assert {path: first.revisions[path] for path in commits} == commits
    assert first.revisions.keys() == {*commits, DATASET_FINGERPRINT}
    hub.add("model", "team/model", files_of(demo_model.save_policy(tmp_path / "other", seed=1)))
    hub.add("dataset", "team/rows", {"train.jsonl": ROWS.replace(b"say", b"tell")})
    shutil.rmtree(
        tmp_path / "run" / "attempt-1" / "checkpoint-6"
    )  # as if it had been killed before
    hub.requests.clear()
    hub.shutdown()
    hub.server_close()
    second = trained(tmp_path / "run", 2, first.revisions)
    assert (second.step, second.revisions) == (6, first.revisions)
    assert hub.requests == []
