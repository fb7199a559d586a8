"""What rank 0 exports beside all else where two engines in pods of their own sample the
completions."""

from grpo_api.report import metrics as vllm
from grpo_api.report import training_metrics as trainer
from grpo_api.report.metrics import Metric

from ..timelines import Timeline, constant, noisy, running_total, series
from .job_series import counted_series
from .world import World, histogram, rank0

ENGINES = ("0", "1")
_FIRST = 1e9
"""Number of the first attempt's first weights."""
SAMPLED = noisy(constant(9.0), 0.08, 40)
"""Seconds of a step's generation, where the policy by itself takes 29."""


def version(minute: int) -> float:
    """The newest weights' number: a sync before each step."""
    return _FIRST + 1 + minute


_OF_ALL: dict[Metric, Timeline] = {
    trainer.ENGINE_MISMATCH: noisy(constant(0.012), 0.2, 31),
    trainer.ENGINE_MISMATCH_MAX: noisy(constant(0.31), 0.3, 32),
    trainer.MAX_ENGINE_MISMATCH: constant(0.5),
    trainer.WEIGHTS_VERSION: version,
    trainer.WEIGHT_SYNC_SECONDS: noisy(constant(0.7), 0.1, 33),
    trainer.WEIGHT_PROOF_SECONDS: noisy(constant(0.03), 0.1, 34),
    trainer.ENGINE_PROOF_FAILURES: constant(0.0),
}


def sampling(generate: Timeline = SAMPLED) -> dict[str, Timeline]:
    """Seconds of the parts of a step that engines change."""
    return {"sync": noisy(constant(0.8), 0.08, 40), "generate": generate}


def _of_each(seed: int) -> dict[Metric, Timeline]:
    return {
        trainer.ENGINE_UP: constant(1.0),
        trainer.ENGINE_VERSION: version,
        trainer.ENGINE_WAITING: noisy(constant(12.0), 0.8, seed),
        trainer.ENGINE_CACHE: noisy(constant(0.55), 0.2, seed + 1),
        trainer.ENGINE_TOKENS: noisy(constant(6400.0), 0.05, seed + 2),
        trainer.ENGINE_LOSSES: constant(0.0),
    }


def vllm_series(engine: str) -> World:
    """What an engine pod exports of vLLM."""
    seed = 70 + 10 * int(engine)
    labels = {
        "namespace": "team",
        "grpojob": "run",
        "attempt": "1",
        "pod": f"run-1-engine-{engine}",
        "engine": engine,
    }
    tokens = running_total(noisy(constant(384_000.0 / 2), 0.05, seed))
    prompts = running_total(noisy(constant(96_000.0), 0.05, seed + 1))
    lines: dict[Metric, Timeline] = {
        vllm.RUNNING: noisy(constant(96.0), 0.4, seed + 2),
        vllm.WAITING: noisy(constant(12.0), 0.8, seed + 3),
        vllm.CACHE_USAGE: noisy(constant(0.55), 0.2, seed + 4),
        vllm.PREEMPTIONS: constant(0.0),
        vllm.GENERATION_TOKENS: tokens,
        vllm.PROMPT_TOKENS: prompts,
        vllm.PREFIX_QUERIES: prompts,
        vllm.PREFIX_HITS: lambda minute: 0.8 * (prompts(minute) or 0.0),
    }
    world: World = {series(metric.name, labels): line for metric, line in lines.items()}
    requests = running_total(constant(64.0))
    return {
        **world,
        **histogram(vllm.TIME_TO_FIRST_TOKEN, requests, {0.1: 0.4, 0.5: 0.9, 2.5: 1.0}, **labels),
        **histogram(vllm.REQUEST_SECONDS, requests, {2.5: 0.3, 10.0: 0.97, 30.0: 1.0}, **labels),
    }


def _with_engines() -> World:
    world: dict[str, Timeline] = {rank0(metric): line for metric, line in _OF_ALL.items()}
    world[rank0("importance_ratio_min")] = noisy(constant(0.91), 0.05, 38)
    world[rank0("importance_ratio_max")] = noisy(constant(1.1), 0.05, 39)
    world |= counted_series(sampling())
    for engine in ENGINES:
        world |= {
            rank0(metric, engine=engine): line
            for metric, line in _of_each(50 + int(engine)).items()
        }
        world |= vllm_series(engine)
    return world


WITH_ENGINES: World = _with_engines()
