"""A command ends with its output (a closed pipe, no stdout, a full disk) and at Ctrl-C."""

import errno
import io
import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from grpo_cli.__main__ import main
from grpo_cli.commands.jobs.list import HEADINGS, _stacked_row
from grpo_cli.commands.runs.reward import _show
from grpo_cli.show.terminal import byte_progress, show_table
from tests.generated import cases


class Unwritable(io.StringIO):
    """An output whose reader has gone, or whose disk is full."""

    number = 0

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(errno.EPIPE, 141, ""), (errno.ENOSPC, 1, "grpo: No space left on device\n")],
)
def test_a_command_ends_with_its_output(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
    says: str,
) -> None:
    monkeypatch.setattr(Unwritable, "number", number)
    for command in ("init", "gpus"):  # rich writes the second one's output
        monkeypatch.setattr("sys.stdout", Unwritable())
        assert main([command]) == code
        assert capsys.readouterr().err == says
        monkeypatch.setattr("sys.stdout", None)  # `grpo … >&-`
        assert main([command]) == 0


def test_without_stderr_no_message_goes_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)  # `grpo … 2>&-`
    assert main(["init", "--name", "No_name"]) == 2
    assert capsys.readouterr().out == ""


LONG = "a" * 300
"""A name that no file system takes."""


@pytest.mark.parametrize(
    "line", [f"plan -f {LONG}", f"submit -f {LONG}", f"history {LONG}", f"init -o {LONG}"]
)
def test_a_path_that_can_not_be_looked_at_is_a_sentence(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err == f"grpo: {LONG}: File name too long\n"


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_standard_input_that_is_closed_or_no_text_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # `grpo … <&-`
    assert main([command, "-f", "-"]) == 2
    assert capsys.readouterr().err.startswith("grpo: - holds no GRPOJob")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main([command, "-f", "-"]) == 2
    assert capsys.readouterr().err.startswith("grpo: standard input: it is not UTF-8 text")


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("number", ["²", "0", "-1", "9" * 5000, ""])
def test_a_terminal_s_size_that_is_no_number_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    number: str,
) -> None:
    monkeypatch.setenv(name, number)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer)
        assert main(["plan", "Qwen/Qwen2.5-0.5B-Instruct", "--gpus", "1xH100"]) == 0
        with byte_progress("model"):
            pass
    assert "planned" in capsys.readouterr().out


INTERRUPTED_IMPORT = """
import builtins, os, signal
load = builtins.__import__
def load_slowly(name, *context):
    if name == "show.errors":
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *context)
builtins.__import__ = load_slowly
from grpo_cli.__main__ import main
"""


@pytest.mark.realtime
def test_ctrl_c_before_the_command_is_read_ends_without_a_word() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
    command[-1] = "import signal, grpo_cli.__main__; print(signal.getsignal(signal.SIGINT))"
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=here)
    assert "default_int_handler" in ended.stdout


LETTERS = st.characters(categories=["Lu", "Ll", "Lo", "Nd"])
NAMES = st.lists(st.text(LETTERS, min_size=1, max_size=75), min_size=1, max_size=8)


@settings(max_examples=cases(60))
@given(width=st.sampled_from([60, 80, 200]), names=NAMES, state=st.text(LETTERS, max_size=99))
def test_each_item_of_a_list_begins_at_the_margin_and_nothing_else_does(
    width: int, names: list[str], state: str
) -> None:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    rows = [(name, "8", "0.001", "", f"Running, step 1: {state}") for name in names]
    show_table(out, HEADINGS, rows, tuple, _stacked_row, right=HEADINGS[1:4])
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    lines = text.split("\n")[:-1]
    assert max(map(cell_len, lines)) <= width
    margin = [line for line in lines if not line.startswith("  ")]
    assert len(margin) == len(names) + lines[0].startswith(" name")
    shown = "".join(text.split())
    assert all(name in shown and state in shown for name in names)


@pytest.mark.parametrize("completion", ["word " * 30, "文" * 50, [{"content": "word " * 30}]])
def test_a_completion_that_is_cut_says_so(
    capsys: pytest.CaptureFixture[str], completion: object
) -> None:
    scores = {"digits": {"weight": 1.0, "scores": [0.5], "problem": ""}}
    _show([{"completion": completion}], scores)
    assert "…" in capsys.readouterr().out


def test_the_products_are_a_document_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "-o", "json"]) == 0
    by_name = {entry["product"]: entry for entry in json.loads(capsys.readouterr().out)}
    h100, t4 = by_name["NVIDIA-H100-80GB-HBM3"], by_name["Tesla-T4"]
    assert "H100" in h100["shortNames"]
    assert h100["computes"]
    assert not t4["computes"]
