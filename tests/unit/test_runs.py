"""Every test file is in the runs of the tests, and in one part of them."""

import re
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests import runs
from tests.file_scheduling import TOGETHER, scope_of

ROOT = Path(__file__).parents[2]
UNIT = Path(__file__).parent


def files(stage: runs.Stage) -> list[str]:
    return [argument for argument in stage.command if re.fullmatch(r"tests/\S+\.py", argument)]


def all_test_files() -> list[str]:
    found = [path.relative_to(ROOT) for path in ROOT.rglob("test_*.py")]
    return sorted(str(path) for path in found if not path.parts[0].startswith("."))


def test_each_part_has_files_and_each_test_file_of_the_repository_one_part() -> None:
    parts = [runs.files_of(part) for part in runs.PARTS]
    assert all(parts)
    assert sorted(path for part in parts for path in part) == all_test_files()


def test_a_file_outside_the_parts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runs, "PARTS", [part for part in runs.PARTS if part.name not in ("chaos", "api")]
    )
    with pytest.raises(LookupError, match=r"^tests/integration/test_alerts\.py belongs to no part"):
        runs.part_of_files()


def test_the_gate_and_the_long_run_have_every_file_once() -> None:
    computing, beside = runs.gate_stages()
    gate = [path for stage in (computing, *beside) for path in files(stage)]
    first, rows = runs.long_stages()
    once_more_with_coverage = "unit: coverage"
    long = [
        path
        for stage in (*first, *chain(*rows))
        for path in files(stage)
        if stage.name != once_more_with_coverage
    ]
    assert sorted(gate) == sorted(long) == all_test_files()


def test_only_files_that_belong_together_go_to_one_process() -> None:
    scopes = [scope_of(path) for path in all_test_files()]
    shared = {min(files): len(files) for files in TOGETHER}
    assert {scope: scopes.count(scope) for scope in shared} == shared
    assert len({*scopes}) == len(scopes) - sum(shared.values()) + len(shared)


def test_pure_tests_are_collected_without_torch(request: pytest.FixtureRequest) -> None:
    only_unit = all(item.path.is_relative_to(UNIT) for item in request.session.items)
    assert not only_unit or "torch" not in sys.modules


def test_the_page_of_the_tests_has_all_parts_and_a_test_for_each_page_of_the_docs() -> None:
    page = (ROOT / "tests/README.md").read_text()
    assert [
        part.name for part in runs.PARTS if f"| `{part.name}` | {part.content} |" not in page
    ] == []
    pages = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    for name in (path for path in pages if path.name != "index.md" and path.parent.name != "adr"):
        (test,) = re.findall(
            rf"^\| \[\S+\]\(\.\./{re.escape(str(name))}\) \| \[\S+\]\((\S+)\) \|",
            page,
            re.MULTILINE,
        )
        assert (ROOT / "tests" / test).exists()


def test_the_list_of_commands_has_all_parts() -> None:
    assert f"PARTS := {' '.join(runs.NAMES)}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.realtime
def test_a_failed_stage_keeps_no_later_one_from_running() -> None:
    stages = [runs.Stage("lint", ("false",)), runs.Stage("tests", ("true",))]
    assert [(result.name, result.passed) for result in runs.run_in_turn(stages)] == [
        ("lint", False),
        ("tests", True),
    ]


@pytest.mark.realtime
def test_a_stage_has_the_processor_time_of_its_processes() -> None:
    busy = "import time; time.sleep(0.2)\nwhile time.process_time() < 0.2: pass"
    script = ("sh", "-c", f"'{sys.executable}' -c '{busy}'; true")
    (result,) = runs.run_in_turn([runs.Stage("tests", script)])
    assert result.passed
    assert result.core_seconds >= 0.2


@pytest.mark.realtime
def test_the_output_of_background_stages_comes_after_the_foregrounds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    background = [
        [
            runs.Stage("lint", ("sh", "-c", "echo a finding; false")),
            runs.Stage("pure tests", ("sh", "-c", "echo all right")),
        ],
        [runs.Stage("end-to-end tests", ("sh", "-c", "echo all trained"))],
    ]
    results = runs.run_beside(
        background, [runs.Stage("tests", ("sh", "-c", "sleep 0.2; echo all passed"))]
    )
    endings = [(result.name, result.passed) for result in results]
    assert endings == [
        ("tests", True),
        ("lint", False),
        ("pure tests", True),
        ("end-to-end tests", True),
    ]
    expected = [
        "== tests",
        "all passed",
        "== lint",
        "a finding",
        "== pure tests",
        "all right",
        "== end-to-end tests",
        "all trained",
    ]
    assert capfd.readouterr().out.splitlines() == expected


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_the_command_fails_when_a_stage_has_failed(
    passed: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [runs.Result("lint", passed, 31.2, 46), runs.Result("pure tests", True, 100, 170.4)]
    monkeypatch.setattr(runs, "check", lambda: results)
    monkeypatch.setattr(sys, "argv", ["runs", "check"])
    assert runs.main() == code
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{'passed' if passed else 'FAILED'}      31 s      46 core-s  lint",
        "passed     100 s     170 core-s  pure tests",
    ]
