"""The order of a run's requests to its object store: what counts is whole after each, and old
attempts change nothing.

The store is in memory, so that each request of an attempt can be looked at, and another attempt can
come before it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore, S3Store

from grpo_api.report.history import HISTORY_FILES, METRICS_FILE
from grpo_api.report.report import Result
from grpo_api.spec.checkpoint import CheckpointSpec, ObjectStoreSpec
from grpo_api.text.contract import CHECKPOINT_STORE_ENV
from grpo_trainer.checkpoints.manifest import Owner
from grpo_trainer.checkpoints.store_checkpoints import StoreSource, StoreTarget
from grpo_trainer.delivery import serving
from grpo_trainer.runtime.clock import FIRST_PAUSE, LONGEST_PAUSE, LONGEST_WAIT
from grpo_trainer.runtime.errors import BadInput, Preempted, StoreFailed
from grpo_trainer.runtime.paths import MANIFEST
from grpo_trainer.stores.run_store import (
    HEAD,
    Head,
    RunStore,
    StoredRun,
    checkpoint_key,
    run_store,
)
from grpo_trainer.stores.store_client import Store
from tests.stepped_clock import SteppedClock
from tests.support.ranks import runs
from tests.trainer.store_world import KEEP, UID, named, save

PART = f"{checkpoint_key(2, 7)}/model.000000"
"""A part of the second attempt's checkpoint."""


def nothing() -> None:
    """Nobody does anything meanwhile."""


class WatchedStore(Store):
    """A store in memory that lets others act before and after its requests."""

    def __init__(self, backend: MemoryStore) -> None:
        """Start without others."""
        super().__init__("memory:///runs/demo-0", backend, clock=SteppedClock())
        self.after_request: Callable[[], None] = nothing
        """Called after each request."""
        self.requests = 0
        """How many were made, since `interrupt` if that was called."""
        self._interrupted_at = -1
        self._interruption: Callable[[], None] = nothing

    def interrupt(self, number: int, act: Callable[[], None]) -> None:
        """Let somebody act before one of the next requests, which are counted from 0."""
        self.requests = 0
        self._interrupted_at, self._interruption = number, act

    def _ask(self, what: str, action: Callable[[], Any]) -> Any:
        if self.requests == self._interrupted_at:
            self._interruption()
        self.requests += 1
        answer = super()._ask(what, action)
        self.after_request()
        return answer


def run_of(attempt: int, store: Store) -> RunStore:
    return RunStore(store, UID, attempt, KEEP)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a finished model."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_what_counts_is_whole_after_every_request(model: Path) -> None:
    backend = MemoryStore()
    reader = run_of(9, WatchedStore(backend))

    def require_whole() -> None:
        head = reader.head()
        if head is None:
            return
        assert named(reader) <= set(reader.store.object_sizes())
        for made in head.checkpoints:
            assert reader.manifest(made) is not None

    for attempt in (1, 2):
        store = WatchedStore(backend)
        store.after_request = require_whole
        run = run_of(attempt, store)
        run.claim()
        for step in range(1, KEEP + 2):
            save(run, step)
        run.export(model)
        head = run.head()
        assert head is not None
        run.withdraw([each.key for each in head.checkpoints[:1]])
    assert set(reader.store.object_sizes()) == named(reader)


@pytest.mark.parametrize("act", ["claim", "save", "export"])
def test_an_attempt_that_is_superseded_before_any_request_changes_nothing_after_it(
    act: str, model: Path
) -> None:
    for number in count():
        backend = MemoryStore()
        store = WatchedStore(backend)
        old, new = run_of(1, store), run_of(2, WatchedStore(backend))
        if act != "claim":
            old.claim()
            save(old, 1)
        acts: dict[str, Callable[[], object]] = {
            "claim": old.claim_head,
            "save": partial(save, old, 2),
            "export": partial(old.export, model),
        }
        heads = list[Head | None]()
        store.interrupt(number, partial(begin_checkpoint, new, heads))
        with suppress(Preempted):
            acts[act]()
        if store.requests <= number:
            assert number > 1, "an act makes several requests"
            return
        assert heads == [new.head()]
        assert set(new.store.object_sizes()) == named(new) | {PART}


def begin_checkpoint(new: RunStore, heads: list[Head | None]) -> None:
    """Claim the run, upload a part of a checkpoint, and note the head as it is then."""
    new.claim()
    new.store.put(PART, b"its checkpoint is not committed yet")
    heads.append(new.head())


def test_a_checkpoint_that_is_committed_while_the_next_attempt_claims_the_run_stays_whole() -> None:
    for number in count():
        backend = MemoryStore()
        store = WatchedStore(backend)
        old, new = run_of(1, WatchedStore(backend)), run_of(2, store)
        old.claim()
        save(old, 1)
        store.interrupt(number, partial(save_unless_superseded, old))
        new.claim()
        if store.requests <= number:
            assert number > 1, "a claim makes several requests"
            return
        assert named(new) <= set(new.store.object_sizes())


