"""What the product gives for the cases of tests/golden is what is recorded there."""

import difflib
from pathlib import Path
from typing import Any

import pytest

from tests.golden import files
from tests.golden.layout import InOrder, text, unlike

SHOWN_LINES = 60
BASE = {
    "image": "a",
    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
    "args": ["x"],
}


def difference(case: str) -> str:
    """Return the lines in which a case differs from its file; empty where it does not."""
    path = files.path_of(case)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(
        before.splitlines(), files.rendered(case).splitlines(), "recorded", "now", n=2, lineterm=""
    )
    return "\n".join(list(lines)[:SHOWN_LINES])


@pytest.mark.parametrize("case", sorted(files.CASES))
def test_a_case_is_rendered_as_recorded(case: str) -> None:
    found = difference(case)
    if found:
        pytest.fail(
            f"{case} is not what is recorded. If that is intended, run `{files.COMMAND}`:\n{found}",
            pytrace=False,
        )


def test_every_case_has_a_file_and_every_file_a_case() -> None:
    assert files.recorded() == {files.path_of(case) for case in files.CASES}


def test_the_command_writes_what_differs_and_deletes_what_belongs_to_no_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(files, "CASES", {"a": lambda: {"x": 1}, "b/c": lambda: [2]})
    (tmp_path / "a.json").write_text('{"x": 1}\n')
    (tmp_path / "old.json").write_text("{}\n")
    assert files.write() == [tmp_path / "old.json", tmp_path / "b/c.json"]
    assert files.recorded() == {tmp_path / "a.json", tmp_path / "b/c.json"}
    assert files.write() == []
    (tmp_path / "b/c.json").write_text("[3]\n")
    assert "-[3]\n+[2]" in difference("b/c")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (BASE, {}),
        ({**BASE, "image": "b"}, {"image": "b"}),
        ({**BASE, "new": None}, {"new": None}),
        ({"image": "a", "args": ["x"]}, {"-": ["env"]}),
        ({**BASE, "args": ["x", "y"]}, {"args": ["x", "y"]}),
        (
            {**BASE, "env": [BASE["env"][0], {"name": "B", "value": "3"}]},
            {"env": {"B": {"value": "3"}}},
        ),
        ({**BASE, "env": [BASE["env"][1], BASE["env"][0]]}, {"env": {"names": ["B", "A"]}}),
        ({**BASE, "env": [BASE["env"][1]]}, {"env": {"names": ["B"]}}),
        ({**BASE, "env": []}, {"env": []}),
    ],
    ids=[
        "nothing",
        "value",
        "new key",
        "missing key",
        "list",
        "named thing",
        "order",
        "missing name",
        "empty list",
    ],
)
def test_a_difference_shows_each_change_of_the_base(value: Any, shown: Any) -> None:
    assert unlike(value, BASE) == shown


def test_keys_are_sorted_unless_their_order_travels() -> None:
    assert (
        text({"b": 1.0, "a": InOrder(d=0.1 + 0.2, c=2)}) == '{"a": {"d": 0.3, "c": 2}, "b": 1.0}\n'
    )
