"""Attempts that act on one run's folder in any order, amid faults and crashes: what must hold after
each act."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import Outcome, Result
from grpo_trainer.runtime.errors import Preempted, StoreFailed
from grpo_trainer.stores.run_store import Head, RunStore
from tests.generated import cases
from tests.trainer.store_proxy import FAULTS
from tests.trainer.store_world import KINDS, PART_BYTES, UID, World, named, save, served_world

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Each of the implementations."""
    with served_world(request.param, tmp_path_factory.mktemp("store")) as world:
        yield world


@dataclass(frozen=True)
class Act:
    """What an attempt does, and what befalls its requests."""

    attempt: int
    kind: str
    at: int
    """The request, from 0, that a fault befalls."""
    fault: str
    dead: bool
    """Whether nothing comes through after it, as after a crash."""

    def of(self, number: int, _: str) -> str:
        """The fault of a request."""
        if number == self.at:
            return self.fault
        return "cut before" if self.dead and number > self.at else ""


ACTS = st.builds(
    Act,
    st.integers(1, 3),
    st.sampled_from(["claim", "save", "save", "save", "withdraw", "export", "finish"]),
    st.integers(0, 12),
    st.sampled_from(["", *FAULTS]),
    st.booleans(),
)


@given(acts=st.lists(ACTS, min_size=1, max_size=10))
@settings(max_examples=cases(6, gate=4))
def test_whatever_happens_the_head_only_goes_forward(
    world: World, acts: list[Act], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Old attempts change nothing, what counts is whole, an act that failed was done or not, and
    nothing is left."""
    folder, model = world.folder(), tmp_path_factory.mktemp("model")
    (model / "model.safetensors").write_bytes(b"w" * (PART_BYTES + 1))
    direct = world.run(folder, 9)
    alive: set[int] = set()
    for number, act in enumerate(acts):
        if act.attempt not in alive and act.kind != "claim":
            continue
        before = direct.head()
        ended = _tried(world, folder, act, number + 1, model)
        # An attempt whose claim fails ends there.
        alive |= {act.attempt} if ended is None else set()
        _judge(direct, act, before, ended)
    direct.claim()
    assert set(direct.store.object_sizes()) == named(direct)


def _tried(world: World, folder: str, act: Act, step: int, model: Path) -> type[Exception] | None:
    """Does an act amid its faults; how it failed, if it did."""
    run = world.run(folder, act.attempt)
    acts: dict[str, Callable[[], Any]] = {
        "claim": run.claim,
        "save": partial(save, run, step),
        "withdraw": lambda: run.withdraw(
            [each.key for each in (run.head() or Head(uid=UID, attempt=1)).checkpoints[:1]]
        ),
        "export": partial(run.export, model),
        "finish": partial(run.finish, Outcome(result=Result.SUCCEEDED, attempt=act.attempt)),
    }
    world.proxy.reset(act.of if act.fault else lambda *_: "")
    try:
        acts[act.kind]()
    except (Preempted, StoreFailed) as error:
        return type(error)
    finally:
        world.proxy.reset()
    return None


def _judge(direct: RunStore, act: Act, before: Head | None, ended: type[Exception] | None) -> None:
    after = direct.head()
    if before is None or after is None:
        assert after is None or act.kind == "claim"
        return
    assert after.attempt >= before.attempt
    if act.attempt < before.attempt:
        assert after == before
        assert ended is not None
    if ended is None:
        assert after.attempt == act.attempt
    if act.kind == "save" and ended is None:
        assert after.checkpoints[-1].attempt == act.attempt
    if after.nonce == before.nonce:
        assert after == before
    for one in after.checkpoints:
        manifest = direct.manifest(one)
        assert manifest is not None
        assert hashlib.sha256(manifest).hexdigest() == one.manifest
    assert named(direct) <= set(direct.store.object_sizes())
