"""Panels on a job's engines: whether they have its weights, compute as the trainer does, and keep
up with it."""

from dataclasses import replace

from grpo_api.report import training_metrics as trainer

from .panels import Panel, Query
from .promql import JOB, largest, of_job, of_job_by, select

_UP = of_job_by("engine", trainer.ENGINE_UP)
_BEHIND = f"{of_job(trainer.WEIGHTS_VERSION)} - min({select(trainer.ENGINE_VERSION, JOB)})"

_PANELS = (
    Panel(
        title="Sampling logp difference",
        description=(
            "TRL's `sampling/sampling_logp_difference`: between the log-probabilities of engine "
            "and trainer for the last generation's tokens, in nats. The weights are proven to be "
            "the same, so a rise says that the engine computes otherwise: another dtype, another "
            "kernel."
        ),
        queries=(
            Query(of_job(trainer.ENGINE_MISMATCH), "mean"),
            Query(of_job(trainer.ENGINE_MISMATCH_MAX), "max"),
            Query(
                of_job(trainer.MAX_ENGINE_MISMATCH),
                "guard.maxEngineMismatch, for the mean",
                "limit",
            ),
        ),
    ),
    Panel(
        title="Importance sampling ratio",
        description=(
            "TRL's `sampling/importance_sampling_ratio`, which corrects for that difference, the "
            "least and the largest of a generation. 1 is no correction."
        ),
        queries=(
            Query(of_job("importance_ratio_min"), "min"),
            Query(of_job("importance_ratio_max"), "max"),
        ),
    ),
    Panel(
        title="Sync of the weights, and its proof",
        description=(
            "Seconds of the last one; no completion is sampled meanwhile. Its part of a "
            "step is above."
        ),
        unit="s",
        queries=(
            Query(of_job(trainer.WEIGHT_SYNC_SECONDS), "sync"),
            Query(of_job(trainer.WEIGHT_PROOF_SECONDS), "proof"),
        ),
        stacked=True,
    ),
    Panel(
        title="Engines that serve",
        description=(
            "With the newest weights, proven. The others are started again; the run goes "
            "on while one serves."
        ),
        unit="short",
        queries=(Query(f"sum({_UP})", "serve"), Query(f"count({_UP})", "all", "limit")),
    ),
    Panel(
        title="Syncs that the last engine lacks",
        description=(
            "How far the engine furthest behind is from the newest weights; it gets no "
            "prompts meanwhile."
        ),
        unit="short",
        queries=(Query(_BEHIND, "behind"),),
        bounds=((3, "orange"),),
        reach=4,
    ),
    Panel(
        title="Proofs that failed, engines given up",
        description=(
            "Counted in this attempt. A failed proof is sent again once; look at the logs "
            "of rank 0 for names."
        ),
        unit="short",
        queries=(
            Query(of_job(trainer.ENGINE_PROOF_FAILURES), "proofs that failed"),
            Query(f"sum({of_job_by('engine', trainer.ENGINE_LOSSES)})", "engines given up"),
        ),
        bounds=((1, "orange"),),
        reach=2,
    ),
    Panel(
        title="Tokens per second of an engine",
        description=(
            "What each sampled in the last generation, the twelve fastest. A slow one "
            "holds up the step."
        ),
        unit="short",
        queries=(Query(largest("engine", trainer.ENGINE_TOKENS), "engine {{engine}}"),),
    ),
    Panel(
        title="Prompts that wait in engine pods",
        description=(
            "Prompts that wait in engines, the twelve longest queues. If some always wait, more engines would make "
            "steps shorter."
        ),
        unit="short",
        queries=(Query(largest("engine", trainer.ENGINE_WAITING), "engine {{engine}}"),),
    ),
    Panel(
        title="KV cache of engine pods",
        description=(
            "Of each engine, the twelve fullest. A full one interrupts completions and "
            "begins them again."
        ),
        unit="percentunit",
        queries=(Query(largest("engine", trainer.ENGINE_CACHE), "engine {{engine}}"),),
        bounds=((0.95, "orange"),),
        reach=1,
    ),
)
PANELS = tuple(replace(panel, empty="No engine reported") for panel in _PANELS)
