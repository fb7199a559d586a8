"""An attempt on a volume is killed, or superseded, before each line of its claim, its checkpoints
and its export: the newest attempt alone has the folder, and its restart goes on."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.checkpoints.volume_checkpoints import complete
from grpo_trainer.runtime import durable_files
from grpo_trainer.runtime.errors import DiskFailed, Preempted
from grpo_trainer.runtime.paths import number_in_name
from tests.generated import cases
from tests.support.ranks.checkpoint_plans import choose, claim, export_model, rotate
from tests.trainer.test_checkpoint import make_plan, save
from tests.trainer.test_checkpoint_states import SOURCE, DiedError, write_model

TRACED = ("volume_checkpoints.py", "export.py", "durable_files.py")
"""Files before whose lines something happens."""

STRIDE = 5 if cases(20) < 20 else 1
"""The gate takes every fifth line of long acts."""


def save_and_rotate(plan: TrainingPlan, step: int) -> None:
    save(plan, step)
    rotate(plan)


def export(plan: TrainingPlan) -> None:
    export_model(plan, SOURCE, write_model)


ACTS: dict[str, Callable[[TrainingPlan], None]] = {
    "claim": claim,
    "save": lambda plan: save_and_rotate(plan, 20),
    "export": export,
}


def interrupt(act: Callable[[], None], number: int, happen: Callable[[], None]) -> bool:
    """Do an act, and let something happen before one of its lines, which are counted from 0; False
    if it has fewer."""
    lines, earlier = count(), sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line" and next(lines) == number:
            happen()
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(earlier)
    return next(lines) > number


def die() -> None:
    raise DiedError


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dies", [True, False])
def test_before_whatever_line_it_happens_the_newest_attempt_has_the_folder(
    act: str, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(durable_files, "PAUSES", ())
    for number in count(step=1 if act == "claim" else STRIDE):
        with TemporaryDirectory() as name:
            folder = Path(name)
            old, new = make_plan(folder), make_plan(folder, attempt=2)
            if act != "claim":
                claim(old)
                save(old, 10)

            def supersede(new: TrainingPlan = new) -> None:
                # A process of another pod, which has other temporary names.
                with monkeypatch.context() as pod:
                    pod.setattr(os, "getpid", lambda: 0)
                    claim(new)

            with suppress(DiedError, Preempted, DiskFailed):
                reached = interrupt(
                    lambda old=old: ACTS[act](old),  # type: ignore[misc]
                    number,
                    die if dies else supersede,
                )
                if not reached:
                    assert number > 1, "an act has several lines"
                    return
            if dies:
                claim(new)
            _require_newest(folder, old, new, begun=act != "claim")


def _require_newest(folder: Path, old: TrainingPlan, new: TrainingPlan, *, begun: bool) -> None:
    """The newest attempt goes on from what was sealed, and the old one changes nothing."""
    found = choose(new, {})
    assert (number_in_name(found) if found else 0) >= (10 if begun else 0)
    save_and_rotate(new, 30)
    export(new)
    for late in (lambda: save(old, 40), lambda: export(old)):
        with pytest.raises(Preempted):
            late()
    assert choose(new, {}) == folder / "attempt-2" / "checkpoint-30"
    assert (folder / "export" / "a.safetensors").read_bytes() == b".export-attempt-2"
    save_and_rotate(new, 50)
    export(new)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".export-attempt-2")]
    assert hidden == []
    assert len(complete(folder)) == new.checkpoint.keep
