"""An engine that failed: the rung that the next attempt is planned on, and what the user is told.

The answers are generated over causes, rungs that were taken, costs and what the spec allows.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.plan.learned import EngineFailure, Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import EXIT_CODES, Result
from grpo_api.status.status import GRPOJobStatus
from grpo_operator.admission.inventory import node_facts
from grpo_operator.admission.resume_plan import learning, next_plan, reuse_plan
from grpo_operator.admission.scheduler import CycleInput, restart
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.observation import Observation
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.report.events import event, telling_change
from grpo_operator.report.status import build_status, to_json
from grpo_planner.plan import plan_job
from grpo_planner.replan.engine_fallback import MOST_COSTLY, fallback_plan, gpu_seconds
from grpo_planner.replan.past_run import Run
from grpo_planner.result.result import PlanReason, PlanResult
from tests.generated import cases
from tests.unit.operator_world import (
    LIMITS,
    NOW,
    active_status,
    condition,
    judged,
    make_child,
    make_engine,
    make_engines,
    make_job,
    make_pod,
    make_seen,
    of_type,
    terminated,
)
from tests.unit.planning import A10G, H100, LLAMA_1B, QWEN_7B, inventory, nodes

THERE = inventory(nodes(1, 8, H100))
LENGTHS = {"cheap": 128, "dear": 1024}
"""Completion lengths with which Transformers costs less and more than MOST_COSTLY times an
engine."""
PERMANENT_CAUSES = ("Missing", "Unprovable")
Cause = Literal["NotStarted", "Missing", "Unprovable"] | None


class Story(NamedTuple):
    """A job whose engine fails."""

    engine: str = "Auto"
    fallback: str = "Auto"
    cost: str = "cheap"
    on_first_rung: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        """Its spec."""
        generation: dict[str, Any] = {"engine": self.engine, "fallback": self.fallback}
        if self.engine == "Servers":
            generation["servers"] = {"replicas": 1}
        return {
            "model": {"name": LLAMA_1B, "parameters": None},
            "placement": {"accelerator": "GPU", "nodes": 1, "gpus": {"min": 1, "max": 1}},
            "generation": generation,
            "training": {"maxCompletionLength": LENGTHS[self.cost]},
            "checkpoint": {"volume": {"claimName": "runs"}, "everySteps": 10},
        }

    @property
    def plan(self) -> ExecutionPlan:
        """The plan of the attempt that fails."""
        first = first_plan(self.engine, self.cost)
        return first_rung(self.engine, self.cost) if self.on_first_rung else first

    @property
    def learned(self) -> Learned | None:
        """What is known before it fails."""
        return failed_once(self.engine, self.cost) if self.on_first_rung else None


@cache
def first_plan(engine: str, cost: str) -> ExecutionPlan:
    """What the planner gives the job."""
    job = make_job(Story(engine, cost=cost).spec)
    chosen = plan_job(job.valid_spec, THERE).chosen
    assert chosen is not None
    assert chosen.engine is not None
    return chosen


@cache
def failed_once(engine: str, cost: str) -> Learned:
    """What is known once the first plan's engine has failed."""
    job = make_job(Story(engine, cost=cost).spec)
    seconds = gpu_seconds(Run(first_plan(engine, cost), job.valid_spec, Learned()))
    failure = EngineFailure(
        attempt=1, reason="EngineFailed", message="no", rung="ModelRunnerV1", gpu_seconds=seconds
    )
    return Learned(engine_failures=[failure])


@cache
def first_rung(engine: str, cost: str) -> ExecutionPlan:
    """The plan on the first rung."""
    job = make_job(Story(engine, cost=cost).spec)
    return fallback_plan(Run(first_plan(engine, cost), job.valid_spec, failed_once(engine, cost)))


def message(result: str, cause: Cause = None, **more: Any) -> str:
    """A rank's termination message."""
    said = {"result": result, "message": "Proving: vLLM did not start: no kernel", **more}
    return json.dumps(said | ({"engineCause": cause} if cause else {}))