def save_unless_superseded(old: RunStore) -> None:
    """Save a second checkpoint, which fails once the next attempt has the run."""
    with suppress(Preempted):
        save(old, 2)


def history(run: RunStore, folder: Path, step: int) -> None:
    """Sends the history of an attempt by this step."""
    own = folder / f"attempt-{run.attempt}"
    own.mkdir(exist_ok=True)
    for name in HISTORY_FILES:
        (own / name).write_text(f"{run.attempt} {step}")
    run.send_history(own)


def told(run: RunStore) -> set[str]:
    """What is in the history that a reader finds."""
    return {b"".join(run.store.stream(key)).decode() for key in run.history_keys().values()}


def test_the_newest_attempts_history_stays_and_a_deposed_ones_changes_nothing(
    tmp_path: Path,
) -> None:
    backend = MemoryStore()
    old, new = run_of(1, WatchedStore(backend)), run_of(2, WatchedStore(backend))
    old.claim()
    assert told(old) == set()
    history(old, tmp_path, 4)
    save(old, 4)
    new.claim()
    assert told(new) == {"1 4"}, "until the new attempt has one of its own"
    new.fetch_rows(tmp_path / "disk")
    assert (tmp_path / "disk" / "attempt-1" / METRICS_FILE).read_text() == "1 4"
    history(new, tmp_path, 6)
    history(old, tmp_path, 9)
    assert told(new) == {"2 6"}
    save(new, 6)
    assert set(new.store.object_sizes()) == named(new) | {
        f"attempt-2/{name}" for name in HISTORY_FILES
    }


def test_a_history_that_is_read_while_the_next_attempt_begins_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = runs.plan(tmp_path, folder=tmp_path / "disk")
    readers = list[RunStore]()
    monkeypatch.setattr(serving, "run_store", lambda *_, **__: readers[-1])
    for number in count():
        backend = MemoryStore()
        store = WatchedStore(backend)
        old, new = run_of(1, WatchedStore(backend)), run_of(2, WatchedStore(backend))
        old.claim()
        history(old, tmp_path, 4)
        new.claim()
        store.interrupt(number, partial(begin_steps, new, tmp_path))
        readers.append(run_of(1, store))
        serving.copy_history(plan, tmp_path / str(number))
        copies = {path.read_text() for path in (tmp_path / str(number)).iterdir()}
        assert copies == ({"1 4"} if store.requests <= number else {"2 6"}), number
        if store.requests <= number:
            assert number > 2, "a history is several requests"
            return


def begin_steps(run: RunStore, folder: Path) -> None:
    """Takes steps up to a checkpoint, which deletes what earlier attempts have of the history."""
    history(run, folder, 6)
    save(run, 6)


def test_rows_of_earlier_attempts_outlast_a_store_that_is_away_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, get_range, tries = MemoryStore(), obstore.get_range, count()
    old, new = run_of(1, WatchedStore(backend)), run_of(2, WatchedStore(backend))
    old.claim()
    history(old, tmp_path, 4)
    new.claim()

    def away(*arguments: Any, **named: Any) -> Any:
        if next(tries) < 6:
            raise OSError("connection reset")
        return get_range(*arguments, **named)

    monkeypatch.setattr(obstore, "get_range", away)
    StoreTarget(new, tmp_path / "disk", 1, Owner(uid=UID, attempt=2)).fetch_history()
    assert (tmp_path / "disk" / "attempt-1" / METRICS_FILE).read_text() == "1 4"


def test_a_store_that_is_gone_costs_the_history_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(WatchedStore):
        def _ask(self, what: str, _: Callable[[], Any]) -> Any:
            raise StoreFailed(f"{what}: no answer")

        def within(self, _: float) -> "Gone":
            return self

    folder = tmp_path / "attempt-1"
    folder.mkdir()
    (folder / METRICS_FILE).touch()
    target = StoreTarget(run_of(1, Gone(MemoryStore())), tmp_path, 1, Owner(uid=UID, attempt=1))
    target.fetch_history()
    target.send_history()
    assert caplog.text.count("no answer") == 2


def test_the_newline_at_the_end_of_a_key_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{CHECKPOINT_STORE_ENV}AWS_ACCESS_KEY_ID", "key\n")
    monkeypatch.setenv(f"{CHECKPOINT_STORE_ENV}AWS_SECRET_ACCESS_KEY", "s3cret\r\n")
    store = ObjectStoreSpec(url="s3://bucket", endpoint="http://127.0.0.1:9")
    plan = runs.plan(Path("/models/demo"), folder=Path("/checkpoints/demo"))
    run = run_store(plan.model_copy(update={"checkpoint": CheckpointSpec(store=store)}))
    assert run is not None
    backend = run.store._backend
    assert isinstance(backend, S3Store)
    keys = backend.config
    assert (keys.get("access_key_id"), keys.get("secret_access_key")) == ("key", "s3cret")


