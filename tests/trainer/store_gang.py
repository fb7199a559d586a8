"""Two pods with a disk each, whose checkpoints and model are on an object store only: attempts, and
what must hold."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.history import HISTORY_FILES
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.text.contract import CHECKPOINT_STORE_ENV
from grpo_trainer.checkpoints.hashing import recorded_parts
from grpo_trainer.checkpoints.manifest import Manifest
from grpo_trainer.checkpoints.store_checkpoints import part_key
from grpo_trainer.runtime.paths import MANIFEST, attempt_folder_name
from grpo_trainer.stores.run_store import (
    HEAD,
    CommittedCheckpoint,
    Head,
    StoredRun,
    checkpoint_key,
    export_key,
)
from grpo_trainer.stores.store_client import Store, open_store
from harness.controlplane import free_port
from harness.programs.object_stores import BUCKET, CREDENTIALS
from tests.support.facts.resume_cases import Case, plan, write_data
from tests.support.ranks import demo_model
from tests.support.ranks.pods import Gang

CASE = Case(rows=8, steps=6, save=2, kill=5, accumulation=2, sync=2, strategy="Sharded", zero=3)
ENVIRONMENT = {f"{CHECKPOINT_STORE_ENV}{name}": value for name, value in CREDENTIALS.items()}
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Whole:
    """The run that nothing befalls."""

    steps: dict[int, dict[str, Any]]
    weights: bytes


@dataclass
class Run:
    """A job's attempts, in a folder that has the case's model and data."""

    folder: Path
    endpoint: str
    """The store itself."""
    name: str = "demo-0"
    case: Case = CASE
    keep: int = 1
    logged: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    """What the attempts that have ended have logged by step."""

    def gang(self, attempt: int, endpoint: str) -> Gang:
        """The pods of an attempt, which see the store there."""
        store = ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=endpoint)
        made = two_pods(self.case, self.folder, attempt, self.folder / "disk" / self.name)
        checkpoint = made.checkpoint.model_copy(update={"store": store, "keep": self.keep})
        made = made.model_copy(update={"checkpoint": checkpoint})
        pods = self.folder / f"{self.name}-{attempt}"
        return Gang(made, self.folder, pods, environment=ENVIRONMENT, own_disks=True)

    def ended(self, gang: Gang) -> None:
        """Wait for the pods, and keep what they logged."""
        gang.wait()
        self.logged.append(gang.steps())

    @property
    def spec(self) -> ObjectStoreSpec:
        """The store, without anything in between."""
        return ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=self.endpoint)

    @property
    def store(self) -> Store:
        """The run's folder on it."""
        return open_store(self.spec, dict(CREDENTIALS), folder=self.name)

    def whole_head(self) -> Head | None:
        """The head, all whose checkpoints are there to the last bit; None before the first
        claim."""
        head = StoredRun(self.store).head()
        for made in head.checkpoints if head else ():
            self._require_whole(made)
        return head

    def _require_whole(self, made: CommittedCheckpoint) -> None:
        key = checkpoint_key(made.attempt, made.step)
        for name, expected in self._parts(made).items():
            found = self.store.get(f"{key}/{name}")
            assert found is not None, f"{key}/{name}"
            assert expected(found[0]), f"{key}/{name}"

    def _parts(self, made: CommittedCheckpoint) -> dict[str, Any]:
        """Names of a checkpoint's parts, with what says whether their bytes are right."""
        found = self.store.get(f"{checkpoint_key(made.attempt, made.step)}/{MANIFEST}")
        assert found is not None
        files = Manifest.model_validate_json(found[0]).files
        return {
            part_key("", part, files[part.name].chunk_bytes)[1:]: (
                lambda data, digest=digest: xxh3_128_hexdigest(data) == digest
            )
            for part, digest in recorded_parts(files)
        }

    def require_exact(self, whole: Whole) -> None:
        """Every step of every attempt is that of the undisturbed run, and so are the weights that
        were exported."""
        for attempt, steps in enumerate(self.logged, 1):
            for step, values in steps.items():
                assert not different(values, whole.steps[step]), (attempt, step)
        head = StoredRun(self.store).head()
        assert head is not None
        assert head.export is not None
        exported = self.store.get(f"{export_key(head.export)}/{WEIGHTS}")
        assert exported is not None
        assert exported[0] == whole.weights

    def require_nothing_left(self) -> None:
        """On the store is what the head names, and the newest attempt's history."""
        head = StoredRun(self.store).head()
        assert head is not None
        assert head.outcome is not None
        named = {HEAD}
        for made in head.checkpoints:
            key = checkpoint_key(made.attempt, made.step)
            named |= {f"{key}/{name}" for name in (MANIFEST, *self._parts(made))}
        newest = attempt_folder_name(len(self.logged))
        named |= {f"{newest}/{name}" for name in HISTORY_FILES}
        left = set(self.store.object_sizes()) - named
        assert {
            key for key in left if not key.startswith(f"{export_key(head.export or 0)}/")
        } == set()


def prepare(case: Case, folder: Path) -> None:
    """The case's model and data, for all runs in the folder."""
    demo_model.save_policy(folder / "model")
    write_data(case, folder)


def undisturbed(case: Case, folder: Path) -> Whole:
    """The case on two nodes that share a volume, from its beginning to its end."""
    made = two_pods(case, folder, 1, folder / "whole" / "demo-0")
    with Gang(made, folder, folder / "pods-whole") as gang:
        assert gang.wait() == [0, 0], gang.log()[-4000:]
        return Whole(gang.steps(), (folder / "whole" / "demo-0" / "export" / WEIGHTS).read_bytes())


def two_pods(case: Case, folder: Path, attempt: int, checkpoints: Path) -> TrainingPlan:
    """The case on two nodes with a process each."""
    made = plan(case, folder, attempt)
    return made.model_copy(
        update={
            "rendezvous": made.rendezvous.model_copy(update={"port": free_port()}),
            "execution": made.execution.model_copy(update={"nodes": 2, "processes_per_node": 1}),
            "checkpoint_directory": str(checkpoints),
        }
    )


def different(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What differs between two lines of the log, but for times."""
    return {
        key: (one[key], other.get(key))
        for key in one
        if "second" not in key and one[key] != other.get(key)
    }
