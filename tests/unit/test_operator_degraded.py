"""Degraded while a gang runs: what rank 0 tells, or that it tells nothing."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.report.report import MAX_PROBLEM
from grpo_kube.objects.times import Observed
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Silence
from grpo_operator.report.events import event, telling_change
from tests.generated import cases
from tests.unit.operator_world import (
    GPU_PLAN,
    NOW,
    active_status,
    after,
    condition,
    judged,
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


LOST = [{"type": "Ready", "status": "False"}]


def test_a_gang_of_which_a_node_has_fallen_silent_is_not_said_to_be_whole() -> None:
    """Kubernetes ends the pod after five minutes; until then nothing else shows why it stands."""
    job, pull = make_job(status=active_status()), make_pull()
    lost = make_seen(job, make_child(), make_pod(0), make_pod(1, conditions=LOST), pull=pull)
    assert of_type(after(lost, judged(lost)), "Degraded") == (
        "True",
        "NodeNotReady",
        "node node-1 of pod run-1-1-abcde is not ready; unless it comes back, Kubernetes ends the "
        "pod, after five minutes by default, and the gang starts again. Look at the node (`kubectl "
        "describe node`)",
    )
    back = make_seen(job, make_child(), make_pod(0), make_pod(1), pull=pull)
    assert of_type(after(back, judged(back)), "Degraded")[:2] == ("False", "AsExpected")


def test_a_rank_0_whose_node_has_fallen_silent_is_not_looked_for_behind_a_network_policy() -> None:
    silence = Silence(Observed(NOW - 121), "10.0.0.7:8080: no answer in time")
    status = active_status(progress={"attempt": 1, "step": 3})
    lost = make_seen(
        make_job(status=status), make_child(), make_pod(0, conditions=LOST), make_pod(1),
        silence=silence,
    )  # fmt: skip
    assert of_type(after(lost, judged(lost)), "Degraded") == (
        "True",
        "ProgressUnknown",
        "rank 0 has not answered for minutes, so its progress is unknown: node node-0 of pod "
        "run-1-0-abcde is not ready",
    )


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


FAR_APART = GPU_PLAN.model_copy(update={"link_bytes_per_second": 280_000_000_000})
NO_LIBRARY = (
    "rank 0 and 7 more: NCCL sends by TCP sockets, although spec.resources requests rdma/hca: it "
    "can't open libibverbs.so.1"
)


def network(measured: float | None, plan: Any = FAR_APART, **told: Any) -> tuple[str, str, str]:
    """Degraded of a gang on two nodes whose first all-reduce measured that."""
    resources = told.pop("resources", {})
    metrics = {} if measured is None else {"allreduce_bytes_per_second": measured}
    pull = make_pull(metrics=metrics, stage="Training", step=3, **told)
    job = make_job({"resources": resources}, active_status(plan=plan))
    seen = make_seen(job, make_child(), make_pod(0), make_pod(1), pull=pull)
    return of_type(after(seen, Decision(Action.WAIT)), "Degraded")


def test_a_network_far_slower_than_planned_is_told_with_both_numbers() -> None:
    held, reason, message = network(2.5e9)
    assert (held, reason) == ("True", "NetworkSlow")
    assert "moved 2.5 GB/s, less than half of the 280 GB/s that the plan's step time" in message
    assert "request the nodes' RDMA cards" in message
    assert "grpo.dev/node-gbps" in message
    cards = {"limits": {"rdma/hca": 1}}
    assert "cards that NCCL leaves out" in network(2.5e9, resources=cards)[2]


@pytest.mark.parametrize("measured", [1.4e11, 2.8e11, None, 0.0, -1.0, float("nan"), float("inf")])
def test_a_network_as_planned_or_a_number_that_is_none_is_not_told(measured: float | None) -> None:
    assert network(measured)[:2] == ("False", "AsExpected")


def test_nothing_is_held_against_a_plan_that_assumes_nothing_or_has_one_node() -> None:
    assert network(1.0, plan=GPU_PLAN)[0] == "False"
    one_node = FAR_APART.model_copy(update={"nodes": 1, "gpus": 4})
    assert network(1.0, plan=one_node)[0] == "False"


def test_rdma_that_is_not_used_is_told_before_the_speed_that_follows_from_it() -> None:
    held, reason, message = network(2.5e9, rdma_problem=NO_LIBRARY)
    assert (held, reason) == ("True", "RDMAUnused")
    assert message.startswith(f"{NO_LIBRARY}; the first all-reduce moved 2.5 GB/s")
    quick = network(2.5e11, rdma_problem=NO_LIBRARY)
    assert quick[1:] == ("RDMAUnused", f"{NO_LIBRARY}; the run goes on without it")
    assert network(2.5e9, rdma_problem=NO_LIBRARY, checkpoint_problem="full")[1] == (
        "CheckpointNotWritten"
    )


def test_a_network_that_is_not_as_wished_is_one_warning_until_it_is_another() -> None:
    job = make_job({}, active_status(plan=FAR_APART))
    pull = make_pull(metrics={"allreduce_bytes_per_second": 2.5e9})
    seen = make_seen(job, make_child(), make_pod(0), make_pod(1), pull=pull)
    status = after(seen, Decision(Action.WAIT))
    change = telling_change(job.status.conditions, status.conditions)
    assert change is not None
    told = event(job, change, NOW)
    assert (told["type"], told["reason"]) == ("Warning", "NetworkSlow")
    assert telling_change(status.conditions, status.conditions) is None
    known = active_status(plan=FAR_APART)
    known["conditions"].append(condition("Degraded", reason="NetworkSlow"))
    unheard = make_seen(make_job({}, known), make_child(), make_pod(0), make_pod(1))
    assert of_type(after(unheard, Decision(Action.WAIT)), "Degraded")[1] == "NetworkSlow", (
        "a new operator process has not heard of it yet"
    )


@settings(max_examples=cases(60))
@given(st.none() | st.floats(), st.text(max_size=MAX_PROBLEM))
def test_whatever_rank_0_says_of_the_network_is_a_condition(
    measured: float | None, problem: str
) -> None:
    held, reason, message = network(measured, rdma_problem=problem)
    assert reason in ("RDMAUnused", "NetworkSlow", "AsExpected")
    assert (held == "True") is (reason != "AsExpected")
    assert (reason == "RDMAUnused") is bool(problem)
    assert 0 < len(message) <= 4096


@pytest.mark.parametrize("action", [Action.QUEUE, Action.RELEASE, Action.REJECT])
@pytest.mark.parametrize("before", ["True", "False"])
def test_a_job_that_waits_is_not_degraded_by_an_attempt_that_is_over(
    action: Action, before: str
) -> None:
    known = active_status()
    known["conditions"].append(condition("Degraded", before, "EnginesLost"))
    seen = make_seen(make_job(status=known), make_child(), make_pod(0))
    status = after(seen, Decision(action, "SchedulingTimeout", "no node took them"))
    assert of_type(status, "Degraded") == ("False", "AsExpected", "no attempt runs")
    change = telling_change(seen.job.status.conditions, status.conditions)
    assert change is not None
    assert (change.type, change.reason) == ("Admitted", "SchedulingTimeout"), "why it is over"


def test_a_job_that_never_ran_is_not_said_to_be_degraded_or_not() -> None:
    seen = make_seen(make_job())
    status = after(seen, Decision(Action.QUEUE, "WaitingForGPUs", "needs 8"))
    assert "Degraded" not in {one.type for one in status.conditions}
