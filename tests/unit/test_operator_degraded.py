"""Degraded while a gang runs: what rank 0 tells, or that it tells nothing."""

from typing import Any

import pytest

from grpo_operator.decide.decisions import Action, Decision
from tests.unit.operator_world import (
    active_status,
    after,
    condition,
    make_child,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    of_type,
)


def test_a_checkpoint_that_could_not_be_written_is_told_until_one_could() -> None:
    def degraded(status: dict[str, Any], **told: Any) -> Any:
        pull = make_pull(metrics={"checkpoint_step": 300.0}, **told) if told else None
        seen = make_seen(make_job(status=status), make_child(), make_pod(0), make_pod(1), pull=pull)
        return of_type(after(seen, Decision(Action.WAIT)), "Degraded")

    problem = (
        "the checkpoint of step 400 could not be written: rank 0: OSError: [Errno 28] No "
        "space left on device"
    )
    told = degraded(active_status(), checkpoint_problem=problem)
    assert told[:2] == ("True", "CheckpointNotWritten")
    assert told[2] == f"{problem}; it is tried again, until then a restart goes back to step 300"
    known = active_status()
    known["conditions"].append(condition("Degraded", reason="CheckpointNotWritten"))
    assert degraded(known)[:2] == ("True", "CheckpointNotWritten"), (
        "a new operator process has not heard of it yet"
    )
    assert degraded(known, checkpoint_problem="")[0] == "False"


@pytest.mark.parametrize(("heard", "degraded"), [(False, "True"), (True, "False")])
def test_a_new_operator_process_does_not_take_back_that_rank_0_is_silent(
    heard: bool, degraded: str
) -> None:
    known = active_status()
    known["conditions"].append(condition("Degraded", reason="ProgressUnknown"))
    pull = make_pull() if heard else None
    seen = make_seen(make_job(status=known), make_child(), make_pod(0), make_pod(1), pull=pull)
    status = after(seen, Decision(Action.WAIT))
    assert of_type(status, "Degraded")[0] == degraded
