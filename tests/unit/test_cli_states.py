"""Each verb of `grpo` on a GRPOJob in any state, with an API server that answers, refuses or is
away: exit code 0 only for what was done, else a sentence, and no write of what is refused."""

import contextlib
import io
import itertools
import json
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import yaml

from grpo.client import GRPOClient, GRPOError, Kubernetes
from grpo_cli.__main__ import main
from grpo_cli.cluster.job_end import wait_for_end
from grpo_cli.show.errors import CLUSTER, NOT_ENDED
from grpo_operator.pods.manifests import attempt_of, indexed_job
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.parsing import grpojob_record
from tests.stepped_clock import SteppedClock
from tests.unit.cli_world import FAULTS, Cluster, Object, grpojob, options
from tests.unit.operator_world import SPEC, active_status, at, condition

SUSPENDED = {**SPEC, "suspend": True}
FAILED = active_status(phase="Failed", outcome={"result": "Hang"}, completionTime=at(-3))
BEING_DELETED = {"deletionTimestamp": at(0), "finalizers": ["example.com/keeps"]}
STATES: dict[str, Object | None] = {
    "none": None,
    "new": grpojob(SPEC, {}),
    "queued": grpojob(SPEC, {"phase": "Queued", "conditions": [condition("Admitted", "False")]}),
    "running": grpojob(SPEC, active_status(phase="Running")),
    "suspending": grpojob(SUSPENDED, active_status(phase="Running")),
    "suspended": grpojob(SUSPENDED, active_status(phase="Suspended", running=False)),
    "failed": grpojob(SPEC, FAILED),
    "failed, suspended": grpojob(SUSPENDED, FAILED),
    "retried": grpojob({**SPEC, "retry": 1}, FAILED),
    "succeeded": grpojob(SPEC, active_status(phase="Succeeded")),
    "deleting": grpojob(SPEC, active_status(phase="Running"), **BEING_DELETED),
    "failed, deleting": grpojob(SPEC, FAILED, **BEING_DELETED),
    "newer": grpojob(SPEC, active_status(phase="Hibernating")),
    "damaged": grpojob({**SPEC, "training": {"beta": "much"}}, {"conditions": "none"}),
}
READS = (
    "list", "list -o json", "list -o yaml", "why run", "why run -o json", "why run -o yaml",
    "status run", "status run -o json", "status run -o yaml", "usage", "usage -o json",
    "usage -o yaml", "logs run", "logs run -o json", "export run --to /nowhere/at/all",
    "history run", "history run -o json", "samples run -o json", "samples run -o yaml",
    "diagnose run -o json", "diagnose run -o yaml", "calibrate run --to /nowhere/at/all",
    "wait run --timeout 0",
)  # fmt: skip
CHANGES = {
    "suspend": {"new", "queued", "running", "newer", "damaged"},
    "resume": {"suspending", "suspended", "failed, suspended"},
    "retry": {"failed", "failed, suspended"},
    "delete": STATES.keys() - {"none"},
}
"""The states in which each verb writes."""
AS_IT_IS = {
    "suspend": {"suspending", "suspended"},
    "resume": {"new", "queued", "running", "failed", "retried", "newer", "damaged"},
    "retry": {"retried"},
    "delete": set(),
}
"""Those in which there is nothing left to do."""


class Printed(NamedTuple):
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str


