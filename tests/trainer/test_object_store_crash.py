"""A process that dies at any of its requests, before or after the store has carried it out: the
next attempt finds a whole checkpoint or begins anew, and nothing of the dead one is left at the
end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome, Result
from grpo_api.text.contract import CHECKPOINT_STORE_ENV
from grpo_trainer.checkpoints import store_checkpoints
from grpo_trainer.checkpoints.manifest import Manifest
from grpo_trainer.runtime.paths import number_in_name
from grpo_trainer.stores.run_store import HEAD, checkpoint_key
from grpo_trainer.stores.store_client import Store
from harness.programs.object_stores import CREDENTIALS, serving
from tests.generated import cases
from tests.trainer.store_attempts import brought, of, plan, save, started

pytestmark = pytest.mark.realtime

FILES = {"model.safetensors": b"model" * 50, "deep/optimizer.pt": b"o", "empty": b""}
REQUESTS = 45
"""So many an attempt makes that saves twice and exports, or one or two less."""


class DiedError(BaseException):
    """The process is dead: nothing catches it, and nothing comes after it."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A versitygw for processes with its keys, whose parts are small."""
    with (
        pytest.MonkeyPatch.context() as patch,
        serving("versitygw", tmp_path_factory.mktemp("store")) as served,
    ):
        patch.setattr(store_checkpoints, "PART_BYTES", 100)
        for name, value in CREDENTIALS.items():
            patch.setenv(CHECKPOINT_STORE_ENV + name, value)
        yield served


@contextmanager
def dying(at: int, after: bool) -> Iterator[None]:
    """Lets the process die at a request, from 0, of whatever thread: before it is carried out, or
    after."""
    lock, asked, ask = threading.Lock(), iter(range(1_000_000)), Store._ask

    def counted(store: Store, what: str, action: Callable[[], Any]) -> Any:
        with lock:
            this = next(asked)
        if this > at or (this == at and not after):
            raise DiedError
        answer = ask(store, what, action)
        if this == at:
            raise DiedError
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_ask", counted)
        yield


def live(made: TrainingPlan, model: Path, steps: tuple[int, ...], saved: list[int]) -> None:
    """An attempt from its claim to its end."""
    found = brought(made, files=FILES)
    assert (number_in_name(found) if found else 0) >= max(saved, default=0), (
        "what was saved is not lost"
    )
    seal, _ = started(made)
    for step in steps:
        save(seal, made, step, FILES)
        saved.append(step)
    of(made).run.export(model)
    of(made).run.finish(Outcome(result=Result.SUCCEEDED, attempt=made.job.attempt))


def require_whole(made: TrainingPlan) -> None:
    """Every checkpoint that counts has its manifest, and each file's parts are there."""
    run = of(made).run
    head, there = run.head(), run.store.object_sizes(may_be_empty=True)
    for one in head.checkpoints if head else ():
        manifest = run.manifest(one)
        assert manifest is not None, one
        for name in Manifest.model_validate_json(manifest).files:
            assert f"{checkpoint_key(one.attempt, one.step)}/{name}.000000" in there


@given(st.lists(st.tuples(st.integers(0, REQUESTS), st.booleans()), min_size=1, max_size=3))
@example([(REQUESTS, False)])
@settings(max_examples=cases(10, gate=3))
def test_wherever_it_dies_the_next_one_goes_on_whole(
    endpoint: str, tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[int, bool]]
) -> None:
    folder, saved = tmp_path_factory.mktemp("run"), list[int]()
    (folder / "export").mkdir()
    (folder / "export" / "model.safetensors").write_bytes(b"weights")
    for attempt, (at, after) in enumerate(deaths, 1):
        made = plan(endpoint, folder, attempt, keep=2, name=folder.name)
        with suppress(DiedError), dying(at, after):
            live(made, folder / "export", (10 * attempt, 10 * attempt + 5), saved)
        require_whole(made)
    last = plan(endpoint, folder, 9, keep=2, name=folder.name)
    live(last, folder / "export", (90, 95), saved)
    run = of(last).run
    left = {"/".join(key.split("/")[:2]) for key in run.store.object_sizes()}
    assert left == {HEAD, "attempt-9/checkpoint-90", "attempt-9/checkpoint-95", "attempt-9/export"}