def test_another_job_that_takes_the_folder_of_a_run_deletes_nothing() -> None:
    backend = MemoryStore()
    run = run_of(1, WatchedStore(backend))
    run.claim()
    run.store.put(f"{checkpoint_key(1, 1)}/model.000000", b"not committed yet")
    before = run.store.object_sizes()
    with pytest.raises(BadInput, match="belongs to the job with uid"):
        replace(run_of(2, WatchedStore(backend)), uid="other").claim()
    assert run.store.object_sizes() == before


def test_a_run_whose_head_is_gone_keeps_its_checkpoints_and_says_what_to_do() -> None:
    backend = MemoryStore()
    run = run_of(1, WatchedStore(backend))
    run.claim()
    save(run, 1)
    run.store.delete([HEAD])
    before = run.store.object_sizes()
    with pytest.raises(BadInput, match=r"head\.json is gone.*checkpoint-1/manifest\.json"):
        run_of(2, WatchedStore(backend)).claim_head()
    assert run.store.object_sizes() == before


def test_a_success_of_a_newer_image_ends_a_run_and_a_newer_head_is_left_alone() -> None:
    run = run_of(1, WatchedStore(MemoryStore()))
    run.claim()
    end = '{"result": "Succeeded", "metrics": {"kl": "NaN"}, "fieldOfANewerImage": 1}'
    head = f'{{"uid": "{UID}", "attempt": 1, "outcome": {end}'
    run.store.put(HEAD, f"{head}}}".encode())
    now = run.head()
    assert now is not None
    assert now.outcome is not None
    assert now.outcome.result is Result.SUCCEEDED
    run.store.put(HEAD, f'{head}, "fieldOfANewerImage": []}}'.encode())
    with pytest.raises(BadInput, match="is not a run's head"):
        run.claim_head()


def test_another_run_that_goes_on_while_its_checkpoints_are_listed_is_listed_again(
    tmp_path: Path,
) -> None:
    backend = MemoryStore()
    run = replace(run_of(1, WatchedStore(backend)), keep=1)
    run.claim()
    save(run, 1)
    store = WatchedStore(backend)
    store.interrupt(1, partial(save, run, 2))
    checkpoints = StoreSource(StoredRun(store), tmp_path, 1).list_checkpoints()
    assert [checkpoint.name for checkpoint in checkpoints] == ["checkpoint-2"]


def test_a_manifest_that_was_changed_after_its_commit_is_not_used() -> None:
    run = run_of(1, WatchedStore(MemoryStore()))
    run.claim()
    save(run, 1)
    head = run.head()
    assert head is not None
    (made,) = head.checkpoints
    run.store.put(f"{checkpoint_key(1, 1)}/{MANIFEST}", b"{}")
    assert run.manifest(made) is None


def test_a_write_counts_although_no_answer_to_one_ever_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, put_if_unchanged = run_of(1, WatchedStore(MemoryStore())), Store.put_if_unchanged

    def carried_out_and_refused(*arguments: Any) -> bool:
        """The client sent it again by itself, and met its own first write."""
        put_if_unchanged(*arguments)
        return False

    monkeypatch.setattr(Store, "put_if_unchanged", carried_out_and_refused)
    run.claim()
    save(run, 1)
    head = run.head()
    assert head is not None
    assert [made.step for made in head.checkpoints] == [1]


@pytest.mark.parametrize("seconds", [0, 10 * LONGEST_WAIT])
def test_an_upload_that_fails_is_tried_again_however_long_it_took(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, backend, put = SteppedClock(), MemoryStore(), obstore.put
    failures = iter([OSError("connection reset")])

    def upload(*arguments: Any, **options: Any) -> None:
        clock.sleep(seconds)
        for failure in failures:
            raise failure
        put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", upload)
    (tmp_path / "model").write_bytes(b"weights")
    store = Store("memory:///runs/demo-0", backend, clock=clock)
    store.put_file("export/model", tmp_path / "model")
    assert store.object_sizes() == {"export/model": 7}


@pytest.mark.parametrize("seconds", [300.0, 10 * LONGEST_WAIT])
def test_an_upload_that_fails_again_and_again_is_given_up(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tries = SteppedClock(), list[float]()

    def upload(*_: Any, **__: Any) -> None:
        tries.append(clock.now())
        assert len(tries) < 20
        clock.sleep(seconds)
        raise OSError("connection reset")

    monkeypatch.setattr(obstore, "put", upload)
    with pytest.raises(StoreFailed, match=r"put export/model.*the connection was cut"):
        Store("memory:///runs/demo-0", MemoryStore(), clock=clock).put_file(
            "export/model", tmp_path / "model"
        )


def test_a_request_that_fails_is_sent_again_after_pauses_that_double_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, tries = SteppedClock(), list[float]()

    def fail(*_: Any) -> None:
        tries.append(clock.now())
        raise OSError("connection reset")

    monkeypatch.setattr(obstore, "get", fail)
    with pytest.raises(StoreFailed, match="the connection was cut"):
        Store(
            "memory:///runs/demo-0", MemoryStore(), longest_wait=20 * LONGEST_PAUSE, clock=clock
        ).get("head.json")
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == pytest.approx(
        [min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) for number in range(len(pauses))]
    )
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)
