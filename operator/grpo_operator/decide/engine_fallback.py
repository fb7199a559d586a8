"""What follows when an attempt's engine failed: the next rung of spec.generation.fallback, or none.

An engine that did not start, or that computes other numbers than the trainer, would fail again with
the same plan. So the next attempt has another engine. A rung is no counted restart: it happens once
per job, and the rungs are two. Which rung fits, and what it costs, the planner says
(grpo_planner/replan/engine_fallback.py).
"""

from dataclasses import replace

from grpo_api.plan.learned import MAX_ENGINE_FAILURES, EngineFailure, Rung
from grpo_api.report.report import Outcome, Result
from grpo_planner.replan.engine_fallback import gpu_seconds
from grpo_planner.replan.past_run import Run
from grpo_planner.result.result import SpecRejected

from .decisions import Action, Decision
from .observation import Observation
from .oom_feedback import learned_with_progress

_WITH_ANY_ENGINE = ("Missing", "Unprovable")
"""Causes that every vLLM of this image and this model has."""


def rung_after(observation: Observation, outcome: Outcome) -> Rung | None:
    """The rung that answers the end of the current attempt; None where none does.

    On CPUs vLLM runs as on the first rung anyway, so Transformers follows at once.
    """
    spec, plan = observation.job.spec, observation.job.status.plan
    if spec is None or plan is None or plan.engine is None:
        return None
    if outcome.result not in (Result.ENGINE_FAILED, Result.ENGINE_MISMATCH):
        return None
    if spec.generation.fallback == "Never":
        return None
    is_on_first_rung = plan.engine.model_runner == "V1" or plan.accelerator == "CPU"
    if not is_on_first_rung and outcome.engine_cause not in _WITH_ANY_ENGINE:
        return "ModelRunnerV1"
    return "Transformers"


def has_failed_for_good(observation: Observation, outcome: Outcome) -> bool:
    """True if the engine did not start, no rung answers it, and a restart would end the same way.

    Without a rung the first failure to start may be the machine's, so that it is a counted restart.
    """
    if outcome.result is not Result.ENGINE_FAILED or rung_after(observation, outcome):
        return False
    plan = observation.job.status.plan
    was_on_first_rung = bool(plan and plan.engine and plan.engine.model_runner == "V1")
    return was_on_first_rung or outcome.engine_cause in _WITH_ANY_ENGINE


def record_engine_failure(
    observation: Observation, outcome: Outcome, decision: Decision
) -> Decision:
    """The decision on an end of an engine, with the rung that the next attempt begins at."""
    rung = rung_after(observation, outcome)
    if decision.action is not Action.ADMIT or rung is None:
        return decision
    learned = learned_with_progress(observation)
    failure = EngineFailure.model_validate(
        {
            "attempt": observation.job.status.attempt,
            "reason": outcome.result,
            "message": outcome.message[:512],
            "rung": rung,
            "gpu_seconds": _gpu_seconds(observation),
        }
    )
    failures = [*learned.engine_failures, failure][-MAX_ENGINE_FAILURES:]
    return replace(decision, learned=learned.model_copy(update={"engine_failures": failures}))


def _gpu_seconds(observation: Observation) -> float | None:
    """Predicted GPU-seconds of a step by the current plan; None if they are unknown."""
    job = observation.job
    if job.spec is None or job.status.plan is None:
        return None
    try:
        seconds = gpu_seconds(Run(job.status.plan, job.spec, learned_with_progress(observation)))
    except SpecRejected:
        return None
    return round(seconds, 3)


def outcome_of_engines(observation: Observation) -> Outcome | None:
    """Why engines in pods of their own failed to start, as the first of them reports; else None."""
    for pod in observation.engine_pods:
        end = pod.termination
        if end and end.reported and end.outcome.result is Result.ENGINE_FAILED:
            return end.outcome
    return None
