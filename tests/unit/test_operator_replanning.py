"""An attempt that ran out of memory: the next one's plan knows it, and after three more plans the
job fails."""

import json
from dataclasses import replace
from typing import Any

import pytest

from grpo_api.plan.learned import MAX_REPLANS, Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import GRPOJobStatus
from grpo_operator.admission.inventory import node_facts
from grpo_operator.admission.resume_plan import learning, plan_again, reuse_plan
from grpo_operator.admission.scheduler import CycleInput, restart
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.report.status import build_status, to_json
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from grpo_planner.result.result import PlanResult
from tests.unit.operator_world import (
    LIMITS,
    active_status,
    condition,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    of_type,
    terminated,
)
from tests.unit.planning import H100, LLAMA_1B, inventory, nodes

CLAIM = {"checkpoint": {"volume": {"claimName": "runs"}, "everySteps": 10}}
SPEC: dict[str, Any] = {
    "model": {"name": LLAMA_1B, "parameters": None},
    "placement": {"accelerator": "GPU", "nodes": 1, "gpus": {"min": 1, "max": 1}},
    "generation": {"engine": "Transformers"},
    **CLAIM,
}
THERE = inventory(nodes(1, 8, H100))
BACKWARD = {"phase": "backward", "allocatedBytes": 80 * 2**30, "requestedBytes": 2**30}
PROGRESS = {"progress": {"step": 12, "totalSteps": 100}}


def first_plan() -> ExecutionPlan:
    """What the planner gives the job."""
    job = make_job(SPEC)
    chosen = plan_job(job.valid_spec, THERE).chosen
    assert chosen is not None
    return chosen


def ran_out(
    attempt: int = 1, shortage: Any = BACKWARD, spec: Any = None, **status: Any
) -> Observation:
    """A rank of the attempt says that it ran out of memory."""
    plan = status.pop("plan", None) or first_plan()
    said = {
        "result": "OutOfMemory",
        "message": "CUDA out of memory",
        "shortage": shortage,
        "checkpointStep": 10,
    }
    job = make_job({**SPEC, **(spec or {})}, active_status(attempt, plan, **(PROGRESS | status)))
    return make_seen(
        job, make_child(attempt), make_pod(0, attempt, terminated(40, json.dumps(said)))
    )


def committed(seen: Observation) -> GRPOJobStatus:
    """The status with the next attempt, planned as the queue plans it."""
    decision = judged(seen)
    assert decision.action is Action.ADMIT, decision
    assert decision.learned is not None
    answer = reuse_plan(learning(seen.job, decision.learned), THERE)
    assert answer is not None
    assert answer.chosen is not None, answer.message
    return build_status(seen, replace(decision, action=Action.COMMIT, plan=answer.chosen))


def test_the_next_attempt_has_another_plan_and_says_why() -> None:
    seen = ran_out()
    status = committed(seen)
    old = seen.job.status.plan
    assert old is not None
    assert status.plan is not None
    assert status.plan.gradient_checkpointing
    assert not old.gradient_checkpointing
    assert (
        status.plan.micro_batch * status.plan.gradient_accumulation
        == old.micro_batch * old.gradient_accumulation
    )
    assert (
        "after OutOfMemory at backward in attempt 1, which needed 81.0 GiB or more"
        in status.plan.changes[-1]
    )
    kind, reason, message = of_type(status, "Degraded")
    assert (kind, reason) == ("True", "OutOfMemory")
    assert "Planned again after OutOfMemory at backward" in message
    assert status.learned is not None
    assert status.learned.memory["backward"].needed_bytes == 81 * 2**30
    assert status.restarts == 1


