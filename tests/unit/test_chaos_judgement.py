"""What chaos judges by can fail: each invariant is shown something that breaks it, and something
that doesn't."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from grpo_api.report.report import Result
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_operator.records.names import LABEL_ATTEMPT, LABEL_UID
from tests.integration.chaos.accounts import audit, events_tell_what_was
from tests.integration.chaos.history import PRODUCT, UNKNOWN_PHASE, History, Job, Version
from tests.integration.chaos.invariants import judge
from tests.integration.chaos.ledger import Deed, Entry, Ledger
from tests.integration.chaos.observer import earlier_lives

H100 = "H100"


def condition(
    kind: str, status: bool = True, reason: str = "Because", at: str = "t0"
) -> dict[str, Any]:
    return {
        "type": kind, "status": str(status), "reason": reason, "message": "",
        "lastTransitionTime": at,
        "observedGeneration": 1,
    }  # fmt: skip


def version(
    at: float = 0.0, *conditions: dict[str, Any], spec: Any = None, **status: Any
) -> Version:
    return Version(at, 1, spec or {}, {"conditions": list(conditions), **status})


def told(*versions: Version, history: History | None = None) -> str:
    """What is wrong with a job that had these versions."""
    job = Job("uid", "team/job", list(versions))
    history = history or History()
    history.jobs["uid"] = job
    return "; ".join(judge(history, job))


RUNNING = (condition("Admitted"), condition("Running"))


def test_a_job_that_does_as_it_should_is_not_blamed() -> None:
    queued = version(0, condition("Admitted", False), phase="Queued")
    running = version(1, *RUNNING, phase="Running", attempt=1, plan={"nodes": 1})
    ended = version(
        2,
        condition("Admitted"),
        condition("Succeeded"),
        phase="Succeeded",
        attempt=1,
        completionTime="t",
    )
    assert told(queued) == told(queued, running) == told(running, ended) == ""


@pytest.mark.parametrize(
    ("before", "after", "blame"),
    [
        ({"attempt": 3}, {"attempt": 2}, "attempts only grow one by one"),
        ({"attempt": 3}, {"attempt": 5, "plan": {"nodes": 1}}, "attempts only grow one by one"),
        ({"attempt": 3}, {"attempt": 4}, "nothing is started without a plan"),
        ({"restarts": 2}, {"restarts": 1}, "restarts only grow within the limit"),
        ({"restarts": 3}, {"restarts": 4}, "spec.restarts.limit is 3"),
        ({"rollbacks": [{"attempt": 1}]}, {"rollbacks": []}, "rollbacks are never forgotten"),
        ({"rollbacks": [1, 2]}, {"rollbacks": [1, 2, 3]}, "rollbacks are never forgotten"),
        ({}, {"observedGeneration": 2}, "nothing is observed that is not yet"),
    ],
)
def test_counters_that_jump_are_blamed(
    before: dict[str, Any], after: dict[str, Any], blame: str
) -> None:
    assert blame in told(version(0, **before), version(1, **after))


@pytest.mark.parametrize(
    ("conditions", "phase", "blame"),
    [
        ((condition("Running"),), "Running", "Running without Admitted"),
        ((condition("Succeeded"), condition("Failed")), "Succeeded", "both True"),
        ((condition("Failed"),), "Failed", "no completionTime"),
        ((*RUNNING, condition("Suspended")), "Suspended", "Admitted and Suspended are both True"),
        (RUNNING, "Restarting", "phase 'Restarting' with Running True"),
        ((condition("Admitted"),), "Running", "phase 'Running' with none of"),
        ((condition("Admitted"), condition("Admitted")), "Starting", "a condition stands twice"),
    ],
)
def test_conditions_that_contradict_each_other_are_blamed(
    conditions: Iterable[dict[str, Any]], phase: str, blame: str
) -> None:
    assert blame in told(version(0, *conditions, phase=phase))


def test_an_end_that_is_taken_back_is_blamed() -> None:
    ended = version(
        0, condition("Failed", reason="BadInput"), phase="Failed", completionTime="t", attempt=1
    )
    again = version(1, *RUNNING, phase="Running", attempt=2, plan={"nodes": 1})
    assert "Failed was True (BadInput) and is not any more" in told(ended, again)


def test_a_transition_time_moves_with_the_status_alone() -> None:
    before = version(0, condition("Admitted", False, at="t0"))
    assert "its lastTransitionTime moved" in told(
        before, version(1, condition("Admitted", False, at="t1"))
    )
    assert told(before, version(1, condition("Admitted", at="t1"))) == ""


def node(history: History, name: str, gpus: int, at: float, ready: bool = True) -> None:
    status = {
        "allocatable": {"nvidia.com/gpu": str(gpus)},
        "conditions": [{"type": "Ready", "status": str(ready)}],
    }
    history.see(
        "nodes",
        {"metadata": {"name": name, "labels": {PRODUCT: H100}}, "spec": {}, "status": status},
        at,
    )


def gang(at: float, gpus: int, attempt: int = 1) -> Version:
    plan = {"nodes": 1, "gpusPerNode": gpus, "gpuProduct": H100}
    return version(at, condition("Admitted"), phase="Starting", attempt=attempt, plan=plan)


def test_gpus_that_are_promised_twice_are_blamed() -> None:
    history = History()
    node(history, "n", 8, 0.0)
    history.jobs["rival"] = Job("rival", "team/rival", [gang(10.0, 5)])
    assert told(gang(100.0, 3, 0), gang(100.0, 3), history=history) == ""
    assert "9 × H100 are promised (team/rival 5, team/job 4), 0 in foreign hands, of 8" in told(
        gang(100.0, 4, 0), gang(100.0, 4), history=history
    )


def test_a_node_that_was_lost_after_an_admission_is_no_promise_broken() -> None:
    history = History()
    for name in ("a", "b"):
        node(history, name, 4, 0.0)
    history.jobs["rival"] = Job("rival", "team/rival", [gang(10.0, 4)])
    node(history, "b", 4, 20.0, ready=False)
    assert told(gang(30.0, 4, 0), gang(30.0, 4), history=history) == ""
    history.jobs["rival"].versions = [gang(60.0, 4)]
    assert "of 4" in told(gang(70.0, 4, 0), gang(70.0, 4), history=history)


def pod(
    history: History, name: str, attempt: int, *, told_to_end: bool = False, gpus: int = 0,
    ready: str = "True",
    phase: str = "Running", job: str = "uid",
) -> None:  # fmt: skip
    metadata: dict[str, Any] = {"name": name, "uid": name, "annotations": {PLAN_ANNOTATION: "{}"}}
    metadata["labels"] = {LABEL_UID: job, LABEL_ATTEMPT: str(attempt)}
    if told_to_end:
        metadata["deletionTimestamp"] = "now"
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    spec = {"nodeName": "n", "containers": [{"resources": limits}]}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]}
    history.see("pods", {"metadata": metadata, "spec": spec, "status": status}, 1.0)


@pytest.mark.parametrize(
    ("spoiled", "ends", "blamed"),
    [
        (True, ("Succeeded", "Failed"), False),
        (True, ("Succeeded", "Running"), True),
        (True, (), True),
        (False, ("Succeeded", "Failed"), True),
    ],
)
def test_a_gang_that_ended_while_its_job_could_not_be_read_holds_nothing(
    spoiled: bool, ends: tuple[str, ...], blamed: bool
) -> None:
    history = History()
    node(history, "n", 8, 0.0)
    unread = replace(gang(20.0, 5), status={**gang(20.0, 5).status, "phase": UNKNOWN_PHASE})
    history.jobs["rival"] = Job(
        "rival", "team/rival", [gang(10.0, 5), *([unread] if spoiled else []), gang(30.0, 5)]
    )
    for number, phase in enumerate(ends):
        pod(history, f"rival-{number}", 1, phase=phase, job="rival")
    assert bool(told(gang(100.0, 4, 0), gang(100.0, 4), history=history)) is blamed


def test_two_attempts_that_live_are_seen_until_one_is_told_to_end() -> None:
    history, job = History(), Job("uid", "team/job", [gang(0.0, 1, 2)])
    pod(history, "old", 1)
    assert earlier_lives(history, job) == set()
    pod(history, "new", 2)
    assert earlier_lives(history, job) == {"1"}
    pod(history, "old", 1, told_to_end=True)
    assert earlier_lives(history, job) == set()


def ended(attempt: int, result: Result | None, *, rank: int = 0, sure: bool = True) -> Entry:
    return Entry("uid", attempt, Deed.ENDED, at=0.0, rank=rank, result=result, sure=sure)


def audited(now: Version, *deeds: Entry) -> str:
    """What is wrong with a job that stands so after these deeds."""
    history, ledger = History(), Ledger()
    history.jobs["uid"] = Job("uid", "team/job", [now])
    for deed in deeds:
        ledger.intend(deed)
    return "; ".join(audit(history, ledger))


def final(kind: str, reason: str, **status: Any) -> Version:
    return version(
        9,
        condition(kind, reason=reason),
        phase=kind,
        completionTime="t",
        **{"attempt": 1, **status},
    )


def test_a_success_that_nobody_let_happen_is_blamed() -> None:
    now = final("Succeeded", "Succeeded", attempt=2, plan={"nodes": 2})
    assert "of which ranks none said so" in audited(now)
    assert "said so" in audited(now, ended(1, Result.SUCCEEDED)), "another attempt's"
    assert "ranks [1]" in audited(now, ended(2, Result.SUCCEEDED, rank=1))
    assert audited(now, ended(2, Result.SUCCEEDED)) == ""


def test_a_failure_without_its_cause_is_blamed() -> None:
    assert "nobody reported that" in audited(final("Failed", "BadInput"), ended(1, Result.ERROR))
    assert audited(final("Failed", "BadInput"), ended(1, Result.BAD_INPUT)) == ""
    assert "the limit is None s" in audited(final("Failed", "DeadlineExceeded"))
    assert "which nothing here brings about" in audited(final("Failed", "BadWeather"))


def test_restarts_are_held_against_what_failed() -> None:
    short = final("Failed", "OutOfMemory", attempt=2, restarts=1)
    assert audited(short, ended(1, Result.OUT_OF_MEMORY), ended(2, Result.OUT_OF_MEMORY)) == ""
    assert "OutOfMemory in attempt 2: nobody reported that" in audited(
        short, ended(1, Result.OUT_OF_MEMORY)
    )
    spent = final("Failed", "RestartLimit", attempt=4, restarts=3)
    failures = [ended(attempt, Result.ERROR) for attempt in (1, 2, 3, 4)]
    assert audited(spent, *failures) == ""
    assert "3 attempts had an end that counts" in audited(spent, *failures[1:])
    waits = version(9, condition("Admitted", False), attempt=2, restarts=1)
    assert "1 restarts were counted; attempts that failed: []" in audited(
        waits, ended(1, Result.PREEMPTED)
    )
    silent = version(9, condition("Admitted"), attempt=2, restarts=0)
    assert "attempts that surely failed: [1]" in audited(silent, ended(1, Result.OUT_OF_MEMORY))
    assert audited(silent, ended(1, Result.OUT_OF_MEMORY, sure=False)) == ""
    assert audited(silent, ended(1, Result.ERROR), Entry("uid", 1, Deed.DISRUPTED, at=0.0)) == ""


def test_a_failure_beside_a_lost_pod_need_not_be_counted() -> None:
    now = version(9, condition("Admitted"), attempt=2, restarts=0)
    for marked, blamed in (("True", True), ("False", False)):
        history, ledger = History(), Ledger()
        history.jobs["uid"] = Job("uid", "team/job", [now])
        pod(history, "one", 1, ready=marked)
        ledger.intend(ended(1, Result.ERROR))
        assert ("surely failed: [1]" in "; ".join(audit(history, ledger))) is blamed


def test_rollbacks_are_held_against_what_diverged() -> None:
    wish = {"guard": {"onDivergence": "Rollback"}}
    spent = replace(
        final("Failed", "Diverged", attempt=3, rollbacks=[rolled_back(1), rolled_back(2)]),
        spec=wish,
    )
    divergences = [ended(attempt, Result.DIVERGED) for attempt in (1, 2, 3)]
    assert audited(spent, *divergences) == ""
    assert "in attempt 1: nobody reported that" in audited(spent, *divergences[1:])
    early = replace(final("Failed", "Diverged", attempt=2, rollbacks=[rolled_back(1)]), spec=wish)
    assert "failed of a divergence after 1 rollbacks" in audited(early, *divergences)
    assert audited(replace(early, spec={}), *divergences) == ""


def rolled_back(attempt: int) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "reason": "Diverged",
        "skipped": {"first": attempt, "last": attempt},
    }


def test_an_event_that_no_condition_said_is_blamed() -> None:
    history = History()
    history.jobs["uid"] = Job(
        "uid", "team/job", [version(0, condition("Admitted", reason="Admitted"))]
    )
    about: dict[str, object] = {"uid": "uid", "name": "job"}
    events: list[dict[str, object]] = [
        {"involvedObject": about, "reason": reason, "message": "m"}
        for reason in ("Admitted", "Hang")
    ]
    assert list(events_tell_what_was(history, events)) == [
        "event Hang on job: no condition ever said so: m"
    ]
    history.listed("grpojobs", set(), 9.0)
    assert list(events_tell_what_was(history, events)) == [], (
        "it went unseen, and what was written last with it"
    )


def test_an_end_for_which_nothing_was_done_is_blamed() -> None:
    def after(reason: str, counted: bool = False) -> Version:
        end = {"attempt": 1, "reason": reason, "counted": counted}
        return version(9, condition("Admitted"), attempt=2, restarts=int(counted), ends=[end])

    assert "attempt 1 ended with Hang; what was done to it: ['Error']" in audited(
        after("Hang", counted=True), ended(1, Result.ERROR)
    )
    assert "and it counts" in audited(after("Preempted", counted=True), ended(1, Result.PREEMPTED))
    assert audited(after("Preempted")) == ""
    assert audited(after("Hang", counted=True), ended(1, None)) == "", "an exit code may say so"