def ended(story: Story, result: str, cause: Cause = None, **spec: Any) -> Observation:
    """A rank of the job's attempt says that its engine failed."""
    attempt = 2 if story.on_first_rung else 1
    more: dict[str, Any] = {"progress": {"step": 12, "totalSteps": 100}}
    if story.learned:
        more["learned"] = story.learned.model_dump(mode="json", by_alias=True, exclude_none=True)
    status = active_status(attempt, story.plan, **more)
    code = EXIT_CODES[Result(result)]
    pod = make_pod(0, attempt, terminated(code, message(result, cause)))
    return make_seen(make_job({**story.spec, **spec}, status), make_child(attempt), pod)


def planned(seen: Observation, decision: Decision) -> PlanResult:
    """What the next attempt is planned as."""
    assert decision.learned is not None
    answer = reuse_plan(learning(seen.job, decision.learned), THERE)
    assert answer is not None
    return answer


def committed(seen: Observation) -> GRPOJobStatus:
    """The status with the next attempt."""
    decision = judged(seen)
    assert decision.action is Action.ADMIT, decision
    chosen = planned(seen, decision).chosen
    assert chosen is not None
    return build_status(seen, replace(decision, action=Action.COMMIT, plan=chosen))


def expected_rung(story: Story, result: str, cause: Cause) -> str:
    """The answer by the words of docs/explanation/generation.md."""
    if story.fallback == "Never":
        may_be_the_machines = result == "EngineFailed" and cause not in PERMANENT_CAUSES
        return "counted restart" if may_be_the_machines and not story.on_first_rung else "Fail"
    if not story.on_first_rung and cause not in PERMANENT_CAUSES:
        return "ModelRunnerV1"
    return "Transformers"


STORIES = st.builds(
    Story,
    engine=st.sampled_from(["Auto", "Colocated", "Servers"]),
    fallback=st.sampled_from(["Auto", "Never"]),
    cost=st.sampled_from(["cheap", "dear"]),
    on_first_rung=st.booleans(),
)
ENDS = st.one_of(
    st.tuples(
        st.just("EngineFailed"), st.sampled_from(["NotStarted", "Missing", "Unprovable", None])
    ),
    st.just(("EngineMismatch", None)),
)


@settings(max_examples=cases(150, gate=20))
@given(STORIES, ENDS)
def test_the_answer_follows_from_the_cause_the_rungs_taken_and_the_spec(
    story: Story, end: tuple[str, Cause]
) -> None:
    seen = ended(story, *end)
    decision, expected = judged(seen), expected_rung(story, *end)
    if expected == "Fail":
        assert (decision.action, decision.reason) == (Action.FAIL, end[0])
        assert "no kernel" in decision.message
        return
    assert decision.action is Action.ADMIT
    if expected == "counted restart":
        assert (decision.counted, decision.learned) == (True, None)
        return
    assert not decision.counted
    assert decision.learned is not None
    assert decision.learned.engine_failures[-1].rung == expected
    answer = planned(seen, decision)
    if expected == "Transformers" and is_dear(story.engine, story.cost):
        assert (answer.feasible, answer.reason) == (False, PlanReason.NO_FALLBACK)
        assert f"more than {MOST_COSTLY:g} times" in answer.message
        return
    assert answer.chosen is not None, answer.message
    engine = answer.chosen.engine
    assert (engine is None) == (expected == "Transformers")
    assert engine is None or (engine.model_runner, engine.sleep) == ("V1", False)


@cache
def is_dear(engine: str, cost: str) -> bool:
    """Whether Transformers costs more than it may; engines in pods of their own hold GPUs, too."""
    job = make_job(Story(engine, cost=cost).spec)
    run = Run(first_plan(engine, cost), job.valid_spec, Learned())
    return gpu_seconds(run.with_engine(None, None)) > MOST_COSTLY * gpu_seconds(run)


