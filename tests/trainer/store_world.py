"""A store that speaks S3, behind a proxy, and what attempts of a run do on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_api.quantity import MIB
from grpo_api.stores import ObjectStoreSpec
from grpo_trainer.stores import client
from grpo_trainer.stores.client import Store, open_store
from grpo_trainer.stores.head import HEAD
from grpo_trainer.stores.multiparts import Multiparts, multiparts_of
from grpo_trainer.stores.run import RunStore, checkpoint_key, export_key
from harness.programs.object_stores import BUCKET, CREDENTIALS, serving
from tests.trainer.store_proxy import StoreProxy, proxy_to

UID = "5ee0"
KEEP = 2
PART_BYTES = 5 * MIB
"""The smallest part that S3 takes."""


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
        return replaced_wait(open_store(spec, {**CREDENTIALS, **settings}, folder=folder))

    def run(self, folder: str, attempt: int) -> RunStore:
        """The folder, as an attempt's."""
        return RunStore(self.store(folder), UID, attempt, KEEP, self.multiparts(folder))

    def multiparts(self, folder: str) -> Multiparts:
        """Its open multipart uploads."""
        spec = ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=self.proxy.url)
        found = multiparts_of(spec, CREDENTIALS, folder)
        assert found
        return found


def open_uploads(multiparts: Multiparts | None) -> list[str]:
    """Keys of the multipart uploads that nobody has ended."""
    found: list[str] = []
    assert multiparts
    multiparts.abort(lambda key: found.append(key) or False)  # type: ignore[func-returns-value]
    return found


def replaced_wait(store: Store) -> Store:
    """The store, waited for a moment only."""
    return store.within(0.5)


def save(run: RunStore, step: int) -> None:
    """A small checkpoint of two parts."""
    for part in range(2):
        run.store.put(f"{checkpoint_key(run.attempt, step)}/model.{part:06}", b"%d/%d" % (run.attempt, step))
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
    """One of the implementations, whose pauses are short, and parts as small as S3 has them."""
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(kind, folder) as served,
        proxy_to(served.endpoint) as proxy,
    ):
        patch.setattr(client, "PART_BYTES", PART_BYTES)
        patch.setattr(client, "FIRST_PAUSE", 0.01)
        patch.setattr(client, "LONGEST_PAUSE", 0.05)
        patch.setattr(client, "POLL_SECONDS", 0.01)
        yield World(proxy, iter(range(1_000_000)))
