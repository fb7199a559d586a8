"""Engines beside the policy: do they train on this device, with proven weights, and what do sync, proof and sleep take.

What no CPU shows: sleep and waking, CUDA graphs, the cache's size, the hash's kernel, and how much faster a step is.
"""

import time
from importlib.util import find_spec
from typing import Any

from transformers import TrainerCallback

from grpo_api.report.training_metrics import ENGINE_MISMATCH

from ..errors import classify
from ..generation.base import EngineGeneration
from . import attempts
from .attempts import finite
from .findings import Context, Finding, judged, not_run
from .plans import make_plan, middling_model

ENGINE = {"kind": "Colocated", "memoryShare": 0.2, "cacheBytes": 2**27, "maxModelLength": 128, "maxSequences": 8}
CELLS: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "float32": ("Clone", 0, {}, False),
    "bfloat16": ("Clone", 0, {"dtype": "bfloat16"}, False),
    "bfloat16, sleep": ("Clone", 0, {"dtype": "bfloat16"}, True),
    "bfloat16, LoRA, ZeRO-3": ("Adapter", 3, {"dtype": "bfloat16"}, False),
}
"""Strategy, ZeRO stage, settings and sleep by the row's name."""
LENGTH = 64
LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference of log-probabilities between engine and trainer, in nats."""


class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Keeps each step's time and the engine's mismatch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mismatch = 0.0
        self._begin = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins with its generation."""
        self._begin = time.perf_counter()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """It ends with its log."""
        if "loss" in (logs or {}) and logs:
            self.seconds.append(time.perf_counter() - self._begin)
            self.mismatch = max(self.mismatch, logs.get(ENGINE_MISMATCH.trl, 0.0))


def train(context: Context) -> list[Finding]:
    """Every cell, and the time of a step without an engine; one that fails keeps no other from being tried."""
    if find_spec("vllm") is None:
        return [not_run("engine", "vLLM is not installed")]
    plain, _ = _run(context, "Clone", 0, {"dtype": "bfloat16"})
    return [_trained(context, name, plain.seconds[-1]) for name in CELLS]


def _run(context: Context, strategy: str, stage: int, execution: dict[str, Any]) -> tuple[Watch, attempts.Ran]:
    watch = Watch()
    training = {"maxCompletionLength": LENGTH}
    plan = make_plan(context, strategy, stage, model=middling_model(context), training=training, execution=execution)
    return watch, attempts.run(context, plan, lambda trainer: trainer.add_callback(watch))


def _trained(context: Context, name: str, plain: float) -> Finding:
    strategy, stage, settings, sleep = CELLS[name]
    try:
        watch, ran = _run(context, strategy, stage, settings | {"engine": ENGINE | {"sleep": sleep}})
    except Exception as error:  # whatever it is, it is what the row has to say, and the next cell is another trainer
        result, message = classify(error)
        return judged(f"engine, {name}", [f"{result}: {message[:400]}"], "")
    engine = ran.trainer.engine
    assert isinstance(engine, EngineGeneration)
    limit = LIMITS[name.partition(",")[0]]
    problems = finite(ran.steps)
    problems += [] if watch.mismatch <= limit else [f"engine and trainer are {watch.mismatch:.3g} nats apart"]
    problems += [f"{engine.failures} proofs failed"] if engine.failures else []
    numbers: dict[str, float | str] = {
        "mismatch": watch.mismatch,
        "sync": engine.sync_seconds,
        "proof": engine.proof_seconds,
        "step": watch.seconds[-1],
        "step_without": plain,
    }
    seen = f"{len(ran.steps)} steps; proof is {engine.proof_seconds / max(engine.sync_seconds, 1e-9):.1%} of the sync"
    return judged(f"engine, {name}", problems, seen, numbers)
