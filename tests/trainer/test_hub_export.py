"""A whole run whose model goes to the hub: the hub fails, the next attempt finds all steps done and
pushes; and without a volume. The hub is a stand-in (hub.py, hub_uploads.py)."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from grpo_api.plan.plan import TrainingPlan
from grpo_api.provenance.provenance import OWN_FILES, STATEMENT_FILE
from grpo_api.report.artifacts import SUMS, parse_sums, weights_hash
from grpo_api.spec.checkpoint import ExportSpec
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.rewards import RewardSpec
from grpo_api.text.contract import EXPORT_TOKEN_ENV
from grpo_trainer.gang.placement import Placement
from grpo_trainer.hub import hub_client
from grpo_trainer.hub.retry import TryLater
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.runtime.errors import BadInput, HubUnavailable
from grpo_trainer.training.training_run import run
from tests.stepped_clock import SteppedClock
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import claim_folder
from tests.trainer.hub import files_of
from tests.trainer.hub_uploads import READER, WritableHub, writable_hub_in_use

pytestmark = pytest.mark.realtime

ROWS = "".join(f'{{"prompt": "say {number % 10}"}}\n' for number in range(16)).encode()
OUT = "models/team/out"
EXPORT = {
    "to": "Hub",
    "hub": {"repository": "team/out", "tokenSecretRef": {"name": "hub", "key": "token"}},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    """A hub with a policy and prompts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    with writable_hub_in_use(monkeypatch, tmp_path / "cache") as server:
        server.add("model", "team/model", files_of(demo_model.save_policy(tmp_path / "model")))
        server.add(
            "model", "team/judge", files_of(demo_model.save_reward_model(tmp_path / "judge"))
        )
        server.add("dataset", "team/rows", {"train.jsonl": ROWS})
        yield server


def trained(folder: Path | None, attempt: int = 1) -> str:
    """What an attempt says at its end."""
    runs.reset()
    plan = runs.plan(Path("team/model"), folder=folder)
    rewards = [RewardSpec.model_validate({"model": {"name": "team/judge", "dtype": "float32"}})]
    job = plan.job.model_copy(update={"attempt": attempt})
    export = ExportSpec.model_validate(EXPORT)
    changes = {
        "job": job,
        "dataset": DatasetSpec(name="team/rows"),
        "rewards": rewards,
        "export": export,
    }
    plan = TrainingPlan.model_validate(plan.model_copy(update=changes).model_dump())
    recorder = Recorder(plan.job.attempt, Placement(0, 0, 1, 1), time.time())
    claim_folder(plan)
    watchdog = Watchdog(
        plan.guard, plan.execution, plan.grace_period_seconds, recorder, lambda *_: None
    )
    message = run(plan, recorder, watchdog, SteppedClock())
    assert recorder.progress.resumed_from_step == 6 * (attempt - 1)
    return message


def told_alike(folder: Path) -> dict[str, bytes]:
    """The files that are the same whichever attempt exports."""
    return {name: content for name, content in files_of(folder).items() if name not in OWN_FILES}


def assert_on_the_hub(hub: WritableHub, folder: Path, message: str) -> None:
    pushed = hub.repositories[OUT]
    assert f"hf://team/out@{pushed.main}" in message
    assert len(pushed.commits) == 2, "the one that made the repository, and ours"
    files = pushed.commits[pushed.main]
    card = ModelCard(files["README.md"].decode())
    assert card.data.get("base_model") == "team/model"
    assert "` reward `" in card.text
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert weights_hash(parse_sums(files[SUMS].decode())) in card.text
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(folder.parent / "model")
    assert not torch.equal(
        model.get_input_embeddings().weight, before.get_input_embeddings().weight
    ), "it is trained"


def test_a_hub_that_fails_loses_no_model_and_the_next_attempt_only_pushes(
    hub: WritableHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = hub_client.Client.send

    def down(self: hub_client.Client, request: object, **options: object) -> object:
        if "preupload" in str(request.url):  # type: ignore[attr-defined]
            raise TryLater("HTTP 503")
        return send(self, request, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(hub_client.Client, "send", down)
    with pytest.raises(HubUnavailable, match=r"team/out: .*HTTP 503; the model is in .*/export$"):
        trained(tmp_path / "run")
    exported = told_alike(tmp_path / "run" / "export")
    assert set(hub.repositories[OUT].commits[hub.repositories[OUT].main]) == {".gitattributes"}, (
        "nothing half visible"
    )
    monkeypatch.setattr(hub_client.Client, "send", send)
    message = trained(tmp_path / "run", attempt=2)
    assert f"and in {tmp_path / 'run' / 'export'}" in message
    assert told_alike(tmp_path / "run" / "export") == exported, (
        "nothing was trained, and the same is told of it"
    )
    on_the_hub = hub.repositories[OUT].commits[hub.repositories[OUT].main]
    assert files_of(tmp_path / "run" / "export").items() <= on_the_hub.items()
    assert {"README.md", SUMS, STATEMENT_FILE} <= on_the_hub.keys()
    assert_on_the_hub(hub, tmp_path / "fetched", message)


def test_without_a_volume_the_model_goes_through_the_pods_disk(
    hub: WritableHub, tmp_path: Path
) -> None:
    message = trained(None)
    assert " and in " not in message
    assert_on_the_hub(hub, tmp_path / "fetched", message)


def test_a_token_that_may_only_read_ends_the_attempt_before_the_model_is_loaded(
    hub: WritableHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPORT_TOKEN_ENV, READER)
    with pytest.raises(BadInput, match="no right to write"):
        trained(tmp_path / "run")
    assert not [request for request in hub.requests if "team/model" in request]
