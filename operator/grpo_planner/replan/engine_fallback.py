"""What samples the completions after an engine failed: the rungs of spec.generation.fallback.

The split of the batch stays as it is, so that every checkpoint can be continued. The failed
generation begins again with the same prompts. The first rung is the same engine with model runner
V1, without CUDA graphs and without sleep. It takes more of the GPU while the policy is trained. The
second rung is Transformers: it can't fail as an engine does, but it may take many times as long, so
it has a limit.
"""

from collections.abc import Iterator
from dataclasses import replace

from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.generation import TENSOR_PARALLEL, EnginePlan

from ..memory.setup import Engine
from ..result.formatting import distinct_gib, plan_name
from ..search.engine_plan import settings
from ..search.engines import engine_of, is_splittable
from .oom_replan import engine_differences
from .past_run import Run

MOST_COSTLY = 2.0
"""How many times the GPU-seconds of the plan that failed first Transformers may take per step."""


class NoFallback(ValueError):
    """No rung is left for the job; the message says why not each of them."""

    def __init__(self, message: str, *, fits: bool) -> None:
        """`fits`: a rung fits, but may not be taken."""
        super().__init__(message)
        self.fits = fits


def gpu_seconds(run: Run) -> float:
    """Predicted GPU-seconds of a step, those of engines in pods of their own among them; 0 on
    CPUs."""
    if run.plan.accelerator == "CPU":
        return 0.0
    return run.step_seconds * run.plan.all_gpus


def fallback_plan(run: Run) -> ExecutionPlan:
    """The plan that answers the last of `run.learned.engine_failures`; run.plan is the one that
    failed.

    Raises:
        NoFallback: no rung fits, or it costs too much.
    """
    with_engine, problem = _fastest_on_model_runner_v1(run)
    if with_engine and run.spec.generation.engine != "Auto":
        return _plan_with_reason(run, with_engine)
    plain = run.with_engine(None, None)
    misfit = "" if plain.may_fit() else _misfit_message("Transformers", plain)
    refusal = misfit or costly_message(run.learned, gpu_seconds(plain))
    # Where few completions fit at a time beside the trainer, an engine may be slower than none.
    if with_engine and (refusal or with_engine.step_seconds < plain.step_seconds):
        return _plan_with_reason(run, with_engine)
    if refusal:
        raise NoFallback(f"{problem}{refusal}", fits=not misfit)
    return _plan_with_reason(run, plain)


def costly_message(learned: Learned, cost: float | None) -> str:
    """Why Transformers may not take the place of the engine that failed first; empty where it may.

    `cost`: predicted GPU-seconds of a step with Transformers; None if they are unknown.
    """
    with_engine = learned.engine_failures[0].gpu_seconds
    if cost is None or with_engine is None:
        return "nobody knows what a step with Transformers takes"
    if cost <= MOST_COSTLY * with_engine:
        return ""
    return (
        f"Transformers would take {cost:.1f} GPU-seconds per step, more than {MOST_COSTLY:g} times "
        f"the {with_engine:.1f} with vLLM: set spec.generation.engine to Transformers to accept it"
    )


def _fastest_on_model_runner_v1(run: Run) -> tuple[Run | None, str]:
    """The split with the engine on the first rung; None and why where that does not fit, or is not
    asked for."""
    if run.learned.rung != "ModelRunnerV1":
        return None, ""
    candidates = list(_on_model_runner_v1(run))
    fitting = [candidate for candidate in candidates if candidate.may_fit()]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_seconds), ""
    return None, f"{_misfit_message('model runner V1 without sleep', candidates[-1])}; "


def _on_model_runner_v1(run: Run) -> Iterator[Run]:
    """The split with the engine on the first rung: on as many GPUs each as before, and on more."""
    engine = run.plan.engine
    assert engine is not None, "one has failed"
    if engine.kind == "Servers":
        # They have their GPUs for themselves, so what they take stays.
        slower = engine.model_copy(update={"model_runner": "V1"})
        graphs = settings(run.demand, run.with_plan(engine=slower).setup)["graphs_bytes"]
        yield run.with_published_engine(slower.model_copy(update={"graphs_bytes": graphs}))
        return
    pinned = run.spec.generation.tensor_parallel
    for gpus in [pinned] if pinned else TENSOR_PARALLEL:
        if gpus < engine.tensor_parallel or run.plan.gpus_per_node % gpus:
            continue
        if is_splittable(run.demand, gpus):
            yield run.with_engine(_colocated_v1(run, engine, gpus), None)


def _colocated_v1(run: Run, engine: EnginePlan, gpus: int) -> Engine:
    share = int((run.spec.generation.memory_share or 0) * run.usable_bytes)
    v1_engine = engine_of(run.demand, engine.kind, gpus, share=share, model_runner="V1")
    # A pinned share has room for what the plan sampled at a time before, and maybe for no more.
    return replace(v1_engine, most_sequences=engine.max_sequences) if share else v1_engine


def _misfit_message(what: str, run: Run) -> str:
    need, usable = distinct_gib(run.device_bytes, run.usable_bytes)
    return f"{what} needs {need} of {usable} per GPU at {run.prediction.peak_phase}"


def change_message(learned: Learned, before: ExecutionPlan, after: ExecutionPlan) -> str:
    """What another plan changes because an engine failed, in words."""
    failure = learned.engine_failures[-1]
    differences = "; ".join(engine_differences(before.engine, after.engine))
    return f"after {failure.reason} in attempt {failure.attempt}: {differences}"


def _plan_with_reason(before: Run, after: Run) -> ExecutionPlan:
    """The new plan with its reason, and with what changed in words."""
    plan = after.plan
    change = change_message(before.learned, before.plan, plan)
    reason = f"{plan_name(plan)}, {change}"
    if plan.memory:
        reason = f"{reason}: {after.needs_message}"
    changes = [*plan.changes, change]
    return plan.model_copy(update={"changes": changes[-16:], "reason": reason[:1024]})
