"""A store that speaks S3, behind a proxy, and what attempts of a run do on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.text.units import MIB
from grpo_trainer.stores import store_client
from grpo_trainer.stores.run_store import HEAD, RunStore, checkpoint_key, export_key
from grpo_trainer.stores.store_client import Store, open_store
from harness.programs.object_stores import BUCKET, CREDENTIALS, serving
from tests.stepped_clock import SteppedClock
from tests.trainer.store_proxy import StoreProxy, proxy_to

KINDS = ["versitygw", pytest.param("moto", marks=pytest.mark.slow)]
"""Implementations of S3, as parameters of a fixture."""
UID = "5ee0"
KEEP = 2
PART_BYTES = 5 * MIB
"""The smallest part that S3 takes."""
SHORT_WAIT = 20.0
"""Seconds of a clock that only sleeps move, without any answer: five tries."""


@dataclass(frozen=True)
class World:
    """A store behind a proxy, and a new run's folder on it for each case."""

    proxy: StoreProxy
    folders: Iterator[int]

    def folder(self) -> str:
        """A folder that nobody has used."""
        return f"demo-{next(self.folders)}"

    def store(self, folder: str, **settings: str) -> Store:
        """The folder, as a client sees it that gives up soon."""
        spec = ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=self.proxy.url)
        found = open_store(spec, {**CREDENTIALS, **settings}, folder=folder, clock=SteppedClock())
        return found.within(SHORT_WAIT)

    def run(self, folder: str, attempt: int) -> RunStore:
        """The folder, as an attempt's."""
        return RunStore(self.store(folder), UID, attempt, KEEP)


def save(run: RunStore, step: int) -> None:
    """A small checkpoint of two parts."""
    for part in range(2):
        run.store.put(
            f"{checkpoint_key(run.attempt, step)}/model.{part:06}", b"%d/%d" % (run.attempt, step)
        )
    run.commit(step, b'{"step": %d, "attempt": %d}' % (step, run.attempt), 1.0)


def named(run: RunStore) -> set[str]:
    """All keys that the head names, and its own."""
    head = run.head()
    assert head is not None
    found = {HEAD}
    for one in head.checkpoints:
        folder = checkpoint_key(one.attempt, one.step)
        found |= {f"{folder}/manifest.json", f"{folder}/model.000000", f"{folder}/model.000001"}
    return found | ({f"{export_key(head.export)}/model.safetensors"} if head.export else set())


@contextmanager
def served_world(kind: str, folder: Path) -> Iterator[World]:
    """One of the implementations, with parts as small as S3 has them."""
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(kind, folder) as served,
        proxy_to(served) as proxy,
    ):
        patch.setattr(store_client, "PART_BYTES", PART_BYTES)
        yield World(proxy, iter(range(1_000_000)))
