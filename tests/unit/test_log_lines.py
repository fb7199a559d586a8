"""Lines of the logs: one JSON object each with the job's name, and readable text of the same."""

import json
import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.text.log_lines import JsonFormatter, TextFormatter, as_text
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.process.settings import job_fields

JOB = {"namespace": "team-a", "grpojob": "run", "attempt": 2, "rank": 3}


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    """A record of the night of 14 November 2023."""
    fields = {
        "name": "n",
        "levelname": "WARNING",
        "msg": message,
        "args": args,
        "created": 1.7e9,
    }
    return logging.makeLogRecord({**fields, **extra})


def line(message: str, *args: object, **extra: object) -> dict[str, Any]:
    """The object that is written."""
    text = JsonFormatter(JOB).format(record(message, *args, **extra))
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return found


def test_a_line_says_when_whose_and_what() -> None:
    assert line("%s\nis ü", "it", detail=7) == {
        "time": "2023-11-14T22:13:20.000Z",
        "level": "warning",
        **JOB,
        "logger": "n",
        "message": "it\nis ü",
        "detail": 7,
    }


def test_an_error_has_its_traceback_and_no_number_breaks_the_line() -> None:
    error = (ValueError, ValueError("a bug at https://cdn/x?Signature=s3cret"), None)
    secret = "failed with Bearer s3cret89"
    found = line(
        secret, exc_info=error, loss=math.nan, kl=[-math.inf], folder=Exception("x"),
    )  # fmt: skip
    assert "ValueError: a bug at https://cdn/x?…" in found["traceback"]
    assert found["message"] == "failed with Bearer …"
    assert (found["loss"], found["kl"], found["folder"]) == ("nan", ["-inf"], "x")


@given(st.text(), st.dictionaries(st.text(min_size=1).map("x_{}".format), st.floats() | st.text()))
def test_whatever_is_logged_is_one_line_and_can_be_shown(message: str, extra: Any) -> None:
    assert line("%s", message, **extra)["message"] == message
    shown = as_text(JsonFormatter().format(record("%s", message, **extra)))
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)


def test_text_has_the_time_of_day_the_rank_and_the_numbers() -> None:
    step = record("step 7 of 9", kl=0.123456789, tokens=1234567.0, note="a b")
    text = TextFormatter(JOB).format(step)
    assert text == "22:13:20 warning rank 3 step 7 of 9 kl=0.12346 tokens=1234567 note=a b"
    first = TextFormatter({**JOB, "rank": 0}).format(record("hello"))
    assert first == "22:13:20 warning hello"


@pytest.mark.parametrize(
    "text", ["Loading: 3 %", "{", '{"step": 3}', "[1]", "{" * 9, '{"time": 1, "level": 2}']
)
def test_what_is_no_line_of_ours_is_shown_as_it_is(text: str) -> None:
    assert as_text(text) == text


def test_nothing_that_a_pod_prints_moves_the_terminals_cursor() -> None:
    assert as_text("a\x1b[2Jb\rc") == "a\ufffd[2Jb\ufffdc"
    assert "\x1b" not in as_text(JsonFormatter().format(record("a\x1b[2J")))


def test_the_operators_lines_about_a_job_name_it() -> None:
    key = ObjectKey("team-a", "run")
    assert job_fields(record("%s: Job %s started", key, "run-1")) == {
        "namespace": "team-a",
        "grpojob": "run",
    }
    assert job_fields(record("%s %s can't be read: %s", "pods", key, "x")) == {}
    assert job_fields(record("%s is gone", key)) == {}
    assert job_fields(record("stopped")) == {}
