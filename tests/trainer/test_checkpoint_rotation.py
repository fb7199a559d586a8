"""Which checkpoints are kept: those that were committed last, however often a run goes back, and by
the owner alone."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.report.report import Outcome, Result
from grpo_trainer.checkpoints import volume_checkpoints
from grpo_trainer.checkpoints.volume_checkpoints import complete
from grpo_trainer.runtime.errors import Preempted
from grpo_trainer.runtime.paths import MANIFEST, number_in_name
from tests.generated import cases
from tests.support.ranks.checkpoint_plans import claim, finished_attempt, rotate
from tests.trainer.test_checkpoint import make_plan, save


def test_rotation_keeps_the_newest_and_clears_what_older_attempts_left(tmp_path: Path) -> None:
    first, second = make_plan(tmp_path), make_plan(tmp_path, attempt=2)
    claim(first)
    folders = [save(first, step) for step in (10, 20)]
    torn = tmp_path / "attempt-1" / "checkpoint-30"
    torn.mkdir()
    claim(second)
    newest = save(second, 30)
    rotate(second)
    assert complete(tmp_path) == [newest, folders[1]]
    assert not folders[0].exists()
    assert not torn.exists()


COPIES = st.sampled_from(("attempt-1/checkpoint-{}", "attempt-{}/checkpoint-10", "attempt-{}"))


@given(COPIES, st.from_regex(r"[0-9]{0,2}[ ._-][\w.-]{0,8}", fullmatch=True))
@example("attempt-1/checkpoint-{}", "10.bak")
@example("attempt-{}", "1-copy")
@settings(max_examples=cases(40), deadline=None)
def test_a_users_copy_beside_checkpoints_is_neither_used_nor_deleted(path: str, name: str) -> None:
    with TemporaryDirectory() as folder:
        first, second = make_plan(Path(folder), keep=1), make_plan(Path(folder), 2, keep=1)
        claim(first)
        newest = save(first, 20)
        copy = Path(folder, path.format(name))
        shutil.copytree(newest, copy)
        (copy / "outcome-rank-0.json").write_text(
            Outcome(result=Result.SUCCEEDED).model_dump_json()
        )
        claim(second)
        rotate(second)
        assert complete(Path(folder)) == [newest]
        assert (copy / MANIFEST).exists()
        assert finished_attempt(second) is None


def test_an_attempt_that_is_superseded_while_it_deletes_deletes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_plan(tmp_path, keep=1), make_plan(tmp_path, attempt=2, keep=1)
    claim(old)
    folders = [save(old, step) for step in (10, 20, 30)]
    remove = volume_checkpoints.remove

    def then_another_attempt_begins(checkpoint: Path) -> None:
        remove(checkpoint)
        claim(new)

    monkeypatch.setattr(volume_checkpoints, "remove", then_another_attempt_begins)
    with pytest.raises(Preempted, match="superseded by attempt 2"):
        rotate(old)
    assert [folder.exists() for folder in folders] == [True, False, True]


ATTEMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=6)
"""Of each attempt, how many of the newest checkpoints it finds damaged, and how many it then
saves."""


@given(ATTEMPTS, st.integers(1, 3))
@example([(0, 3), (1, 1)], 1)
@settings(max_examples=cases(40))
def test_what_was_saved_last_is_kept_although_damaged_ones_have_higher_steps(
    attempts: list[tuple[int, int]], keep: int
) -> None:
    with TemporaryDirectory() as folder:
        for attempt, (damaged, saves) in enumerate(attempts, start=1):
            plan = make_plan(Path(folder), attempt, keep=keep)
            claim(plan)
            begin = next((number_in_name(one) for one in complete(Path(folder))[damaged:]), 0)
            for step in range(begin + 1, begin + 1 + saves):
                made = save(plan, step)
                rotate(plan)
                assert made in complete(Path(folder))
                assert len(complete(Path(folder))) <= keep
