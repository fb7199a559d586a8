"""Waiting for a job's end: whatever the cluster answers, and however long, the exit code tells the
end; and why a job is where it is."""

import io
import sys
from argparse import Namespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.job_object import GRPOJob
from grpo_cli.__main__ import main
from grpo_cli.cluster import kubectl
from grpo_cli.cluster.job_end import PATIENCE_SECONDS, POLL_SECONDS, wait_for_end
from grpo_cli.commands.jobs.why import explanation
from grpo_cli.show.errors import NOT_ENDED, KubectlError, KubectlExitError
from tests.samples import SPEC, job
from tests.stepped_clock import SteppedClock
from tests.unit.operator_world import active_status, condition, make_job

SILENCES = int(PATIENCE_SECONDS / POLL_SECONDS)
ENDS = {"Succeeded": 0, "Failed": 1}


def job_in(phase: str, **status: Any) -> GRPOJob:
    """A job whose status says this phase."""
    known = make_job(status=active_status(phase=phase, **status))
    return GRPOJob(spec=known.valid_spec, status=known.status)


def wait(
    monkeypatch: pytest.MonkeyPatch, answers: list[str | None], timeout: float | None = None
) -> int:
    """The exit code of a wait during which the cluster gives these phases, and then is silent, as
    it is for None."""
    left = iter(answers)

    def get_job(_: Namespace, name: str) -> tuple[dict[str, Any], GRPOJob]:
        phase = next(left, None)
        if phase is None:
            raise KubectlExitError("Unable to connect to the server: connection refused")
        if phase == "gone":
            raise KubectlExitError(f'grpojobs.grpo.dev "{name}" not found (NotFound)')
        return {}, job_in(phase)

    with monkeypatch.context() as patch:
        patch.setattr(kubectl, "get_job", get_job)
        return wait_for_end(Namespace(timeout=timeout), "run", SteppedClock())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Queued", "Running", "Restarting"]), st.integers(0, SILENCES - 1)
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(sorted(ENDS)),
)
def test_the_end_is_told_over_any_silence_that_a_restart_explains(
    story: list[tuple[str, int]], end: str
) -> None:
    answers = [answer for phase, silence in story for answer in (phase, *[None] * silence)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert wait(monkeypatch, [*answers, end]) == ENDS[end]


def test_a_cluster_that_stays_silent_or_never_answered_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stories: list[list[str | None]] = [[], ["Running"], ["Running", "gone"]]
    for answers in stories:
        with pytest.raises(KubectlError):
            wait(monkeypatch, answers)


@pytest.mark.realtime
@pytest.mark.parametrize("program", ["no-such-kubectl", "echo"])
def test_what_no_waiting_changes_ends_the_wait_at_once(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECTL", program)
    clock = SteppedClock()
    with pytest.raises(KubectlError):
        wait_for_end(Namespace(timeout=None, context=None, namespace=None), "run", clock)
    assert clock.sleeps == []


def test_a_job_that_a_newer_operator_wrote_ends_the_wait_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = job("run", SPEC) | {"status": {"phase": "Hibernating"}}
    monkeypatch.setattr(kubectl, "get_json", lambda *_: newer)
    clock = SteppedClock()
    with pytest.raises(KubectlError, match="run was written by another version"):
        wait_for_end(Namespace(timeout=None), "run", clock)
    assert clock.sleeps == []


@given(st.floats(0, 100))
def test_a_timeout_ends_the_wait_and_not_much_later(timeout: float) -> None:
    needed = int(timeout / POLL_SECONDS) + 2
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert wait(monkeypatch, ["Running"] * needed, timeout) == NOT_ENDED


def test_why_quotes_the_condition_that_gives_the_reason() -> None:
    admitted = condition("Admitted", status="False", reason="WaitingForGPUs")
    admitted["message"] = "8 GPUs are needed and 2 are free; give other jobs a lower priority"
    # The operator says the same of what follows from it.
    repeated = [admitted, admitted | {"type": "Running"}, admitted | {"type": "Reconciling"}]
    others = [condition("Planned"), condition("Scheduled", status="False")]
    job = job_in("Queued", conditions=[*others, *repeated], reason="WaitingForGPUs")
    assert list(explanation({"name": "run"}, job)) == [
        "run is Queued: WaitingForGPUs",
        f"Admitted is False since {admitted['lastTransitionTime']}: {admitted['message']}",
    ]


def test_why_says_what_a_restart_answers_and_how_a_job_has_ended() -> None:
    def stated(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
        return condition(kind, status, reason) | {"message": message}

    since = condition("Any")["lastTransitionTime"]
    created, ended = "the pods of attempt 2 are being created", "attempt 1 ended with Hang: rank 1"
    restart = [
        stated("Scheduled", "False", "PodsPending", created),
        stated("Degraded", "True", "Hang", ended),
    ]
    job = job_in("Restarting", conditions=restart, reason="PodsPending")
    assert list(explanation({"name": "run"}, job))[1:] == [
        f"Degraded is True since {since}: {ended}",
        f"Scheduled is False since {since}: {created}",
    ]
    ends: dict[str, dict[str, Any]] = {"Failed": {"reason": "Hang"}, "Succeeded": {}}
    for phase, status in ends.items():
        running = stated("Running", "False", phase, "training is over")
        others = [stated(kind, str(kind == phase), "Hang", ended) for kind in ends]
        job = job_in(phase, conditions=[running, *others], **status)
        lines = list(explanation({"name": "run"}, job))
        assert lines[1:] == [f"{phase} is True since {since}: {ended}"]


def test_why_of_a_job_that_no_operator_has_seen_says_so() -> None:
    known = make_job()
    lines = list(explanation({"name": "run"}, GRPOJob(spec=known.valid_spec)))
    assert "No operator has seen it" in lines[1]
    elsewhere = known.valid_spec.model_copy(update={"managed_by": "example.com/dispatcher"})
    lines = list(explanation({"name": "run"}, GRPOJob(spec=elsewhere)))
    assert lines[1].startswith("spec.managedBy leaves it to example.com/dispatcher")


def test_submit_reads_standard_input_once_and_creates_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "claim"}}
    text = yaml.safe_dump_all([claim, job("run", SPEC)])
    created: list[tuple[tuple[str, ...], str]] = []

    def run_kubectl(_: Namespace, *arguments: str, stdin: str) -> str:
        created.append((arguments, stdin))
        return "grpojob.grpo.dev/run created\n"

    monkeypatch.setattr(kubectl, "run_kubectl", run_kubectl)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["submit", "-f", "-"]) == 0
    assert created == [(("create", "--filename=-"), text)]
    assert capsys.readouterr().out == "grpojob.grpo.dev/run created\n"


