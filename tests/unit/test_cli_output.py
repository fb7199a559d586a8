"""A command ends with its output: at a closed pipe, without stdout, on a full disk."""

import errno
import io
import os

import pytest

from grpo_cli.__main__ import main


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
    monkeypatch.setattr("sys.stdout", Unwritable())
    monkeypatch.setattr(Unwritable, "number", number)
    assert main(["init"]) == code
    assert capsys.readouterr().err == says
    monkeypatch.setattr("sys.stdout", None)  # `grpo … >&-`
    assert main(["init"]) == 0