def test_the_lengths_are_on_both_sides_of_the_limit_of_cost() -> None:
    for engine in ("Auto", "Colocated"):
        assert (is_dear(engine, "cheap"), is_dear(engine, "dear")) == (False, True)


@settings(max_examples=cases(60, gate=8))
@given(
    st.sampled_from(["Auto", "Colocated", "Servers"]),
    st.sampled_from(["cheap", "dear"]),
    st.lists(ENDS, min_size=3, max_size=3),
)
def test_each_rung_is_taken_once_and_no_restart_is_counted(
    engine: str, cost: str, ends: list[tuple[str, Cause]]
) -> None:
    story = Story(engine, cost=cost)
    seen = ended(story, *ends[0])
    split = split_of(story.plan)
    samplers = ["Auto"]
    for result, cause in [*ends[1:], ("EngineFailed", None)]:
        decision = judged(seen)
        if decision.action is Action.FAIL or not planned(seen, decision).feasible:
            break
        status = committed(seen)
        assert status.plan is not None
        assert split_of(status.plan) == split
        assert (status.restarts, status.uncounted_restarts) == (0, len(samplers))
        samplers.append(status.plan.engine.model_runner if status.plan.engine else "Transformers")
        if status.plan.engine is None:
            break
        code = EXIT_CODES[Result(result)]
        dead = make_pod(0, status.attempt, terminated(code, message(result, cause)))
        after = to_json(status) | {"jobUid": f"job-{status.attempt}"}
        seen = make_seen(make_job(story.spec, after), make_child(status.attempt), dead, ago=600)
    assert samplers in (
        ["Auto"],
        ["Auto", "V1"],
        ["Auto", "V1", "Transformers"],
        ["Auto", "Transformers"],
    )


def split_of(plan: ExecutionPlan) -> tuple[Any, ...]:
    """What decides the steps and the order of the data."""
    return (
        plan.method,
        plan.zero_stage,
        plan.gpus,
        plan.micro_batch,
        plan.gradient_accumulation,
        plan.steps_per_generation,
    )


def test_a_condition_an_event_and_the_plan_say_which_rung_and_why() -> None:
    seen = ended(Story(), "EngineFailed", "NotStarted")
    status = committed(seen)
    held, reason, text = of_type(status, "EngineFallback")
    assert (held, reason) == ("True", "ModelRunnerV1")
    assert "vLLM Colocated, model runner V1 without CUDA graphs" in text
    assert "attempt 1 ended with EngineFailed: Proving: vLLM did not start: no kernel" in text
    assert of_type(status, "Degraded")[1] == "EngineFailed"
    assert status.plan is not None
    assert status.plan.changes[-1].startswith("after EngineFailed in attempt 1: the engine runs")
    told = telling_change(seen.job.status.conditions, status.conditions)
    assert told is not None
    sent = event(seen.job, told, NOW, status)
    assert (sent["type"], sent["reason"]) == ("Warning", "ModelRunnerV1")
    assert "EngineFallback=True" in sent["message"]


def test_transformers_says_so_too() -> None:
    status = committed(ended(Story(on_first_rung=True), "EngineMismatch"))
    held, reason, text = of_type(status, "EngineFallback")
    assert (held, reason) == ("True", "Transformers")
    assert text.startswith("completions are sampled by Transformers, since the engine of attempt 2")
    assert status.plan is not None
    assert "generates by Transformers instead of an engine" in status.plan.changes[-1]