def test_submit_waits_for_the_jobs_by_the_names_that_the_api_server_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nameless = job("run", SPEC) | {"metadata": {"generateName": "run-"}}
    documents = [nameless, job("other", SPEC), nameless]
    created = ["grpojob.grpo.dev/run-7x2kq", "grpojob.grpo.dev/other", "grpojob.grpo.dev/run-b8z5r"]
    awaited: list[str] = []

    def get_job(_: Namespace, name: str) -> tuple[dict[str, Any], GRPOJob]:
        awaited.append(name)
        return {}, job_in("Succeeded")

    printed = "".join(f"{name} created\n" for name in created)
    monkeypatch.setattr(kubectl, "run_kubectl", lambda *_, **__: printed)
    monkeypatch.setattr(kubectl, "get_job", get_job)
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump_all(documents)))
    assert main(["submit", "-f", "-", "--wait"]) == 0
    assert awaited == ["run-7x2kq", "other", "run-b8z5r"]


def test_submit_creates_nothing_of_standard_input_with_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kubectl, "run_kubectl", lambda *_, **__: pytest.fail("created"))
    wrong = job("run", SPEC | {"retry": -1})
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(wrong)))
    assert main(["submit", "-f", "-"]) == 2
    assert "-: run: spec.retry" in capsys.readouterr().err


def test_submit_waits_for_nothing_and_so_refuses_a_timeout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kubectl, "run_kubectl", lambda *_, **__: pytest.fail("created"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(job("run", SPEC))))
    assert main(["submit", "-f", "-", "--timeout", "9"]) == 2
    assert "--timeout goes with --wait" in capsys.readouterr().err


def test_submit_says_what_it_created_before_the_refusal_of_another_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = 'persistentvolumeclaims "claim" already exists'

    def run_kubectl(_: Namespace, *__: str, stdin: str) -> str:
        raise KubectlExitError(refusal, "grpojob.grpo.dev/run created\n")

    monkeypatch.setattr(kubectl, "run_kubectl", run_kubectl)
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(job("run", SPEC))))
    assert main(["submit", "-f", "-"]) == 4
    assert capsys.readouterr() == ("grpojob.grpo.dev/run created\n", f"grpo: {refusal}\n")


def test_the_timeout_is_that_of_all_jobs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(kubectl, "get_job", lambda *_: ({}, job_in("Running")))
    for name in ("first", "second"):
        assert wait_for_end(Namespace(timeout=10), name, clock, began_at=0.0) == NOT_ENDED
    assert clock.now() < 10 + 2 * POLL_SECONDS
