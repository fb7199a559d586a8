"""Compares our trainer with bare TRL: CPU and wall seconds per step of bare TRL against ours, and
telemetry's share.

Proofs, telemetry and the exchange of the ranks may cost 1 % of a step and no more. Both run in one
process and take their steps in turns (turns.py). In four minutes:

    python -m benchmarks trainer_overhead [--processes 8] [--steps 16] [--write]

Bare TRL is trl.GRPOTrainer with the same GRPOConfig and an equal reward function; ours is
everything that a pod runs, but for the rendezvous: server, watchdog, step exchange, telemetry,
samples, seals. Both must log the same rewards. Prints every process with `steps` steps of each and
the medians; exits 1 above the limits.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import STRATEGIES
from benchmarks.turns import Meter, asked, measure_all, median_ratio, seconds_of, take_turns, tell
from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.contract import DATA_MOUNT_ENV, PROGRESS_BIND_ENV
from harness.controlplane import free_port

MODULE = "benchmarks.trainer_overhead"
LIMIT, TELEMETRY_LIMIT = 1.01, 0.005
PATTERN = "[^0-9]*[0-9][\\s\\S]*"


def make_plan(folder: Path, steps: int) -> TrainingPlan:
    """One process, Clone, 16 completions of 64 tokens a step."""
    from tests.support.ranks import runs

    training = {"maxSteps": steps, "maxCompletionLength": 64, "promptsPerStep": 4}
    execution = {"microBatch": 16, "saveEverySteps": steps}
    plan = runs.plan(folder / "model", training=training, execution=execution).model_dump(
        by_alias=True
    )
    plan["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan["rewards"] = [{"format": {"pattern": PATTERN}}]
    return TrainingPlan.model_validate(plan)


def bare(folder: Path, plan: TrainingPlan, whole: Any) -> Any:
    """TRL alone, with the other trainer's prompts and tokenizer."""
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_trainer.training.trl_config import config_arguments

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=whole.processing_class,
        args=GRPOConfig(**config_arguments(plan)),
        reward_funcs=[matches],
        train_dataset=whole.train_dataset,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def matches(completions: list[str], **_: Any) -> list[float]:
    """The format reward as a user of bare TRL writes it."""
    import re

    return [float(re.fullmatch(PATTERN, completion) is not None) for completion in completions]


def ours(folder: Path, plan: TrainingPlan, meter: Meter) -> Any:
    """Everything that a pod runs, served and watched; the meter runs in telemetry."""
    from grpo_trainer.gang.placement import Placement
    from grpo_trainer.process.recorder import Recorder
    from grpo_trainer.process.watchdog import Watchdog
    from grpo_trainer.telemetry.observer import KeepSamples, PublishLogs, StepObserver
    from grpo_trainer.telemetry.progress_server import limits_of, serve
    from grpo_trainer.telemetry.step_exchange import StepExchange
    from grpo_trainer.training.build_run import build

    os.environ |= {DATA_MOUNT_ENV: str(folder), PROGRESS_BIND_ENV: f"127.0.0.1:{free_port()}"}
    recorder = Recorder(plan.job.attempt, Placement(0, 0, 1, 1), time.time())
    serve(limits_of(plan), recorder)
    watchdog = Watchdog(
        plan.guard, plan.execution, plan.grace_period_seconds, recorder, lambda *_: None
    )
    watchdog.start()
    trainer = build(plan, recorder, watchdog, StepObserver()).trainer
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, StepExchange | PublishLogs | KeepSamples):
            meter.watch(
                callback, "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"
            )
    meter.watch(trainer.observer, "take_generation")
    meter.watch(trainer.observer.clock, trainer.observer.clock.enter.__name__)
    return trainer


def measure(folder: Path, steps: int, bare_first: bool) -> dict[str, Any]:
    """Seconds of every step of both but the first and last, and telemetry's, in a process of its
    own."""
    plan, meter = make_plan(folder, steps), Meter()
    whole = ours(folder, plan, meter)
    turns = take_turns({"bare": bare(folder, plan, whole), "ours": whole}, bare_first)
    logged = [turn.rewards for turn in turns.values()]
    assert logged[0] == logged[1], f"they must do the same work: {logged}"
    return seconds_of(turns) | {"telemetry": meter.seconds / sum(turns["ours"].cpu)}


def main() -> int:
    """Measure, print, write; 1 if ours costs more than the limit."""
    options = asked(__doc__, STRATEGIES, processes=8)
    measured = measure_all(f"{MODULE}:measure", options)
    cpu, wall = median_ratio(measured, "cpu"), median_ratio(measured, "wall")
    telemetry = statistics.median(one["telemetry"] for one in measured)
    tell(
        options,
        STRATEGIES,
        measured,
        f"CPU {cpu:.4f}, wall {wall:.4f} (limit {LIMIT}). "
        f"Telemetry's share of a step: {telemetry:.2%} (limit {TELEMETRY_LIMIT:.1%}).",
    )
    return int(cpu > LIMIT or telemetry > TELEMETRY_LIMIT)