def test_a_job_without_a_step_is_planned_anew_where_no_rung_fits_its_split() -> None:
    generation = {"engine": "Auto", "fallback": "Auto"}
    spec = {
        **Story().spec,
        "model": {"name": QWEN_7B, "parameters": None},
        "placement": {"accelerator": "GPU", "nodes": 1, "gpus": {"min": 4, "max": 4}},
        "reference": {"strategy": "Sharded"},
        "training": {**Story().spec["training"], "maxCompletionLength": 256},
        "generation": generation,
    }
    there = inventory(nodes(1, 4, A10G))
    typed = make_job(spec).spec
    assert typed is not None
    first = plan_job(typed, there).chosen
    assert first is not None
    assert first.engine is not None

    def answer(step: int) -> PlanResult:
        status = active_status(1, first, progress={"step": step, "totalSteps": 100})
        dead = make_pod(0, 1, terminated(52, message("EngineFailed", "NotStarted")))
        seen = make_seen(make_job(spec, status), make_child(), dead)
        job = learning(seen.job, judged(seen).learned or Learned())
        return next_plan(job, there, lambda one, known: plan_job(one, there, learned=known)).result

    bound, free = answer(12), answer(0)
    assert (bound.chosen, bound.reason) == (None, PlanReason.NO_FALLBACK)
    assert "without sleep needs" in bound.message
    if free.chosen is None:
        assert free.reason == PlanReason.NO_FALLBACK
        assert "more than 2 times" in free.message
    else:
        assert free.chosen.method == first.method
        assert free.chosen.changes[-1].startswith("after EngineFailed in attempt 1: ")


def test_the_queue_gives_a_gang_that_starts_again_its_rung() -> None:
    seen = ended(Story(), "EngineFailed")
    decision = judged(seen)
    assert decision.learned is not None
    question = CycleInput(jobs=(seen.job,), snapshot=one_node(), limits=LIMITS)
    verdict = restart(learning(seen.job, decision.learned), question)
    assert verdict.admitted, verdict.message
    assert verdict.plan is not None
    assert verdict.plan.engine is not None
    assert verdict.plan.engine.model_runner == "V1"


def one_node() -> Snapshot:
    """A cluster of one node with eight GPUs."""
    labels = {"nvidia.com/gpu.product": H100, "nvidia.com/gpu.memory": "81559"}
    ready = {"type": "Ready", "status": "True"}
    allocatable = {"nvidia.com/gpu": "8", "cpu": "128", "memory": "1024Gi"}
    node = {
        "metadata": {"name": "n", "labels": labels},
        "spec": {},
        "status": {"conditions": [ready], "allocatable": allocatable},
    }
    return Snapshot(nodes=(node_facts(node),))


def test_a_gang_that_queues_meanwhile_remembers_its_rung() -> None:
    seen = ended(Story(), "EngineFailed")
    decision = replace(judged(seen), action=Action.QUEUE, reason="WaitingForGPUs", plan=None)
    waiting = make_job(Story().spec, to_json(build_status(seen, decision)))
    answer = reuse_plan(waiting, THERE)
    assert answer is not None
    assert answer.chosen is not None
    assert answer.chosen.engine is not None
    assert answer.chosen.engine.model_runner == "V1"


def test_the_rung_is_kept_for_other_ends() -> None:
    status = committed(ended(Story(), "EngineFailed"))
    again = reuse_plan(make_job(Story().spec, to_json(status)), THERE)
    assert again is not None
    assert again.chosen == status.plan


def test_the_users_rules_come_first() -> None:
    rules: list[dict[str, Any]] = [{"action": "Fail", "onResults": ["EngineFailed"]}]
    decision = judged(ended(Story(), "EngineFailed", restarts={"rules": rules}))
    assert (decision.action, decision.learned) == (Action.FAIL, None)
    rules[0]["action"] = "Restart"
    decision = judged(ended(Story(), "EngineFailed", restarts={"rules": rules}))
    assert (decision.action, decision.counted) == (Action.ADMIT, True)
    assert decision.learned is not None


