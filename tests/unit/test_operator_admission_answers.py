"""What a job is answered that asks for an attempt: a place, a wait or a refusal."""

from typing import Any

import pytest

from grpo_operator.decide.decisions import Action, Decision
from tests.unit.operator_world import active_status, make_job, make_seen
from tests.unit.queue_world import (
    ASKED,
    Jobs,
    answered,
    cluster,
    gang,
    gpu_pod,
    job,
    own_pod,
    queue,
)


async def test_the_answer_keeps_the_end_that_it_follows() -> None:
    one = job("a", gang(1, 4))
    answer = await answered([one], cluster(8), one)
    assert (answer.action, answer.plan, answer.counted) == (Action.COMMIT, gang(1, 4), True)
    waiting = await answered([one], cluster(2), one)
    assert (waiting.action, waiting.reason, waiting.counted) == (
        Action.QUEUE,
        "WaitingForGPUs",
        True,
    )
    assert waiting.requeue_after is None


async def test_a_restart_takes_its_own_place_again_ahead_of_the_line() -> None:
    mine, older = job("mine", gang(1, 8), age=10, active=True), job("older", gang(1, 8), age=20)
    busy = cluster(8, pods=[own_pod(mine, 8, "node-0")])
    answer = await answered([older, mine], busy, mine)
    assert (answer.action, answer.plan) == (Action.COMMIT, gang(1, 8))
    assert (await answered([older, mine], busy, older)).action is Action.QUEUE


async def test_a_restart_whose_node_is_lost_waits_like_all_others() -> None:
    mine = job("mine", gang(2, 4), active=True)
    answer = await answered([mine], cluster(4), mine)
    assert (answer.action, answer.reason, answer.ended) == (Action.QUEUE, "WaitingForGPUs", None)
    assert answer.message == "needs 8 × NVIDIA-H100-80GB-HBM3 on 2 nodes; 4 free"


async def test_a_job_without_any_image_is_refused() -> None:
    one = make_job()
    answer = await queue([one], cluster(8), image="").answer(make_seen(one), ASKED)
    assert answer is not None
    assert (answer.action, answer.reason) == (Action.REJECT, "NoImage")
    assert answer.message.startswith("spec.image: unset")


async def test_a_cpu_job_needs_no_inventory() -> None:
    one = make_job()
    asked = queue([one], cluster())
    answer = await asked.answer(make_seen(one), Decision(Action.ADMIT))
    assert answer is not None
    assert answer.action is Action.COMMIT
    assert answer.plan is not None
    assert answer.plan.nodes == 2
    assert not one.is_competing


async def test_a_spec_too_big_for_an_annotation_is_refused() -> None:
    rewards = [{"format": {"pattern": "é" * 4000}} for _ in range(32)]
    one = make_job({"rewards": rewards})
    answer = await queue([one], cluster()).answer(make_seen(one), Decision(Action.ADMIT))
    assert answer is not None
    assert (answer.action, answer.reason) == (Action.REJECT, "NotSupported")
    assert "the pods' annotations hold 204800" in answer.message


async def test_kueue_jobs_are_planned_on_the_whole_cluster() -> None:
    full = cluster(8, pods=[gpu_pod("p", 8)])
    spec = {
        "placement": {
            "accelerator": "GPU",
            "nodes": None,
            "queueName": "team",
            "gpus": {"min": 1, "max": 8},
        }
    }
    one = make_job({**spec, "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct", "parameters": "494M"}})
    answer = await queue([one], full).answer(make_seen(one), Decision(Action.ADMIT))
    assert answer is not None
    assert (answer.action, answer.reason) == (Action.QUEUE, "WaitingForKueue")
    assert answer.plan is not None
    assert answer.plan.gpus >= 1


async def test_the_end_of_a_gang_whose_spec_is_no_longer_one_counts_before_it_is_refused() -> None:
    one = make_job({"placement": {"accelerator": "TPU"}}, active_status())
    assert (one.spec, one.is_active) == (None, True)
    answer = await queue([one], cluster(8)).answer(make_seen(one), ASKED)
    assert answer is not None
    assert (answer.action, answer.reason) == (Action.QUEUE, "InvalidSpec")
    assert answer.counted
    assert "placement.accelerator" in answer.message


async def test_a_place_is_nobody_elses_between_the_verdict_and_its_commit() -> None:
    first = job("first", gang(1, 8))
    urgent = job("urgent", gang(1, 8), age=1, priorityClassName="high")
    jobs = Jobs([first])
    there = queue(jobs, cluster(8, priorities={"high": 1000, "": 5}))
    await there.run_cycle()
    jobs.append(urgent)
    there.record_job(urgent.key, urgent)
    await there.run_cycle()
    answers = {one.name: await there.answer(make_seen(one), ASKED) for one in jobs}
    assert {name: answer and answer.action for name, answer in answers.items()} == {
        "first": Action.COMMIT,
        "urgent": Action.QUEUE,
    }


@pytest.mark.parametrize(
    ("spec", "facts", "reason"),
    [
        (
            {"placement": {"priorityClassName": "urgent"}},
            {"priorities": {"high": 10}},
            "PriorityClassNotFound",
        ),
        (
            {"podTemplate": {"spec": {"serviceAccountName": "trainer"}}},
            {"service_accounts": {"team-a": frozenset({"default"})}},
            "ServiceAccountNotFound",
        ),
    ],
)
@pytest.mark.parametrize("queue_name", [None, "team"])
async def test_a_job_on_cpus_or_of_kueue_waits_for_what_it_names(
    spec: dict[str, Any], facts: dict[str, Any], reason: str, queue_name: str | None
) -> None:
    placement = {"accelerator": "CPU", "nodes": 2, "queueName": queue_name}
    one = make_job({**spec, "placement": {**placement, **spec.get("placement", {})}})
    answer = await queue([one], cluster(**facts)).answer(make_seen(one), ASKED)
    assert answer is not None
    assert (answer.action, answer.reason, answer.requeue_after) == (Action.QUEUE, reason, None)
    assert answer.plan is not None
    answer = await queue([one], cluster()).answer(make_seen(one), ASKED)
    assert answer is not None
    could_start = answer.action is Action.COMMIT or answer.reason == "WaitingForKueue"
    assert could_start, "what can't be seen refuses nobody"
