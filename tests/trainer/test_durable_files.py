"""In which order files reach the disk: a power cut leaves the old file or the new one, and never a
manifest alone."""

import os
from pathlib import Path
from typing import Any

import pytest

from grpo_api.text.timing import Clock
from grpo_trainer.checkpoints.manifest import Manifest
from grpo_trainer.runtime.durable_files import write_atomically
from grpo_trainer.runtime.paths import MANIFEST, attempt_folder, checkpoint_folder
from tests.support.ranks import runs
from tests.support.ranks.checkpoint_plans import claim, commit

Events = list[tuple[str, str]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What was made durable, and what was renamed to what, in order: each with the path."""
    noted: Events = []
    sync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        noted.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        sync(descriptor)

    def renamed(path: Path, target: Any) -> Path:
        noted.append(("rename", f"{path} to {target}"))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    return noted


def test_a_file_is_durable_before_its_name_and_its_name_before_the_call_returns(
    tmp_path: Path, events: Events
) -> None:
    path = tmp_path / "outcome.json"
    path.write_text("old")
    write_atomically(path, "new")
    temporary = tmp_path / f".outcome.json.{os.uname().nodename}.{os.getpid()}.tmp"
    assert events == [
        ("sync", str(temporary)),
        ("rename", f"{temporary} to {path}"),
        ("sync", str(tmp_path)),
    ]
    assert path.read_text() == "new"


def test_a_file_that_can_not_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outcome.json"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert [one.name for one in tmp_path.iterdir()] == ["outcome.json"]
    assert path.read_text() == "old"


def test_the_names_of_all_files_are_durable_before_the_manifest_that_lists_them(
    tmp_path: Path, events: Events
) -> None:
    plan = runs.plan(Path("/models/demo"), folder=tmp_path)
    claim(plan)
    attempt = attempt_folder(plan.checkpoint_directory, plan.job.attempt)
    assert attempt is not None
    checkpoint = checkpoint_folder(attempt, 3)
    (checkpoint / "global_step3").mkdir(parents=True)
    events.clear()
    commit(plan, checkpoint, Manifest(attempt=1, step=3, identity={}, clock=Clock(), files={}))
    sealed = next(
        at for at, (kind, what) in enumerate(events) if kind == "rename" and what.endswith(MANIFEST)
    )
    before = {what for kind, what in events[:sealed] if kind == "sync"}
    assert {str(one) for one in (checkpoint / "global_step3", checkpoint, attempt)} <= before
    assert ("sync", str(checkpoint)) in events[sealed:]