def test_a_retry_counts_anew_and_tells_when_the_first_choice_is_back() -> None:
    story = Story(on_first_rung=True)
    known = failed_once("Auto", "cheap").model_dump(mode="json", by_alias=True, exclude_none=True)
    status = active_status(2, story.plan, learned=known)
    status["conditions"] += [
        condition("Failed", reason="EngineFailed"),
        condition("EngineFallback", reason="ModelRunnerV1"),
    ]
    job = make_job({**story.spec, "retry": 1}, status)
    after = build_status(make_seen(job), judged(make_seen(job)))
    assert after.learned is not None
    assert after.learned.engine_failures == []
    retried = make_job({**story.spec, "retry": 1}, to_json(after))
    chosen = Decision(Action.COMMIT, plan=first_plan("Auto", "cheap"))
    begun = build_status(make_seen(retried), chosen)
    assert of_type(begun, "EngineFallback")[:2] == ("False", "AsExpected")


def servers_that_ended(*states: dict[str, Any]) -> Observation:
    """Rank 0 has waited in vain for engines in pods of their own, which ended so."""
    story = Story("Servers")
    job = make_job(story.spec, active_status(1, story.plan, progress={"step": 0}))
    code = EXIT_CODES[Result.RENDEZVOUS_TIMEOUT]
    waited = json.dumps({"result": "RendezvousTimeout", "message": "no engine came"})
    engines = [make_engine(0, state=state, life=f"life{at}") for at, state in enumerate(states)]
    rank0 = make_pod(0, 1, terminated(code, waited))
    return make_seen(job, make_child(), make_engines(), rank0, *engines)


def test_engines_in_pods_of_their_own_say_why_rank_0_waited_in_vain() -> None:
    failed = terminated(EXIT_CODES[Result.ENGINE_FAILED], message("EngineFailed", "NotStarted"))
    decision = judged(servers_that_ended(failed, terminated(143)))
    assert (decision.action, decision.reason) == (Action.ADMIT, "EngineFailed")
    assert decision.learned is not None
    assert decision.learned.engine_failures[-1].rung == "ModelRunnerV1"
    silent = judged(servers_that_ended(terminated(137, reason="OOMKilled")))
    assert (silent.reason, silent.learned) == ("RendezvousTimeout", None)
    assert silent.counted


@pytest.mark.parametrize("cause", ["nonsense", 7, None])
def test_a_cause_that_can_not_be_believed_is_taken_for_a_failed_start(cause: Any) -> None:
    decision = judged(ended(Story(), "EngineFailed", cause))
    assert decision.learned is not None
    assert decision.learned.engine_failures[-1].rung == "ModelRunnerV1"


def test_on_cpus_transformers_follows_at_once() -> None:
    story = Story("Colocated")
    spec = {**story.spec, "placement": {"accelerator": "CPU", "nodes": 1}}
    job = make_job({k: v for k, v in spec.items() if k != "model"})
    plan = plan_job(job.valid_spec, inventory()).chosen
    assert plan is not None

    def answer(result: str, cause: Cause = None) -> Decision:
        dead = make_pod(0, 1, terminated(EXIT_CODES[Result(result)], message(result, cause)))
        record: GRPOJobRecord = make_job(
            {k: v for k, v in spec.items() if k != "model"}, active_status(1, plan)
        )
        return judged(make_seen(record, make_child(), dead))

    ends: list[tuple[str, Cause]] = [("EngineMismatch", None), ("EngineFailed", "NotStarted")]
    for result, cause in ends:
        decision = answer(result, cause)
        assert (decision.action, decision.counted) == (Action.ADMIT, False)
        assert decision.learned is not None
        assert decision.learned.rung == "Transformers"
        record = make_job({k: v for k, v in spec.items() if k != "model"}, active_status(1, plan))
        again = reuse_plan(learning(record, decision.learned), inventory())
        assert again is not None
        assert again.chosen is not None, again.message
        assert again.chosen.engine is None
        assert "generates by Transformers" in again.chosen.reason
        assert "CPUs" in again.chosen.reason