def test_the_queue_gives_a_gang_that_starts_again_its_new_plan() -> None:
    seen = ran_out()
    decision = judged(seen)
    assert decision.learned is not None
    node = {
        "metadata": {
            "name": "n",
            "labels": {"nvidia.com/gpu.product": H100, "nvidia.com/gpu.memory": "81559"},
        },
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"nvidia.com/gpu": "8", "cpu": "128", "memory": "1024Gi"},
        },
    }
    snapshot = Snapshot(nodes=(node_facts(node),))
    question = CycleInput(jobs=(seen.job,), snapshot=snapshot, limits=LIMITS)
    verdict = restart(learning(seen.job, decision.learned), question)
    assert verdict.admitted, verdict.message
    assert verdict.plan is not None
    assert verdict.plan.gradient_checkpointing
    assert restart(seen.job, question).plan == seen.job.status.plan


def test_a_plan_that_answers_a_shortfall_is_kept_for_other_ends() -> None:
    status = committed(ran_out())
    second = make_job(SPEC, to_json(status))
    again = reuse_plan(second, THERE)
    assert again is not None
    assert again.chosen == status.plan


def test_a_gang_that_queues_meanwhile_remembers_it() -> None:
    seen = ran_out()
    queued = build_status(
        seen, replace(judged(seen), action=Action.QUEUE, reason="WaitingForGPUs", plan=None)
    )
    assert queued.learned is not None
    waiting = make_job(SPEC, to_json(queued))
    answer = reuse_plan(waiting, THERE)
    assert answer is not None
    assert answer.chosen is not None
    assert answer.chosen.gradient_checkpointing


def learned(count: int) -> dict[str, Any]:
    """What is known after so many attempts that ran out."""
    one = {
        "where": "backward",
        "tried": "a plan",
        "neededBytes": 85899345920,
        "usableBytes": 80 * 2**30,
    }
    memory = {"backward": {"predictedBytes": 2**36, "neededBytes": 2**36 + 2**30}}
    return {
        "memory": memory,
        "shortfalls": [{"attempt": number, **one} for number in range(1, count + 1)],
    }


def test_after_three_new_plans_the_job_fails_with_what_was_tried_and_what_would_do() -> None:
    seen = ran_out(4, learned=learned(MAX_REPLANS), spec={"restarts": {"limit": 9}})
    decision = judged(seen)
    assert (decision.action, decision.reason) == (Action.FAIL, "OutOfMemory")
    before, _, after = decision.message.partition(", needed ")
    assert before.startswith("out of memory after 3 new plans, the last Full DDP on 1 x ")
    assert "micro-batch" in before
    assert "at backward of 78.9 GiB: CUDA out of memory. The same number of GPUs" in after
    assert "usable each would do" in after
    status = build_status(seen, decision)
    assert status.learned is not None
    assert len(status.learned.shortfalls) == MAX_REPLANS + 1
    _, reason, message = of_type(status, "Failed")
    assert reason == "OutOfMemory"
    # What a condition has no room for is the cause: status.outcome has it.
    assert message.startswith(before)
    assert message.endswith(after.partition(". ")[2])
    assert len(message) <= 300


def test_a_retry_counts_anew_and_keeps_what_was_learned() -> None:
    status = active_status(4, first_plan(), learned=learned(3))
    status["conditions"].append(condition("Failed", reason="OutOfMemory"))
    seen = make_seen(make_job({**SPEC, "retry": 1}, status))
    after = build_status(seen, judged(seen))
    assert after.learned is not None
    assert (after.learned.shortfalls, list(after.learned.memory)) == ([], ["backward"])


def test_the_users_rules_come_first() -> None:
    fail = {"restarts": {"rules": [{"action": "Fail", "onResults": ["OutOfMemory"]}]}}
    decision = judged(ran_out(spec=fail))
    assert (decision.action, decision.learned) == (Action.FAIL, None)
    uncounted = {
        "restarts": {"rules": [{"action": "RestartUncounted", "onResults": ["OutOfMemory"]}]}
    }
    decision = judged(ran_out(spec=uncounted))
    assert (decision.action, decision.counted) == (Action.ADMIT, False)
    assert decision.learned is not None


@pytest.mark.parametrize(
    "shortage", [None, {"phase": "nonsense"}, {"requestedBytes": -1}, "x", {"phase": None}]
)
def test_a_shortage_that_can_not_be_believed_is_taken_for_the_phase_of_the_highest_peak(
    shortage: Any,
) -> None:
    decision = judged(ran_out(shortage=shortage))
    assert decision.action is Action.ADMIT
    assert decision.learned is not None
    assert list(decision.learned.memory) == ["backward"]


