"""One run of 60 steps with every fault that passes: each may cost time and steps done twice, none a
digit or the run.

The hub answers 503 twice, the reward service is away for 20 s, a rank is killed, another is told to
stop, and the disk of the checkpoints is full for 10 s. The next attempt is started as the operator
would, on the same folder, with the commits that the one before told; the hub is gone by then.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Result
from harness.controlplane import free_port
from tests.support.facts.disk_facts import BALLAST, fill, small_disk
from tests.support.ranks import demo_model, runs
from tests.support.ranks.pods import Gang
from tests.trainer.faulty_service import lengths, serving
from tests.trainer.hub import HubServer, environment, files_of, hub_server

STEPS, SAVE = 60, 4
EXACT = ("reward", "kl", "loss", "grad_norm", "entropy", "learning_rate", "completion_length")
ROWS = "question\n" + "".join(f"say {number % 10}\n" for number in range(64))
CARD = (
    "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: "
    "main/train.csv\n---\n"
)


class RewardService:
    """A service on one port that can be taken away and brought back."""

    def __init__(self) -> None:
        self._port = free_port()
        self._running = ExitStack()

    def __enter__(self) -> "RewardService":
        self.url = self._running.enter_context(
            serving(lambda _, body: lengths(body), self._port)
        ).url
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def away(self, seconds: float) -> None:
        """Refuses connections for so long."""
        self._running.close()
        time.sleep(seconds)
        self.__enter__()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MiB."""
    with small_disk(tmp_path / "disk", 32) as folder:
        yield folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A hub with the model and the rows."""
    with hub_server() as server:
        server.add("model", "team/model", files_of(demo_model.save_policy(tmp_path / "model")))
        server.add(
            "dataset", "team/rows", {"README.md": CARD.encode(), "main/train.csv": ROWS.encode()}
        )
        yield server


def make_plan(
    folder: Path, url: str, attempt: int = 1, revisions: dict[str, str] | None = None
) -> TrainingPlan:
    """Two pods of one process."""
    execution = {"nodes": 2, "processesPerNode": 1, "saveEverySteps": SAVE, "stepsPerGeneration": 2}
    plan = runs.plan(
        Path("unused"),
        world_size=2,
        folder=folder,
        training={"maxSteps": STEPS, "promptsPerStep": 4},
        execution={**execution, "gradientAccumulation": 2, "microBatch": 4},
        reference={"sync": {"everySteps": 5}},
    ).model_dump(by_alias=True)
    plan["job"]["attempt"] = attempt
    plan["rendezvous"]["port"] = free_port()
    plan["model"]["name"] = "team/model"
    plan["dataset"] = {
        "name": "team/rows",
        "config": "main",
        "split": "train",
        "promptColumn": "question",
    }
    plan["rewards"] = [{"http": {"url": url}}, {"format": {"pattern": ".*[0-9].*"}, "weight": 5.0}]
    plan["revisions"] = revisions or {}
    return TrainingPlan.model_validate(plan)


def exact(steps: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What must be the same in every attempt, by step."""
    return {step: {key: values.get(key) for key in EXACT} for step, values in steps.items()}


@pytest.mark.realtime
@pytest.mark.soak
def test_a_run_with_every_fault_that_passes_is_the_undisturbed_one(
    disk: Path, hub: HubServer, tmp_path: Path
) -> None:
    with RewardService() as service:
        first = environment(hub.url, tmp_path / "calm-cache")
        plan = make_plan(tmp_path / "calm", service.url)
        with Gang(plan, tmp_path, tmp_path / "pods-calm", fresh=True, environment=first) as gang:
            assert gang.wait() == [0, 0], gang.log()[-4000:]
            calm = exact(gang.steps())
        assert sorted(calm) == list(range(1, STEPS + 1))
        seen = disturbed(disk, hub, service, tmp_path)
    for attempt, steps in seen.items():
        assert steps == {step: calm[step] for step in steps}, attempt
    assert set().union(*seen.values()) == set(calm)
    assert (disk / "runs" / "export" / "model.safetensors").is_file()


def disturbed(
    disk: Path, hub: HubServer, service: RewardService, folder: Path
) -> dict[int, dict[int, dict[str, Any]]]:
    """The steps of each attempt of the run that everything happens to."""
    variables, seen = environment(hub.url, folder / "cache"), {}
    hub.faults = ["503", "503"]
    plan = make_plan(disk / "runs", service.url)
    with Gang(plan, folder, folder / "pods-1", fresh=True, environment=variables) as gang:
        gang.until(lambda: 10 in gang.steps())
        service.away(20)
        gang.until(lambda: 20 in gang.steps())
        gang.pods[1].kill()
        assert gang.wait() == [1, -signal.SIGKILL]
        seen[1], ended = exact(gang.steps()), gang.outcome()
    assert hub.faults == []
    assert ended.result is Result.ERROR
    hub.shutdown()
    plan = make_plan(disk / "runs", service.url, 2, ended.revisions)
    with Gang(plan, folder, folder / "pods-2", fresh=True, environment=variables) as gang:
        gang.until(lambda: 35 in gang.steps())
        gang.pods[1].send_signal(signal.SIGTERM)
        assert gang.wait() == [143, 143]
        seen[2] = exact(gang.steps())
        assert "a checkpoint was saved" in gang.outcome().message
    plan = make_plan(disk / "runs", service.url, 3, ended.revisions)
    with Gang(plan, folder, folder / "pods-3", fresh=True, environment=variables) as gang:
        gang.until(lambda: 45 in gang.steps())
        fill(disk / BALLAST)
        time.sleep(10)
        (disk / BALLAST).unlink()
        assert gang.wait() == [0, 0], gang.log()[-4000:]
        seen[3] = exact(gang.steps())
        assert '"checkpointFailed": ' in gang.log()
        assert gang.outcome().result is Result.SUCCEEDED
    return seen
