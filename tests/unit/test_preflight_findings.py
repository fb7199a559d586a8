"""What a preflight reports is short, plain, about a field, and fits into a termination message."""

import errno
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import MAX_SENTENCE, PreflightReport
from grpo_api.text.contract import TERMINATION_BYTES
from grpo_trainer.preflight import storage_checks
from grpo_trainer.preflight.findings import Findings, NotChecked, report_json, sentence
from grpo_trainer.preflight.storage_checks import bytes_needed, require_writable
from grpo_trainer.runtime.errors import (
    BadInput,
    Denied,
    DiskFailed,
    HubUnavailable,
    StoreFailed,
)

TEXTS = st.one_of(
    st.text(st.characters(codec=None), max_size=2000),
    st.text('"\\\n\t\x00é漢🦜', max_size=2000),
    st.just("x" * 100_000),
)


@given(TEXTS)
def test_a_sentence_is_one_printable_line_that_is_never_too_long(text: str) -> None:
    made = sentence(text)
    assert 1 <= len(made) <= MAX_SENTENCE
    assert made.isprintable()
    made.encode()


def test_a_sentence_keeps_what_is_wrong_and_what_to_write() -> None:
    made = sentence(f"no column 'q'; it has {', '.join(map(str, range(1000)))}; set promptColumn")
    assert made.startswith("no column 'q'; it has 0, 1")
    assert made.endswith("998, 999; set promptColumn")


def test_a_sentence_has_no_object_s_address_and_no_password() -> None:
    told = sentence("<function f at 0x7f3a0c11d2b0> of http://user:s3cret@judge/score failed")
    assert told == "<function f> of http://…@judge/score failed"


@given(
    problems=st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), max_size=40),
    skipped=st.lists(st.tuples(TEXTS, TEXTS), max_size=40),
    revisions=st.dictionaries(st.sampled_from("abcdefgh"), st.just("c0" * 20)),
)
def test_any_report_fits_and_counts_what_it_leaves_out(
    problems: list[tuple[str, str, bool]],
    skipped: list[tuple[str, str]],
    revisions: dict[str, str],
) -> None:
    findings = Findings(revisions=revisions)
    for path, message, transient in problems:
        findings.add(f"spec.{path!r:.200}", message, transient=transient)
    for path, message in skipped:
        findings.skip(f"spec.{path!r:.200}", message)
    text = report_json(findings.report())
    assert len(text.encode()) <= TERMINATION_BYTES
    report = PreflightReport.model_validate_json(text)
    assert len(report.problems) + report.omitted_problems == len(findings.problems)
    assert bool(report.problems) == bool(problems)
    order = [problem.transient for problem in report.problems]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("message", "path", "told"),
    [
        ("dataset.files.paths[0]: no file", "spec.dataset.files.paths[0]", "no file"),
        ("dataset.columns[wörd]: no", "spec.dataset.columns[wörd]", "no"),
        ("spec.model.name: a/b can't", "spec.model.name", "a/b can't"),
        ("train.jsonl line 3: no JSON", "spec.default", "train.jsonl line 3: no JSON"),
        ("reward 'x': dataset.y: z", "spec.default", "reward 'x': dataset.y: z"),
        ("datasets: none", "spec.default", "datasets: none"),
    ],
)
def test_the_field_is_the_one_that_a_message_begins_with(
    message: str, path: str, told: str
) -> None:
    findings = Findings()
    findings.add("spec.default", message)
    (problem,) = findings.problems
    assert (problem.path, problem.message) == (path, told)


@pytest.mark.parametrize(
    ("error", "problems", "skipped"),
    [
        (BadInput("no"), [False], 0),
        (HubUnavailable("away"), [True], 0),
        (StoreFailed("away"), [True], 0),
        (Denied("no right"), [False], 0),
        (NotChecked("later"), [], 1),
        (TypeError("a mistake of ours"), [], 1),
        (MemoryError(), [], 1),
    ],
)
def test_only_what_no_wait_mends_is_permanent_and_no_check_fails_a_job_of_itself(
    error: Exception, problems: list[bool], skipped: int
) -> None:
    findings = Findings()
    with findings.check("spec.model.name"):
        raise error
    assert [problem.transient for problem in findings.problems] == problems
    assert len(findings.skipped) == skipped


def test_a_hub_that_is_away_is_waited_for_once() -> None:
    findings = Findings()
    findings.require_hub()
    with findings.check("spec.model.name"):
        raise HubUnavailable("away")
    with pytest.raises(NotChecked, match="did not answer"):
        findings.require_hub()


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.EROFS, BadInput, "is read-only; use a claim that can be mounted read-write"),
        (errno.EACCES, BadInput, "can't be written by user .* writable for them"),
        (errno.ENOSPC, DiskFailed, "is full: .*; remove something there, or use a larger one"),
        (errno.EDQUOT, DiskFailed, "is full: "),
        (errno.EIO, DiskFailed, "can't be written: Input/output error"),
    ],
)
def test_a_volume_that_can_t_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], told: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, __import__("os").strerror(number))

    monkeypatch.setattr(storage_checks, "write_atomically", fail)
    with pytest.raises(kind, match=told):
        require_writable(tmp_path, 0)


def test_a_volume_without_room_for_the_run_is_told_before_it_is_full(tmp_path: Path) -> None:
    with pytest.raises(DiskFailed, match=r"GiB free, .* predicted to write 1073741824.0 GiB"):
        require_writable(tmp_path, 2**60)
    require_writable(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def a_plan(**changes: Any) -> TrainingPlan:
    """A plan with a predicted checkpoint of 10 bytes and an export of 3."""
    phases = dict.fromkeys(
        ["load", "sync", "generate", "reference", "forward", "backward", "step"], 0
    )
    memory = {
        "phases": phases, "peakPhase": "step", "peakAllocatedBytes": 0, "deviceBytes": 0,
        "usableBytes": 0, "hostBytesPerNode": 0, "checkpointBytes": 10,
    }  # fmt: skip
    execution = {
        "strategy": "Clone", "method": "Full", "microBatch": 1, "gradientAccumulation": 1,
        "stepsPerGeneration": 1, "dtype": "float32", "saveEverySteps": 5, "exportBytes": 3,
        "memory": memory,
    }  # fmt: skip
    plan = {
        "job": {"namespace": "a", "name": "b", "uid": "c", "attempt": 1},
        "rendezvous": {"address": "127.0.0.1"}, "model": {"name": "/models"},
        "dataset": {"name": "/data"}, "rewards": [{"format": {"pattern": "a"}}],
        "training": {}, "reference": {}, "adapter": {}, "checkpoint": {}, "guard": {},
        "execution": execution,
    }  # fmt: skip
    return TrainingPlan.model_validate(plan | changes)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, 30),
        ({"checkpoint": {"keep": 4}}, 50),
        ({"training": {"maxSteps": 6}}, 20),
        ({"training": {"maxSteps": 6}, "export": {"to": "None"}}, 20),
        ({"export": {"to": "Volume"}}, 33),
    ],
)
def test_the_room_that_is_needed_is_what_the_plan_predicts(
    changes: dict[str, Any], needed: int
) -> None:
    plan = a_plan(**changes)
    sections = plan.checkpoint, plan.training, plan.export, plan.execution
    assert bytes_needed(*sections) == needed
