"""What a shell and kubectl are offered after the words that stand already."""

import argparse

import pytest

from grpo_cli.__main__ import COMMANDS, command_parser, complete_for_kubectl, completions


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], set(COMMANDS)),
        (["sta"], {"status"}),
        (["logs", "--al"], {"--all-ranks"}),
        (["plan", "-o", ""], {"table", "json", "yaml"}),
        (["init", "--from-trl", ""], set()),
        (["reward", "te"], {"test"}),
    ],
)
def test_commands_options_and_values_are_completed(words: list[str], expected: set[str]) -> None:
    found = set(completions(command_parser(words), words))
    assert found - {"--help", "-h", "--version"} == expected


def test_kubectl_gets_a_completion_per_line_and_a_directive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kubectl_complete-grpo", "sus"])
    assert complete_for_kubectl() == 0
    assert capsys.readouterr().out.splitlines() == ["suspend", ":4"]
    monkeypatch.setattr("sys.argv", ["kubectl_complete-grpo", "verify", "x"])
    complete_for_kubectl()
    assert capsys.readouterr().out.splitlines()[-1] == ":0"


def test_a_listed_command_is_built_when_an_attribute_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.14's `add_parser` expands each parser's help before anything is parsed."""
    names: list[str] = []
    add_parser = argparse._SubParsersAction.add_parser

    def add_and_check(self: object, name: str, **settings: object) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = add_parser(self, name, **settings)  # type: ignore[arg-type]
        names.append(command.formatter_class(prog=command.prog)._prog)
        return command

    monkeypatch.setattr(argparse._SubParsersAction, "add_parser", add_and_check)
    command_parser()
    assert names == [f"grpo {name}" for name in COMMANDS]
