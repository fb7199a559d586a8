"""`make flaky-check` ends at the first failure with what repeats it, and leaves no busy process
behind."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import flaky_check

pytestmark = pytest.mark.realtime

FAILS_IN_THE_SECOND_ROUND = """
import pytest, pathlib

@pytest.mark.realtime
def test_flaky(request):
    rounds = pathlib.Path(__file__).with_name("rounds")
    rounds.write_text(rounds.read_text() + "x" if rounds.exists() else "x")
    assert rounds.read_text() != "xx"
"""


def test_the_first_failure_ends_it_and_is_repeatable(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    test = tmp_path / "test_flaky.py"
    test.write_text(FAILS_IN_THE_SECOND_ROUND)
    assert flaky_check.repeat([str(test)], 10) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "failed in round 2 of 10, with --hypothesis-seed=2"
    assert [line for line in lines if line.startswith("==")][:1] == ["== round 1 of 10"]


def test_files_without_realtime_tests_are_said_to_have_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_pure.py").write_text("def test_pure(): pass\n")
    assert flaky_check.repeat([str(tmp_path)], 10) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "none of these tests is marked realtime"


def test_the_busy_process_ends_with_the_check() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    processes = []

    def interrupt(loop: subprocess.Popen[bytes]) -> None:
        processes.append(loop)
        assert os.sched_getaffinity(loop.pid) == os.sched_getaffinity(0) == {core}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), flaky_check.busy_core(core) as loop:
        interrupt(loop)
    assert processes[0].poll() is not None
    assert os.sched_getaffinity(0) == before
