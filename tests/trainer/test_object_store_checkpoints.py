"""Checkpoints on an object store as a run meets them: saved amid a storm, brought, passed over,
gone back behind."""

import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.contract import CHECKPOINT_STORE_ENV, RESUME_STORE_ENV
from grpo_api.text.units import MIB
from grpo_trainer.checkpoints import store_checkpoints
from grpo_trainer.checkpoints.checkpoint_target import address_of
from grpo_trainer.checkpoints.volume_checkpoints import read_manifest, sealed_at
from grpo_trainer.runtime.errors import BadInput, DiskFailed, Diverged, Preempted
from grpo_trainer.stores import store_client
from grpo_trainer.stores.run_store import SAVE_WAIT
from grpo_trainer.stores.store_client import Store
from harness.programs.object_stores import BUCKET, CREDENTIALS, serving
from tests.stepped_clock import SteppedClock
from tests.support.ranks import runs
from tests.support.ranks.checkpoint_plans import begin, claim_folder, source_of, target_of
from tests.trainer.store_attempts import FILES, brought, of, plan, save, started
from tests.trainer.store_proxy import StoreProxy, proxy_to

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store that takes a second to start."""
    with serving("moto", tmp_path_factory.mktemp("store")) as served:
        yield served


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    """The store with an empty bucket, behind a proxy; its clients have keys."""
    for method, path in (("POST", "moto-api/reset"), ("PUT", BUCKET)):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{path}", method=method)).close()
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(CHECKPOINT_STORE_ENV + name, value)
    with proxy_to(endpoint) as proxy:
        yield proxy


def test_a_checkpoint_comes_back_whole_and_leaves_no_copy(
    proxy: StoreProxy, tmp_path: Path
) -> None:
    first, second = plan(proxy.url, tmp_path, 1), plan(proxy.url, tmp_path, 2)
    seal, recorder = started(first)
    save(seal, first, 4)
    assert recorder.progress.checkpoint is not None
    assert recorder.progress.checkpoint.where == f"s3://{BUCKET}/runs/demo-0/attempt-1/checkpoint-4"
    assert recorder.progress.checkpoint.bytes == sum(map(len, FILES.values()))
    assert not list(tmp_path.glob("disk-1/demo-0/attempt-1/*"))
    found = brought(second)
    assert found == tmp_path / "disk-2" / "demo-0" / "attempt-1" / "checkpoint-4"
    assert read_manifest(found).step == 4
    assert sealed_at(found) == pytest.approx(recorder.progress.checkpoint.time, abs=60)
    with pytest.raises(Preempted, match="attempt 1 is superseded by attempt 2"):
        save(seal, first, 5)
    again, _ = started(second)
    save(again, second, 5)
    assert not list(tmp_path.glob("disk-2/demo-0/*/checkpoint-*"))
    assert (
        brought(plan(proxy.url, tmp_path, 3))
        == tmp_path / "disk-3" / "demo-0" / "attempt-2" / "checkpoint-5"
    )


def test_a_file_that_changes_on_the_disk_after_its_upload_does_not_damage_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, put = MemoryStore(), Store.put
    monkeypatch.setattr(store_client, "from_url", lambda *_, **__: backend)
    first = plan("https://store", tmp_path, 1)
    seal, _ = started(first)

    def put_and_spoil(store: Store, key: str, data: bytes) -> None:
        put(store, key, data)
        for path in tmp_path.glob("disk-1/**/checkpoint-4/model.safetensors"):
            path.write_bytes(b"x" * path.stat().st_size)

    files = {"model.safetensors": b"model"}
    monkeypatch.setattr(Store, "put", put_and_spoil)
    save(seal, first, 4, files)
    found = brought(plan("https://store", tmp_path, 2), files=files)
    assert found is not None
    assert found.name == "checkpoint-4"


def test_a_disk_that_takes_no_manifest_is_a_failed_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = MemoryStore()
    monkeypatch.setattr(store_client, "from_url", lambda *_, **__: backend)
    first, second = (plan("https://store", tmp_path, attempt) for attempt in (1, 2))
    save(started(first)[0], first, 4)
    target = of(second)
    target.folder.mkdir(parents=True)
    (target.folder / "attempt-1").write_text("no folder")
    with pytest.raises(DiskFailed, match="attempt-1"):
        target.list_checkpoints()


def test_a_storm_costs_a_checkpoint_and_no_step(proxy: StoreProxy, tmp_path: Path) -> None:
    made, clock = plan(proxy.url, tmp_path, 1), SteppedClock()
    seal, recorder = started(made, clock)
    proxy.reset(lambda *_: "503")
    save(seal, made, 2)
    problem = recorder.progress.checkpoint_problem
    assert (
        "the checkpoint of step 2 could not be written: rank 0: s3://bucket/runs/demo-0: put "
        "attempt-1/"
    ) in problem
    assert clock.now() > 0, "it was tried again"
    assert not list(tmp_path.glob("disk-1/demo-0/attempt-1/*"))
    proxy.reset()
    save(seal, made, 3)
    assert recorder.progress.checkpoint_problem == ""
    assert {key.split("/")[1] for key in of(made).run.store.object_sizes("attempt-1")} == {
        "checkpoint-3"
    }


def test_a_slow_store_takes_its_time_and_nothing_is_given_up(
    proxy: StoreProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_checkpoints, "PART_BYTES", MIB)
    first, second = plan(proxy.url, tmp_path, 1), plan(proxy.url, tmp_path, 2)
    clock = SteppedClock()
    seal, recorder = started(first, clock)
    refused = set[str]()

    def slow(number: int, request: str) -> str:
        clock.advance(SAVE_WAIT / 2)
        # Parts are sent side by side: by the number alone one of them could be refused each time.
        if number % 5 != 4 or request in refused:
            return ""
        refused.add(request)
        return "503"

    proxy.reset(slow)
    save(seal, first, 2)
    assert recorder.progress.checkpoint_problem == ""
    assert clock.now() > 5 * SAVE_WAIT, "a save may take long, as long as something moves"
    proxy.reset()
    found = brought(second)
    assert found is not None
    assert found.name == "checkpoint-2"


@pytest.mark.parametrize(
    "damage",
    [
        "changed",
        pytest.param("missing", marks=pytest.mark.slow),
        pytest.param("no manifest", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    proxy: StoreProxy, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = plan(proxy.url, tmp_path, 1), plan(proxy.url, tmp_path, 2)
    seal, _ = started(first)
    for step in (4, 8):
        save(seal, first, step)
    store, part = of(first).run.store, "attempt-1/checkpoint-8/model.safetensors.000001"
    spoil = {
        "changed": partial(store.put, part, b"x"),
        "missing": partial(store.delete, [part]),
        "no manifest": partial(store.delete, ["attempt-1/checkpoint-8/manifest.json"]),
    }
    spoil[damage]()
    found = brought(second)
    assert found is not None
    assert found.name == "checkpoint-4"
    said = caplog.text
    assert damage == "no manifest" or "passed over a damaged checkpoint" in said


def test_all_that_is_lost_is_told(proxy: StoreProxy, tmp_path: Path) -> None:
    first = plan(proxy.url, tmp_path, 1)
    seal, _ = started(first)
    save(seal, first, 4)
    of(first).run.store.delete(["attempt-1/checkpoint-4/manifest.json"])
    with pytest.raises(BadInput, match="the manifests of all 1 checkpoints are missing or changed"):
        brought(plan(proxy.url, tmp_path, 2))


def test_a_run_goes_back_behind_what_it_diverged_on(proxy: StoreProxy, tmp_path: Path) -> None:
    first = plan(proxy.url, tmp_path, 1)
    seal, _ = started(first)
    for step in (4, 8):
        save(seal, first, step)
    found = brought(plan(proxy.url, tmp_path, 2), lambda made: made.step > 4)
    assert found is not None
    assert found.name == "checkpoint-4"
    head = of(first).run.head()
    assert head is not None
    assert [one.step for one in head.checkpoints] == [4]
    assert {key.split("/")[1] for key in of(first).run.store.object_sizes("attempt-1")} == {
        "checkpoint-4"
    }
    with pytest.raises(Diverged):
        brought(plan(proxy.url, tmp_path, 3), lambda _: True)


def beginning_with(first: TrainingPlan, folder: Path, **update: Any) -> TrainingPlan:
    """Another job, which begins with what this one has on its store; its own checkpoints are on a
    volume."""
    made = runs.plan(Path("/models/demo"), folder=folder / "next" / "next-1", **update).model_dump(
        by_alias=True
    )
    made |= {
        "job": made["job"] | {"uid": "another"},
        "resumeFrom": str(folder / "resume" / "demo-0"),
    }
    assert first.checkpoint.store
    return TrainingPlan.model_validate(
        made | {"resumeStore": first.checkpoint.store.model_dump(by_alias=True)}
    )


@pytest.fixture
def their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job's keys."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(RESUME_STORE_ENV + name, value)


@pytest.mark.usefixtures("their_keys")
def test_another_job_begins_with_the_newest_undamaged_checkpoint(
    proxy: StoreProxy, tmp_path: Path
) -> None:
    first = plan(proxy.url, tmp_path, 1)
    seal, _ = started(first)
    for step in (4, 8):
        save(seal, first, step)
    of(first).run.store.delete(["attempt-1/checkpoint-8/model.safetensors.000001"])
    before = of(first).run.head()
    job = beginning_with(first, tmp_path)
    found = brought(job)
    assert found == tmp_path / "resume" / "demo-0" / "attempt-1" / "checkpoint-4"
    assert (
        address_of(found, target_of(job), source_of(job))
        == f"s3://{BUCKET}/runs/demo-0/attempt-1/checkpoint-4"
    )
    own, _ = started(job)
    save(own, job, 5)
    assert not found.exists(), "nothing reads it any more"
    again = brought(job)
    assert again is not None
    assert again.name == "checkpoint-5", "the job's own win"
    assert of(first).run.head() == before


@pytest.mark.usefixtures("their_keys")
def test_another_job_begins_with_an_adapter_on_a_store(proxy: StoreProxy, tmp_path: Path) -> None:
    first = plan(proxy.url, tmp_path, 1)
    started(first)
    job = beginning_with(first, tmp_path, strategy="Adapter")
    claim_folder(job)
    with pytest.raises(
        BadInput,
        match=f"s3://{BUCKET}/runs/demo-0 has no complete checkpoint and no exported adapter",
    ):
        begin(job, {})
    made = tmp_path / "made"
    made.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (made / name).write_text(name)
    of(first).run.export(made)
    found = begin(job, {}).adapter
    assert found == tmp_path / "resume" / "demo-0" / "export"
    assert (found / "adapter_config.json").read_text() == "adapter_config.json"


def test_a_new_run_begins_anew(proxy: StoreProxy, tmp_path: Path) -> None:
    assert brought(plan(proxy.url, tmp_path, 1)) is None
