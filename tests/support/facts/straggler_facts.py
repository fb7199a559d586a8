"""Runs in which one rank computes at half the speed of the others, and what rank 0 finds of it.

A decoder layer of the demo model takes a millisecond, and the ranks share the cores of this
machine. So its work is made longer by a wait, in which it needs no core. Runs on every rank of a
gang.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from grpo_api.spec.checkpoint import SamplesSpec
from grpo_trainer.gang import ranks
from grpo_trainer.gang.placement import Placement
from grpo_trainer.history.run_history import RunHistory
from grpo_trainer.process.preemption import Preemption
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.process.watchdog import Watchdog
from grpo_trainer.rewards.reward_set import FailureLimits
from grpo_trainer.telemetry.compute_timer import ComputeTimer, decoder_layers
from grpo_trainer.telemetry.observer import PublishLogs
from grpo_trainer.telemetry.step_exchange import StepExchange

from ..ranks import runs
from .fault_facts import STAGES
from .step_facts import saved_model

STEPS = 20
SLOW_RANK = 1
LAYER_SECONDS = 0.05
"""Time of a layer on a healthy rank, twice as long on the slow one."""


def slowed(folder: Path, parallelisms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By parallelism: what rank 0 finds in the last of 20 steps, the first step at which it does,
    and the ranks' own seconds by measured step."""
    model = saved_model(folder)
    facts: dict[str, dict[str, Any]] = {}
    for parallelism in parallelisms:
        runs.reset()
        facts[parallelism] = _slowed_run(model, parallelism)
    runs.reset()
    return facts


def _slowed_run(model: Path, parallelism: str) -> dict[str, Any]:
    stage, strategy = STAGES[parallelism]
    world_size = ranks.world_size()
    training = {"maxSteps": STEPS}
    job = runs.plan(model, strategy, stage, world_size, training=training)
    logs = runs.Logs()
    trainer = runs.build(job, logs, output_dir=str(model.parent / "output"), save_strategy="no")
    place = Placement(0, ranks.rank(), world_size, 1)
    recorder = Recorder(job.job.attempt, place, time.time())
    watchdog = Watchdog(
        job.guard, job.execution, job.grace_period_seconds, recorder, lambda *_: None
    )
    preemption = Preemption(job.grace_period_seconds, can_save=False)
    limits = FailureLimits({}, {})
    trainer.add_callback(StepExchange(recorder, watchdog, trainer.observer, preemption, limits))
    trainer.add_callback(PublishLogs(recorder, RunHistory(None, 1, SamplesSpec())))
    first_found = FirstFound(recorder)
    trainer.add_callback(first_found)
    seconds = LAYER_SECONDS * (2 if ranks.rank() == SLOW_RANK else 1)
    for layer in decoder_layers(trainer.model):
        _lengthen(layer, seconds, trainer.observer.compute)
    os.environ |= {"POD_NAME": f"pod-{ranks.rank()}", "NODE_NAME": f"node-{ranks.rank()}"}
    trainer.train()
    findings = [finding for finding in recorder.progress.findings if finding.finding == "Straggler"]
    return {
        "found": [finding.model_dump(mode="json") for finding in findings],
        "step": first_found.step,
        "rank_seconds": {
            step: row["rank_seconds"] for step, row in logs.rows.items() if "rank_seconds" in row
        },
        "ratio": recorder.progress.metrics.get("straggler_ratio"),
    }


class FirstFound(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Keeps the first step at which a straggler was found."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.step: int | None = None

    def on_log(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Look at the findings of this step."""
        names = {finding.finding for finding in self._recorder.progress.findings}
        if self.step is None and "Straggler" in names:
            self.step = state.global_step


def _lengthen(layer: nn.Module, seconds: float, timer: ComputeTimer) -> None:
    """Let a layer take so long in the training passes of measured steps; in others it would only
    cost the test time."""
    forward = layer.forward
    patched: Any = layer

    def longer_forward(*args: Any, **kwargs: Any) -> Any:
        if timer.is_on and torch.is_grad_enabled():
            time.sleep(seconds)
        return forward(*args, **kwargs)

    patched.forward = longer_forward
