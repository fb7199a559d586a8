"""States of a run's folder that kills, deposed attempts and failing listings leave: what an attempt
makes of them."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_api.report.report import Outcome, Result
from grpo_api.spec.checkpoint import ExportSpec
from grpo_trainer.checkpoints import volume_checkpoints
from grpo_trainer.checkpoints.export import describe_export
from grpo_trainer.checkpoints.hashing import damage
from grpo_trainer.checkpoints.volume_checkpoints import VolumeSource, complete
from grpo_trainer.runtime import durable_files
from grpo_trainer.runtime.errors import BadInput, DiskFailed, Preempted
from grpo_trainer.weights.model_files import Source
from tests.support.ranks.checkpoint_plans import (
    choose,
    claim,
    export_model,
    finished_attempt,
    rotate,
)
from tests.trainer.test_checkpoint import make_plan, save

SOURCE = Source("demo", Path("/models/demo"), "", "float32")


class DiedError(BaseException):
    """The process is dead: nothing catches it."""


def write_model(folder: str) -> None:
    """Write a model of two files."""
    Path(folder).mkdir(parents=True)
    for name in ("a.safetensors", "b.safetensors"):
        Path(folder, name).write_bytes(Path(folder).name.encode())


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE])
def test_checkpoints_of_a_folder_that_can_not_be_listed_are_no_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    save(plan, 10)
    iterdir = Path.iterdir

    def refuse(folder: Path) -> Iterator[Path]:
        if folder.name == "attempt-1":
            raise OSError(error, os.strerror(error), str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DiskFailed, match="attempt-1"):
        choose(plan, {})


def test_an_attempt_that_is_superseded_while_it_hashes_its_model_replaces_no_export(
    tmp_path: Path,
) -> None:
    old, new = make_plan(tmp_path), make_plan(tmp_path, attempt=2)
    claim(old)
    with pytest.raises(Preempted, match="superseded by attempt 2"):
        export_model(old, SOURCE, write_model, attest=lambda _: claim(new))
    assert not (tmp_path / "export").exists()


def test_an_attempt_that_is_superseded_does_not_succeed_either_where_it_exports_no_model(
    tmp_path: Path,
) -> None:
    old, new = make_plan(tmp_path), make_plan(tmp_path, attempt=2)
    old = old.model_copy(update={"export": ExportSpec(to="None")})
    claim(old)
    assert export_model(old, SOURCE, write_model) is None
    claim(new)
    with pytest.raises(Preempted, match="superseded by attempt 2"):
        export_model(old, SOURCE, write_model)
    # A disk that fails costs a run without a model nothing.
    (tmp_path / "owner.json").unlink()
    assert export_model(old, SOURCE, write_model) is None


def test_an_attempt_that_claims_at_the_same_moment_and_writes_last_is_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_plan(tmp_path), make_plan(tmp_path, attempt=2)
    write = durable_files.write_atomically

    def write_late(path: Path, text: str) -> None:
        monkeypatch.setattr(volume_checkpoints, "write_atomically", write)
        claim(new)
        write(path, text)

    monkeypatch.setattr(volume_checkpoints, "write_atomically", write_late)
    claim(old)
    newest = save(new, 5)
    with pytest.raises(Preempted, match="superseded by attempt 2"):
        save(old, 10)
    assert complete(tmp_path) == [newest]


def test_a_kill_while_an_earlier_export_is_deleted_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [make_plan(tmp_path, attempt) for attempt in (1, 2, 3)]
    claim(plans[0])
    exported = export_model(plans[0], SOURCE, write_model)
    assert exported is not None
    claim(plans[1])
    rmtree = shutil.rmtree

    def die_halfway(folder: Path, **_: object) -> None:
        for path in sorted(folder.glob("*.safetensors"))[:1]:
            path.unlink()
            raise DiedError

    monkeypatch.setattr(shutil, "rmtree", die_halfway)
    with pytest.raises(DiedError):
        export_model(plans[1], SOURCE, write_model)
    assert (exported / "a.safetensors").read_bytes() == b".export-attempt-2"
    assert (exported / "b.safetensors").read_bytes() == b".export-attempt-2"
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    claim(plans[2])
    export_model(plans[2], SOURCE, write_model)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"owner.json", "export", "attempt-1", "attempt-2", "attempt-3"}


def test_a_success_whose_export_is_gone_is_no_end(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    exported = export_model(plan, SOURCE, write_model)
    assert exported is not None
    outcome = Outcome(result=Result.SUCCEEDED, export=describe_export(exported))
    (tmp_path / "attempt-1" / "outcome-rank-0.json").write_text(outcome.model_dump_json())
    assert finished_attempt(plan) == outcome
    shutil.rmtree(tmp_path / "export")
    assert finished_attempt(plan) is None
    assert complete(tmp_path) == []


@pytest.mark.parametrize("late", [False, True])
def test_another_runs_checkpoint_that_its_rotation_deletes_is_replaced_by_its_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    source = make_plan(tmp_path / "source", keep=1)
    claim(source)
    save(source, 10)
    plan = make_plan(tmp_path / "own", uid="b").model_copy(
        update={"resume_from": str(tmp_path / "source")}
    )
    saved: list[Path] = []

    def go_on() -> None:
        if not saved:
            saved.append(save(source, 20))
            rotate(source)

    bring = VolumeSource.bring

    def bring_late(self: VolumeSource, checkpoint: Path) -> list[str]:
        go_on()
        return bring(self, checkpoint)

    def hash_late(folder: Path, files: Any, rank: int, world_size: int) -> list[str]:
        go_on()
        return damage(folder, files, rank, world_size)

    if late:
        monkeypatch.setattr("grpo_trainer.checkpoints.volume_checkpoints.damage", hash_late)
    else:
        monkeypatch.setattr(VolumeSource, "bring", bring_late)
    assert choose(plan, {}) == saved[0]
    (saved[0] / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"model\.safetensors is missing.*another run in spec"):
        choose(plan, {})