def test_an_attempt_that_the_kernel_killed_asks_for_more_host_memory() -> None:
    job = make_job(SPEC, active_status(1, first_plan(), progress=PROGRESS["progress"]))
    seen = make_seen(job, make_child(), make_pod(0, 1, terminated(137, reason="OOMKilled")))
    status = committed(seen)
    old = seen.job.status.plan
    assert status.plan is not None
    assert old is not None
    assert status.plan.host_memory_bytes >= 1.49 * old.host_memory_bytes
    assert status.plan.micro_batch == old.micro_batch


def undone(seen: Observation, checkpoint: int | None) -> GRPOJobRecord:
    """The job with a shortfall that no split relieves."""
    said = {"result": "OutOfMemory", "shortage": {"phase": "step", "allocatedBytes": 2**37}}
    told = {**said, "checkpointStep": checkpoint}
    again = make_seen(seen.job, make_child(), make_pod(0, 1, terminated(40, json.dumps(told))))
    decision = judged(again)
    assert decision.learned is not None
    return learning(seen.job, decision.learned)


def answered(job: GRPOJobRecord, there: Inventory) -> PlanResult:
    """As the queue does: what goes on, else what is planned again."""
    return reuse_plan(job, there) or plan_again(
        job, lambda spec, known: plan_job(spec, there, learned=known)
    )


def test_only_without_a_checkpoint_may_sharding_and_gpus_change() -> None:
    more = {"placement": {**SPEC["placement"], "gpus": {"min": 1, "max": 8}}}
    sealed = answered(undone(ran_out(spec=more), 10), THERE)
    assert (sealed.feasible, sealed.reason) == (False, "OutOfDeviceMemory")
    assert "would do" in sealed.message
    free = answered(undone(ran_out(spec=more), 0), THERE)
    assert free.chosen is not None, free.message
    assert free.chosen.method == "Full"
    assert (free.chosen.gpus, free.chosen.zero_stage, free.chosen.offload) != (1, 0, "None")
    assert "after OutOfMemory at step in attempt 1: runs as Full" in free.chosen.changes[-1]
    assert not answered(undone(ran_out(spec=more), None), THERE).feasible, (
        "a step was made, so there may be one"
    )
    assert answered(undone(ran_out(spec=more, progress=None), None), THERE).feasible
    assert not answered(undone(ran_out(spec=more, progress=None), 10), THERE).feasible, (
        "the trainer knows better"
    )


def test_an_adapter_never_takes_the_place_of_all_parameters() -> None:
    one = inventory(nodes(1, 1, H100))
    seen = ran_out(spec={"adapter": {"use": "IfNeeded"}}, progress=None)
    too_much = (
        {"backward": {"predictedBytes": 2**30, "neededBytes": share * 2**29}}
        for share in range(2, 80, 2)
    )
    known = (Learned.model_validate({**learned(1), "memory": memory}) for memory in too_much)
    plans = ((one_of, plan_job(seen.job.valid_spec, one, learned=one_of)) for one_of in known)
    learned_so = next(
        one_of for one_of, plan in plans if plan.chosen and plan.chosen.method == "LoRA"
    )
    job = learning(seen.job, learned_so)
    found = plan_again(job, lambda spec, known: plan_job(spec, one, learned=known))
    assert found.chosen is None
    assert "The job ran out of memory with 1 plan" in found.message


def test_what_has_no_known_size_restarts_as_before() -> None:
    said = json.dumps({"result": "OutOfMemory", "message": "CUDA out of memory"})
    job = make_job({"model": {"name": "me/unheard-of", "parameters": None}}, active_status())
    decision = judged(
        make_seen(job, make_child(), make_pod(0, 1, terminated(40, said)), make_pod(1))
    )
    assert (decision.action, decision.learned) == (Action.ADMIT, None)
    assert isinstance(decision, Decision)
