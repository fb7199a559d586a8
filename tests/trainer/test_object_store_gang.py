"""Two pods with a disk each and checkpoints on an object store only: killed, and gone on with to the last digit."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_api.contract import CHECKPOINT_STORE_ENV, DATA_MOUNT_ENV
from grpo_api.plan import TrainingPlan
from grpo_api.report import Result
from grpo_api.stores import ObjectStoreSpec
from grpo_trainer.checkpoints.remote import needed
from grpo_trainer.stores.client import Store, open_store
from grpo_trainer.stores.head import HEAD, Head
from harness.programs.object_stores import BUCKET, CREDENTIALS, serving
from harness.ranks import demo_model
from harness.ranks.pods import Gang, free_port
from harness.ranks.resume_cases import Case, plan, write_data
from tests.trainer.store_proxy import StoreProxy, proxy_to

CASE = Case(rows=8, steps=6, save=2, kill=5, accumulation=2, sync=2, strategy="Sharded", zero=3)
ENVIRONMENT = {f"{CHECKPOINT_STORE_ENV}{name}": value for name, value in CREDENTIALS.items()}
RUN = "demo-0"


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[StoreProxy]:
    """A versitygw behind a proxy that notes what is asked."""
    with serving("versitygw", tmp_path / "store") as served, proxy_to(served.endpoint) as proxy:
        yield proxy


def two_pods(folder: Path, attempt: int, proxy: StoreProxy | None) -> TrainingPlan:
    """The case on two nodes with a process each; without a proxy its checkpoints are in a shared folder."""
    made = plan(CASE, folder, attempt)
    update: dict[str, object] = {
        "rendezvous": made.rendezvous.model_copy(update={"port": free_port()}),
        "execution": made.execution.model_copy(update={"nodes": 2, "processes_per_node": 1}),
        "checkpoint_directory": str(folder / ("whole" if proxy is None else "disk") / RUN),
    }
    if proxy:
        store = ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=proxy.url)
        update["checkpoint"] = made.checkpoint.model_copy(update={"store": store, "keep": 1})
    return made.model_copy(update=update)


def test_two_pods_without_a_volume_go_on_exactly_and_leave_a_model(
    proxy: StoreProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    demo_model.save_policy(tmp_path / "model")
    write_data(CASE, tmp_path)
    first = two_pods(tmp_path, 1, proxy)
    with Gang(first, tmp_path, tmp_path / "pods-1", environment=ENVIRONMENT, own_disks=True) as gang:
        gang.until(lambda: CASE.kill in gang.steps())
        for pod in gang.pods:
            pod.kill()
        gang.wait()
        killed = gang.steps()
    proxy.reset()
    second = two_pods(tmp_path, 2, proxy)
    with Gang(second, tmp_path, tmp_path / "pods-2", environment=ENVIRONMENT, own_disks=True) as gang:
        gang.wait()
        resumed, outcome = gang.steps(), gang.outcome()
    asked = list(proxy.asked)
    with Gang(two_pods(tmp_path, 1, None), tmp_path, tmp_path / "pods-3") as gang:
        gang.wait()
        whole = gang.steps()
    assert outcome.result is Result.SUCCEEDED, outcome
    assert min(resumed) == CASE.kill // CASE.save * CASE.save + 1
    assert {*killed, *resumed} == whole.keys()
    for step, values in [*killed.items(), *resumed.items()]:
        assert not different(values, whole[step]), step
    assert outcome.export is not None
    assert outcome.export.path == f"s3://{BUCKET}/runs/{RUN}/attempt-2/export"
    exported = store_of(proxy).get("attempt-2/export/model.safetensors")
    assert exported is not None
    assert exported[0] == (tmp_path / "whole" / RUN / "export" / "model.safetensors").read_bytes()
    brought_once(asked)
    nothing_left(store_of(proxy), tmp_path)


def store_of(proxy: StoreProxy) -> Store:
    """The run's folder."""
    spec = ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=proxy.url)
    return open_store(spec, dict(CREDENTIALS), folder=RUN)


def different(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    """What differs between two lines of the log, but for times."""
    return {key: (one[key], other.get(key)) for key in one if "second" not in key and one[key] != other.get(key)}


def brought_once(asked: list[str]) -> None:
    """Files of one rank were read by its node alone, all others by both."""
    parts = [words for words in asked if re.fullmatch(r"GET .*/checkpoint-\d+/.*\.\d{6}", words)]
    assert parts
    for words in set(parts):
        name = re.sub(r"^GET .*/checkpoint-\d+/|\.\d{6}$", "", words)
        nodes = sum(needed(name, range(node, node + 1)) for node in range(2))
        assert parts.count(words) == nodes, words
    assert {needed(re.sub(r"^GET .*/checkpoint-\d+/|\.\d{6}$", "", one), range(1)) for one in parts} == {True, False}


def nothing_left(store: Store, folder: Path) -> None:
    """On the store is what the head names; on the pods' disks no checkpoint."""
    found = store.get(HEAD)
    assert found is not None
    head = Head.model_validate_json(found[0])
    assert [(one.attempt, one.step) for one in head.checkpoints] == [(2, CASE.steps)]
    assert head.outcome is not None
    folders = {key.rpartition("/")[0].split("/", 2)[1] for key in store.listed() if "/" in key}
    assert folders == {f"checkpoint-{CASE.steps}", "export"}
    assert not list(folder.glob("pods-2/disk-*/**/*.pt"))
