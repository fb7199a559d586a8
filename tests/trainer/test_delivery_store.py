"""The pod of `grpo export` where the model is on an object store: passed on as it comes, amid
faults, checked."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import SUMS, Listing
from grpo_api.text.contract import CHECKPOINT_STORE_ENV, PLAN_ENV, TERMINATION_LOG_ENV
from grpo_trainer.delivery import serving
from grpo_trainer.delivery.__main__ import main, send_file, send_listing
from grpo_trainer.stores import store_client
from grpo_trainer.stores.run_store import run_store
from grpo_trainer.weights.models import load_policy
from harness.programs.object_stores import BUCKET, CREDENTIALS
from harness.programs.object_stores import serving as store_serving
from tests.stepped_clock import SteppedClock
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import claim_folder, export_model
from tests.trainer.store_proxy import StoreProxy, proxy_to

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A versitygw."""
    with store_serving("versitygw", tmp_path_factory.mktemp("store")) as served:
        yield served


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    """The way to it, with keys; objects come in parts of a few kilobytes."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(CHECKPOINT_STORE_ENV + name, value)
    with proxy_to(endpoint) as proxy:
        yield proxy


@pytest.fixture
def plan(proxy: StoreProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingPlan:
    """An attempt of a run on the store, as a pod of it and of `grpo export` have it."""
    model = demo_model.save_policy(tmp_path / "model")
    made = runs.plan(model, folder=tmp_path / "disk" / tmp_path.name).model_dump(by_alias=True)
    made["checkpoint"] = {"store": {"url": f"s3://{BUCKET}/runs", "endpoint": proxy.url}}
    plan = TrainingPlan.model_validate(made)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    monkeypatch.setenv(PLAN_ENV, str(tmp_path / "plan.json"))
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "termination"))
    return plan


@pytest.fixture
def files(plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The model that the run has exported to the store."""
    claim_folder(plan)
    loaded = load_policy(plan.model, plan.execution, plan.adapter)
    folder = export_model(plan, loaded.source, loaded.model.save_pretrained)
    run = run_store(plan)
    assert folder
    assert run
    run.export(folder)
    monkeypatch.setattr(store_client, "PART_BYTES", 50_000)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def listed(state: Path) -> Listing:
    """What the pod says."""
    out = io.BytesIO()
    send_listing(state, out, SteppedClock())
    return Listing.model_validate_json(out.getvalue())


def sent(state: Path, name: str, offset: int) -> bytes:
    """What the pod sends."""
    out = io.BytesIO()
    send_file(state, name, offset, out, SteppedClock())
    return out.getvalue()


@pytest.mark.parametrize("fault", ["503", "cut amid"])
def test_a_model_is_handed_out_as_it_lies_on_the_store(
    plan: TrainingPlan, proxy: StoreProxy, files: dict[str, bytes], tmp_path: Path, fault: str
) -> None:
    proxy.reset(lambda number, _: fault if number % 2 else "")
    assert serving.serve(tmp_path / "state", None, merge=False, idle=0, clock=SteppedClock()) == 0
    listing = listed(tmp_path / "state")
    assert {name: entry.bytes for name, entry in listing.files.items()} == {
        name: len(files[name]) for name in files
    }
    for name, content in files.items():
        assert sent(tmp_path / "state", name, len(content) // 3) == content[len(content) // 3 :]
        assert sent(tmp_path / "state", name, 0) == content
    assert not list((tmp_path / "state").rglob("*.safetensors")), "nothing is kept on the node"


def test_what_is_converted_is_brought_and_checked_first(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    assert (
        serving.serve(tmp_path / "state", "bfloat16", merge=False, idle=0, clock=SteppedClock())
        == 0
    )
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "state" / "model")
    assert str(found.dtype) == "torch.bfloat16"
    assert SUMS in listed(tmp_path / "state").files


def test_a_model_that_was_changed_on_the_store_is_not_converted(
    plan: TrainingPlan, files: dict[str, bytes], tmp_path: Path
) -> None:
    run = run_store(plan)
    assert run
    weights = files["model.safetensors"]
    run.store.put("attempt-1/export/model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1]))
    assert main(["serve", "--dtype", "bfloat16"], tmp_path / "state") == 1
    assert "is not what was exported" in (tmp_path / "termination").read_text()


def test_a_run_without_a_model_says_so(plan: TrainingPlan, tmp_path: Path) -> None:
    claim_folder(plan)
    assert main(["serve"], tmp_path / "state") == 1
    said = (tmp_path / "termination").read_text()
    assert f"s3://{BUCKET}/runs/{tmp_path.name} has no exported model" in said
