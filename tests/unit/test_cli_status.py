"""`grpo status`: whatever the job and however narrow the terminal, nothing that is known of it is
cut off."""

import io
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from grpo_api.job_object import GRPOJob
from grpo_cli.commands import status
from tests.generated import cases
from tests.unit.operator_world import active_status, condition, make_job

WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=90)
SENTENCES = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)


def screen(width: int, **changes: Any) -> str:
    """What is printed of an active job in a terminal of that width."""
    known = make_job(status=active_status(**changes))
    out = Console(width=width, file=io.StringIO(), highlight=False, emoji=False)
    status.show_status(out, "team/run", GRPOJob(spec=known.valid_spec, status=known.status))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def pod(name: str, reason: str) -> dict[str, Any]:
    """A pod as the status tells of it."""
    return {
        "name": name,
        "index": 3,
        "node": "gpu-node-with-a-name-of-its-own-17",
        "phase": "Failed",
        "reason": reason,
    }


@settings(max_examples=cases(60))
@example(width=160, message="a \\[b] c", name="run", reason="\\[")
@given(width=st.integers(40, 260), message=SENTENCES, name=WORDS, reason=WORDS)
def test_no_width_loses_a_word(width: int, message: str, name: str, reason: str) -> None:
    told = condition("Running", reason="Training") | {"message": message}
    text = screen(width, conditions=[told], pods=[pod(name, reason)], avoidedNodes=[name])
    assert max(map(len, text.splitlines())) <= width
    shown = "".join(text.split())
    for known in (
        message,
        name,
        reason,
        told["lastTransitionTime"],
        "gpu-node-with-a-name-of-its-own-17",
    ):
        assert "".join(known.split()) in shown


@pytest.mark.parametrize(("width", "headed"), [(80, False), (240, True)])
def test_a_table_where_it_fits_and_lines_where_it_does_not(width: int, headed: bool) -> None:
    told = condition("Running", reason="Training") | {"message": "2 of 2 pods run " * 5}
    text = screen(width, conditions=[told], pods=[pod("run-1-3-x7x2k", "OutOfMemory")])
    assert ("condition" in text) is headed


def test_a_download_shows_how_much_there_is_of_it_and_when_it_ends() -> None:
    progress = {
        "stage": "Downloading",
        "stageSince": "2026-11-21T12:00:00Z",
        "fetchedBytes": 2 << 30,
        "fetchedBytesPerSecond": 1 << 25,
    }
    assert "2 GiB, 32 MiB per second" in screen(160, progress=progress)
    known = {"expectedBytes": 14 << 30, "stageEnd": "2026-11-21T12:06:24Z"}
    shown = screen(160, progress=progress | known)
    assert "2 GiB of 14 GiB, 32 MiB per second, ends 2026-11-21T12:06:24Z" in shown
