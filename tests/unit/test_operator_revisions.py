"""The commits that a job is made of: told by pods, kept by the first, given to all later
attempts."""

import json
from typing import Any

from grpo_api.job import parse_spec
from grpo_api.report.revisions import DATASET_FINGERPRINT
from grpo_operator.decide.observation import Observation
from grpo_operator.pods.manifests import attempt_of, training_plan
from tests.unit.operator_world import (
    PLAN,
    SPEC,
    active_status,
    after,
    judged,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    running,
    said,
    terminated,
)
from tests.unit.test_operator_resuming import found, source

A, B, C = "a" * 40, "b" * 40, "c" * 40
DATA, OTHER_DATA = "d" * 64, "e" * 64


def look(
    *ends: Any, known: dict[str, str] | None = None, pulled: dict[str, str] | None = None
) -> Observation:
    """A running gang whose rank 0 was asked, or whose pods have ended."""
    job = running().job
    if known is not None:
        job = make_job(status=active_status(revisions=known))
    pods = [make_pod(index, state=end) for index, end in enumerate(ends)]
    pull = make_pull(revisions=pulled) if pulled else None
    return make_seen(job, make_child(), *pods, pull=pull)


def revisions(seen: Observation) -> dict[str, str] | None:
    return after(seen, judged(seen)).revisions


def test_a_pull_tells_them_and_the_first_commit_stays() -> None:
    assert revisions(look()) is None
    assert revisions(look(pulled={"model": A, DATASET_FINGERPRINT: DATA})) == {
        "model": A,
        DATASET_FINGERPRINT: DATA,
    }
    moved = {"model": B, "dataset": C, DATASET_FINGERPRINT: OTHER_DATA}
    known = {"model": A, DATASET_FINGERPRINT: DATA}
    assert revisions(look(known=known, pulled=moved)) == {
        "model": A,
        "dataset": C,
        DATASET_FINGERPRINT: OTHER_DATA,
    }


def test_an_outcome_tells_them_where_no_pull_did() -> None:
    told = said("Error", revisions={"model": A, "rewards[1].model": B})
    assert revisions(look(terminated(1, told), terminated(1, told))) == {
        "model": A,
        "rewards[1].model": B,
    }


def test_what_is_no_commit_costs_itself_only() -> None:
    told = json.dumps({"result": "BadInput", "attempt": 1, "revisions": {"model": "main; rm -rf"}})
    seen = look(terminated(43, told), terminated(43, told))
    status = after(seen, judged(seen))
    assert (status.phase, status.revisions) == ("Failed", None)


def test_later_attempts_are_told_them() -> None:
    job = make_job(status=active_status(revisions={"model": A}))
    plan = training_plan(attempt_of(job, parse_spec(SPEC), PLAN, 2))
    assert plan.revisions == {"model": A}


def test_a_job_that_continues_another_takes_its_commits_of_what_both_name_alike() -> None:
    earlier = source(revisions={"model": A, "dataset": B, "rewards[0].model": C})
    assert found(earlier).status.revisions == {"model": A, "dataset": B}
    other = found(earlier, dataset={"name": "x/other", "promptColumn": "q"})
    assert other.status.revisions == {"model": A}
