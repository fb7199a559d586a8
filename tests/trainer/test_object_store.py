"""A run's folder on an object store: its fence, its faults and its leftovers, on two
implementations of S3.

A crash at a request is what the store sees of it: from that request on nothing more comes, carried
out or not.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from grpo_api.report.report import Outcome, Result
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_trainer.runtime.errors import BadInput, Denied, Preempted, StoreFailed
from grpo_trainer.stores.run_store import HEAD, Head, RunStore, checkpoint_key
from grpo_trainer.stores.store_client import open_store
from harness.programs.object_stores import BUCKET, CREDENTIALS
from tests.trainer.store_proxy import FAULTS
from tests.trainer.store_world import KEEP, KINDS, PART_BYTES, UID, World, named, save, served_world

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Each of the implementations."""
    with served_world(request.param, tmp_path_factory.mktemp("store")) as world:
        yield world


def test_what_is_committed_stays_and_what_is_not_goes(world: World, tmp_path: Path) -> None:
    folder = world.folder()
    first = world.run(folder, 1)
    first.claim()
    for step in (1, 2, 3):
        save(first, step)
    first.store.put(f"{checkpoint_key(1, 4)}/model.000000", b"killed amid this")
    second = world.run(folder, 2)
    second.claim()
    assert set(second.store.object_sizes()) == named(second)
    head = second.head()
    assert head is not None
    assert [(one.attempt, one.step) for one in head.checkpoints] == [(1, 2), (1, 3)]
    (tmp_path / "model.safetensors").write_bytes(b"w" * (PART_BYTES + 1))
    assert second.export(tmp_path) == f"s3://{BUCKET}/runs/{folder}/attempt-2/export"
    second.finish(Outcome(result=Result.SUCCEEDED, attempt=2))
    assert set(second.store.object_sizes()) == named(second)
    found = second.store.get("attempt-2/export/model.safetensors")
    assert found is not None
    assert found[0] == (tmp_path / "model.safetensors").read_bytes()
    ended = world.run(folder, 3).head()
    assert ended is not None
    assert ended.outcome == Outcome(result=Result.SUCCEEDED, attempt=2)


def test_an_old_attempt_that_lives_on_commits_nothing_and_leaves_nothing(
    world: World, tmp_path: Path
) -> None:
    folder = world.folder()
    old, new = world.run(folder, 1), world.run(folder, 2)
    old.claim()
    save(old, 1)
    new.claim()
    old.store.put(f"{checkpoint_key(1, 4)}/model.000000", b"of a save that failed")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    before = new.store.get(HEAD)
    for act in (
        partial(save, old, 2),
        old.claim,
        partial(old.withdraw, []),
        partial(old.export, tmp_path),
    ):
        with pytest.raises(Preempted, match="attempt 1 is superseded by attempt 2"):
            act()
    assert new.store.get(HEAD) == before
    assert set(new.store.object_sizes()) == named(new)
    save(new, 2)
    assert [one.attempt for one in (new.head() or Head(uid="", attempt=1)).checkpoints] == [1, 2]


def test_another_job_has_no_way_in(world: World) -> None:
    folder = world.folder()
    world.run(folder, 1).claim()
    with pytest.raises(BadInput, match="belongs to the job with uid 5ee0"):
        replace(world.run(folder, 2), uid="other").claim()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_passes_costs_nothing(world: World, fault: str) -> None:
    folder = world.folder()
    run = world.run(folder, 1)
    try:
        world.proxy.reset(lambda number, _: fault if number % 2 else "")
        run.claim()
        save(run, 1)
        run.withdraw([])
    finally:
        world.proxy.reset()
    assert [one.step for one in (run.head() or Head(uid="", attempt=1)).checkpoints] == [1]
    assert set(run.store.object_sizes()) == named(run)


def test_what_counts_does_so_although_the_rest_can_not_be_deleted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run = world.run(world.folder(), 1)
    run.claim()
    try:
        world.proxy.reset(lambda _, words: "503" if words.startswith(("POST", "DELETE")) else "")
        for step in range(1, KEEP + 2):
            save(run, step)
    finally:
        world.proxy.reset()
    assert "what counts no more stays until the next checkpoint" in caplog.text
    assert f"{checkpoint_key(1, 1)}/manifest.json" in run.store.object_sizes()
    save(run, KEEP + 2)
    assert set(run.store.object_sizes()) == named(run)


def test_a_store_that_stays_away_is_given_up(world: World) -> None:
    run = world.run(world.folder(), 1)
    try:
        world.proxy.reset(lambda *_: "503")
        with pytest.raises(
            StoreFailed, match=r"no answer for \d+ s, the last try failed with: .*503"
        ):
            run.claim()
    finally:
        world.proxy.reset()


def test_a_refusal_is_told_at_once(world: World) -> None:
    spec = ObjectStoreSpec(url="s3://no-such-bucket", endpoint=world.proxy.url)
    run = RunStore(open_store(spec, dict(CREDENTIALS)), UID, 1, KEEP)
    with pytest.raises(
        BadInput,
        match=r"spec.checkpoint.store: s3://no-such-bucket: put .* is refused: .*Check the",
    ):
        run.claim()
    with pytest.raises(Denied):
        replace(run, attempt=2).claim()


@pytest.mark.parametrize("condition", ["if-none-match", "if-match"])
def test_a_store_that_ignores_conditions_is_refused(world: World, condition: str) -> None:
    run = world.run(world.folder(), 1)

    def unconditional(_: int, words: str) -> str:
        return f"ignores {condition}" if "probe" in words else ""

    try:
        world.proxy.reset(unconditional)
        with pytest.raises(
            BadInput,
            match=f"(?i)took a write with {condition}.*Use a store with conditional writes",
        ):
            run.claim()
    finally:
        world.proxy.reset()
    assert run.head() is None
    assert run.store.object_sizes(may_be_empty=True) == {}


def test_settings_that_no_client_knows_are_told() -> None:
    with pytest.raises(BadInput, match=r"AWS_ACCESS_KEY_ID, BOGUS, region: .*bogus"):
        open_store(ObjectStoreSpec(url="s3://bucket"), {"AWS_ACCESS_KEY_ID": "a", "BOGUS": "b"})