def grpo(cluster: Cluster, line: str) -> Printed:
    """Run a command against a cluster."""
    out, err = io.StringIO(), io.StringIO()
    with (
        cluster.as_kubectl(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(line.split())
    return Printed(code, out.getvalue(), err.getvalue())


def require_sentence(printed: Printed, cause: str = "") -> None:
    """What failed says so in a few lines on stderr, and nothing on stdout."""
    assert printed.out == ""
    assert cause in printed.err
    assert 0 < len(printed.err.splitlines()) <= 3


@pytest.mark.parametrize("line", READS)
def test_what_reads_a_job_answers_or_says_why_not_and_writes_nothing(line: str) -> None:
    for state, job in STATES.items():
        cluster = Cluster(deepcopy(job))
        printed = grpo(cluster, line)
        assert cluster.writes == [], state
        if printed.code:
            require_sentence(printed)
        elif line.endswith("json") and "logs" not in line:
            json.loads(printed.out, parse_constant=pytest.fail)
        elif line.endswith("yaml"):
            yaml.safe_load(printed.out)


@pytest.mark.parametrize("verb", ["suspend", "resume"])
@pytest.mark.parametrize("lasts", ["True", "False"])
def test_who_suspends_or_resumes_a_job_without_lasting_checkpoints_reads_that_its_steps_are_lost(
    verb: str, lasts: str
) -> None:
    state = "running" if verb == "suspend" else "suspended"
    job = deepcopy(STATES[state])
    assert job
    job["status"]["conditions"].append(condition("Recoverable", lasts))
    printed = grpo(Cluster(job), f"{verb} run").out
    assert ("its steps so far are lost" in printed) is (lasts == "False")
    assert ("checkpoint and gives" in printed or "last checkpoint" in printed) is (lasts == "True")


@pytest.mark.parametrize("verb", CHANGES)
def test_a_change_is_made_once_where_it_has_an_effect_and_refused_elsewhere(verb: str) -> None:
    for state, job in STATES.items():
        cluster = Cluster(deepcopy(job))
        printed = grpo(cluster, f"{verb} run")
        assert bool(cluster.writes) is (state in CHANGES[verb]), state
        if state in CHANGES[verb] | AS_IT_IS[verb]:
            assert (printed.code, printed.err) == (0, "")
            assert printed.out.startswith("run ")
        else:
            require_sentence(printed, "run")
        # Again, before the operator has acted.
        after = deepcopy(cluster.job)
        assert grpo(cluster, f"{verb} run").code == printed.code
        assert verb == "delete" or cluster.job == after


@pytest.mark.parametrize("line", [*READS[:-1], *(f"{verb} run" for verb in CHANGES)])
def test_an_api_server_that_does_not_answer_is_quoted(line: str) -> None:
    lasting = {**SPEC, "checkpoint": {"volume": {"claimName": "team"}}}
    for fault, number in itertools.product(("refused", "forbidden"), range(4)):
        cluster = Cluster(grpojob(lasting, FAILED), fault=fault, fault_from=number)
        printed = grpo(cluster, line)
        if cluster.requests <= number:
            break
        assert printed.code == CLUSTER
        require_sentence(printed, FAULTS[fault])


@pytest.mark.parametrize("seconds", ["-1", "nan", "1h"])
def test_a_timeout_that_is_no_time_is_refused(seconds: str) -> None:
    cluster = Cluster(deepcopy(STATES["running"]))
    printed = grpo(cluster, f"wait run --timeout={seconds}")
    assert (printed.code, cluster.requests) == (2, 0)
    require_sentence(printed, "write seconds, such as 3600")


@pytest.mark.parametrize("name", [None, 5, ["run"], ""])
def test_what_is_no_name_is_refused_by_the_client(name: Any) -> None:
    with pytest.raises(GRPOError, match="the job's name is"):
        GRPOClient(Kubernetes()).get_job(name)


def test_events_of_no_job_are_an_error() -> None:
    client = GRPOClient(Kubernetes())
    with Cluster(None).as_kubectl(), pytest.raises(GRPOError, match='"typo" not found'):
        client.get_job_events("typo")
    with Cluster(deepcopy(STATES["running"])).as_kubectl():
        assert client.get_job_events("run") == []


def test_render_shows_the_job_that_the_operator_created_for_the_last_attempt() -> None:
    job = grpojob(
        SPEC,
        active_status(
            phase="Running",
            attempt=2,
            avoidedNodes=["gpu-7"],
            revisions={"spec.model.name": "5ede1c97bbab6ce5cda5812749b4c0bdf79b18dd"},
            rollbacks=[
                {"attempt": 1, "reason": "Diverged", "skipped": {"first": 7, "last": 8}},
            ],
            ends=[{"attempt": 1, "reason": "Diverged", "endTime": at(-90)}],
        ),
    )
    printed = grpo(Cluster(job), "render run --trainer-image=trainer:1")
    record = grpojob_record(job)
    assert record.status.plan
    attempt = attempt_of(record, record.valid_spec, record.status.plan, 2)
    created = json.dumps(indexed_job(attempt, PodDefaults(image="trainer:1")))
    assert json.loads(created) in list(yaml.safe_load_all(printed.out))
    assert all(word in created for word in ("gpu-7", "5ede1c97", "skipped", "Diverged"))


@pytest.mark.parametrize("line", ["delete --", "suspend --", "retry --", "status --"])
def test_a_flag_of_kubectl_is_no_name_of_a_job(line: str) -> None:
    cluster = Cluster(deepcopy(STATES["running"]))
    for name in ("--all", "-A", "a/b", "Run"):
        assert "the job's name is" in grpo(cluster, f"{line} {name}").err
    assert cluster.requests == 0


def test_a_wait_begins_with_a_retry_that_no_operator_has_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster(deepcopy(STATES["failed"]))
    assert grpo(cluster, "wait run").code == 1
    grpo(cluster, "retry run")
    assert "Failed, to be tried again" in grpo(cluster, "why run").out
    assert cluster.job is not None
    clock = SteppedClock()
    with cluster.as_kubectl():
        assert wait_for_end(options(timeout=9.0), "run", clock) == NOT_ENDED
        with pytest.raises(TimeoutError):
            GRPOClient(Kubernetes(), clock=clock).wait_for_job_status("run", timeout=9)
        cluster.job["status"] |= {"retry": 1, "phase": "Succeeded"}
        assert wait_for_end(options(timeout=9.0), "run", clock) == 0
    assert "has not ended within 9 s; `grpo why run` says why" in capsys.readouterr().err


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_says_that_the_cluster_does_not_answer(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(deepcopy(STATES["running"]), fault=fault)
    with cluster.as_kubectl(), contextlib.suppress(Exception):
        wait_for_end(options(timeout=9.0), "run", SteppedClock())
    is_final = fault in ("forbidden", "context")
    assert (cluster.requests == 1) is is_final
    assert is_final or FAULTS[fault] in capsys.readouterr().err


def test_a_job_that_is_being_deleted_is_shown_as_such() -> None:
    cluster = Cluster(deepcopy(STATES["deleting"]))
    assert "Running, being deleted" in grpo(cluster, "list").out
    assert "waits for its finalizers: example.com/keeps" in grpo(cluster, "why run").out
    assert f"being deleted, since {at(0)}" in grpo(cluster, "status run").out


def test_texts_of_pods_can_not_steer_the_terminal() -> None:
    evil = "red \x1b[31m \x9b2J \x07 \x00 end"
    outcome: dict[str, Any] = {"result": "Error", "message": evil}
    told = condition("Failed") | {"message": evil}
    status = active_status(
        phase="Failed", reason=evil, outcome=outcome, conditions=[told], completionTime=at(0)
    )
    cluster = Cluster(grpojob(SPEC, status))
    for line in ("list", "why run", "status run", "wait run"):
        printed = grpo(cluster, line)
        text = printed.out + printed.err
        assert "end" in text
        assert all(letter.isprintable() or letter == "\n" for letter in text)
