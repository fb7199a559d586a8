"""What our trainer costs on top of TRL: CPU seconds per step of bare TRL against ours, same settings, same model.

Exists because proofs, telemetry and the exchange of the ranks may cost 1 % of a step and no more. Run by hand:

    python -m benchmarks.trainer_overhead [--pairs 5] [--steps 12]

Each pair runs both in processes of their own, in turns first; the first step (warm-up) is left out. Bare TRL is
trl.GRPOTrainer with the same GRPOConfig and an equal reward function; ours is everything that a pod runs, but for
the rendezvous: server, watchdog, pulse, telemetry, samples, seals. Prints every pair and the median ratio; exits 1
above 1.01.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from grpo_api.contract import DATA_MOUNT_ENV, PROGRESS_BIND_ENV
from grpo_api.plan import TrainingPlan
from tests.trainer.gang import run_gang
from tests.trainer.pods import free_port

LIMIT = 1.01
PATTERN = "[^0-9]*[0-9][\\s\\S]*"


class Steps(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """CPU seconds of this process, all its threads, at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """One more step."""
        self.ends.append(time.process_time())

    def per_step(self) -> float:
        """Mean CPU seconds of a step after the first."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def save_model(folder: Path) -> Path:
    """A random model of about two million parameters: its steps are long enough for 1 % of them to be seen."""
    from transformers import Qwen2ForCausalLM, set_seed

    from tests.trainer import demo_model
    from tests.trainer.tiny_tokenizer import tiny_tokenizer

    settings = demo_model.config()
    settings.update({"hidden_size": 256, "intermediate_size": 1024})
    set_seed(0)
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_plan(folder: Path, steps: int) -> TrainingPlan:
    """One process, Clone, 16 completions of 64 tokens a step, no checkpoint but the last."""
    from tests.trainer import runs

    training = {"maxSteps": steps, "maxCompletionLength": 64, "promptsPerStep": 4}
    execution = {"microBatch": 16, "saveEverySteps": steps}
    plan = runs.plan(folder / "model", training=training, execution=execution).model_dump(by_alias=True)
    plan["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan["rewards"] = [{"format": {"pattern": PATTERN}}]
    return TrainingPlan.model_validate(plan)


def bare(folder: Path, steps: int) -> float:
    """CPU seconds per step of TRL alone."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_trainer.settings import config_arguments
    from tests.trainer import runs
    from tests.trainer.tiny_tokenizer import tiny_tokenizer

    plan, counter = make_plan(folder, steps), Steps()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=tiny_tokenizer(),
        args=GRPOConfig(**config_arguments(plan)),
        reward_funcs=[matches],
        train_dataset=Dataset.from_list(runs.PROMPTS),
        callbacks=[counter],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return counter.per_step()


def matches(completions: list[str], **_: Any) -> list[float]:
    """The format reward as a user of bare TRL writes it."""
    import re

    return [float(re.fullmatch(PATTERN, completion) is not None) for completion in completions]


def ours(folder: Path, steps: int) -> float:
    """CPU seconds per step of everything that a pod runs, served and watched."""
    from grpo_trainer.building import build
    from grpo_trainer.placement import Placement
    from grpo_trainer.recorder import Recorder
    from grpo_trainer.server import serve
    from grpo_trainer.watchdog import Watchdog

    os.environ |= {DATA_MOUNT_ENV: str(folder), PROGRESS_BIND_ENV: f"127.0.0.1:{free_port()}"}
    plan, counter = make_plan(folder, steps), Steps()
    recorder = Recorder(plan, Placement(0, 0, 1, 1), time.time())
    serve(recorder)
    watchdog = Watchdog(plan, recorder, lambda _: None)
    watchdog.start()
    run = build(plan, recorder, watchdog)
    run.trainer.add_callback(counter)
    run.trainer.train()
    return counter.per_step()


def measure(folder: Path, which: str, steps: int) -> dict[str, float]:
    """One run in a process of its own (tests/trainer/gang.py)."""
    return {"seconds": {"bare": bare, "ours": ours}[which](folder.parent, steps)}


def pair(folder: Path, number: int, steps: int) -> dict[str, float]:
    """Both, in turns first."""
    order = ["bare", "ours"] if number % 2 else ["ours", "bare"]
    return {
        which: run_gang("benchmarks.trainer_overhead:measure", folder / which, which=which, world_size=1, steps=steps)[
            0
        ]["seconds"]
        for which in order
    }


def main() -> int:
    """Measure and print; 1 if ours costs more than the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as temporary:
        save_model(Path(temporary) / "model")
        rows = "".join(json.dumps({"prompt": f"say {number % 10}"}) + "\n" for number in range(64))
        (Path(temporary) / "problems.jsonl").write_text(rows)
        for number in range(options.pairs):
            pairs.append(pair(Path(temporary), number, options.steps))
            print(json.dumps(pairs[-1] | {"ratio": pairs[-1]["ours"] / pairs[-1]["bare"]}), flush=True)
    ratio = statistics.median(measured["ours"] / measured["bare"] for measured in pairs)
    print(f"median of {len(pairs)} pairs: {ratio:.4f} times TRL's CPU seconds per step (limit {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
