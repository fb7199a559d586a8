"""What our trainer costs on top of TRL: CPU and wall seconds per step of bare TRL against ours, and telemetry's share.

Proofs, telemetry and the exchange of the ranks may cost 1 % of a step and no more, which is less than a shared
machine's noise from one minute to the next. So both run in one process and take their steps in turns: whatever
slows one down slows the other down too. What stays for a process's life, such as where its memory lies, moves the ratio
by 1 % as well, so several processes are measured, and the two are built in turns first. In four minutes:

    python -m benchmarks.trainer_overhead [--processes 8] [--steps 16] [--write]

Bare TRL is trl.GRPOTrainer with the same GRPOConfig and an equal reward function; ours is everything that a pod runs,
but for the rendezvous: server, watchdog, step exchange, telemetry, samples, seals. Both must log the same rewards.
Prints every process with `steps` steps of each and the medians; exits 1 above the limits.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from threading import Barrier, Semaphore
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.pages import STRATEGIES, replace_section, table
from grpo_api.contract import DATA_MOUNT_ENV, PROGRESS_BIND_ENV
from grpo_api.plan import TrainingPlan
from harness.ranks.gang import run_gang
from harness.ranks.pods import free_port

MODULE = "benchmarks.trainer_overhead"
LIMIT, TELEMETRY_LIMIT = 1.01, 0.005
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""For both: giving memory back and faulting it in again costs either of them up to 5 % of a step, by chance."""
PATTERN = "[^0-9]*[0-9][\\s\\S]*"


@dataclass
class Turns(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Lets two trainers in two threads take their steps in turns; measures each of this one's."""

    start: Barrier
    mine: Semaphore
    others: Semaphore
    _: KW_ONLY
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    _random: torch.Tensor | None = None
    _begin: tuple[float, float] = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The step before ends here, its logging included."""
        if self._random is None:
            self.start.wait()
        else:
            self._end()
        self.mine.acquire()
        torch.set_rng_state(torch.Generator().get_state() if self._random is None else self._random)
        self._random = torch.get_rng_state()
        self._begin = time.process_time(), time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The other one goes on alone."""
        self._end()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Keeps the reward."""
        self.rewards += [logs["reward"]] if logs and "reward" in logs else []

    def _end(self) -> None:
        self.cpu.append(time.process_time() - self._begin[0])
        self.wall.append(time.perf_counter() - self._begin[1])
        self._random = torch.get_rng_state()
        self.others.release()


class Meter:
    """CPU seconds that the calling thread spends inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def watch(self, owner: Any, *names: str) -> None:
        """Measure these functions of an object."""
        for name in names:
            setattr(owner, name, self._measured(getattr(owner, name)))

    def _measured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return function(*arguments, **named)
            self._inside, begin = True, time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - begin
                self._inside = False

        return measured


def save_model(folder: Path) -> None:
    """A random model of about two million parameters: its steps are long enough for 1 % of them to be seen."""
    from transformers import Qwen2ForCausalLM, set_seed

    from grpo_trainer.acceptance.tiny import tiny_tokenizer
    from harness.ranks import demo_model

    settings = demo_model.config()
    settings.update({"hidden_size": 256, "intermediate_size": 1024})
    set_seed(0)
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def make_plan(folder: Path, steps: int) -> TrainingPlan:
    """One process, Clone, 16 completions of 64 tokens a step."""
    from harness.ranks import runs

    training = {"maxSteps": steps, "maxCompletionLength": 64, "promptsPerStep": 4}
    execution = {"microBatch": 16, "saveEverySteps": steps}
    plan = runs.plan(folder / "model", training=training, execution=execution).model_dump(by_alias=True)
    plan["dataset"] = {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}}
    plan["rewards"] = [{"format": {"pattern": PATTERN}}]
    return TrainingPlan.model_validate(plan)


def bare(folder: Path, plan: TrainingPlan, whole: Any) -> Any:
    """TRL alone, with the other trainer's prompts and tokenizer."""
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_trainer.settings import config_arguments

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
    from grpo_trainer.building import build
    from grpo_trainer.gang.placement import Placement
    from grpo_trainer.process.recorder import Recorder
    from grpo_trainer.process.watchdog import Watchdog
    from grpo_trainer.telemetry.logs import PublishLogs
    from grpo_trainer.telemetry.observer import StepObserver
    from grpo_trainer.telemetry.samples import KeepSamples
    from grpo_trainer.telemetry.server import serve
    from grpo_trainer.telemetry.step_exchange import StepExchange

    os.environ |= {DATA_MOUNT_ENV: str(folder), PROGRESS_BIND_ENV: f"127.0.0.1:{free_port()}"}
    recorder = Recorder(plan, Placement(0, 0, 1, 1), time.time())
    serve(plan, recorder)
    watchdog = Watchdog(plan, recorder, lambda *_: None)
    watchdog.start()
    trainer = build(plan, recorder, watchdog, StepObserver()).trainer
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, StepExchange | PublishLogs | KeepSamples):
            meter.watch(callback, "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log")
    meter.watch(trainer.observer, "completed")
    meter.watch(trainer.observer.clock, "enter")
    return trainer


def measure(folder: Path, steps: int, bare_first: bool) -> dict[str, Any]:
    """Seconds of every step of both but the first and last, and telemetry's, in a process of its own."""
    plan, meter = make_plan(folder, steps), Meter()
    start, one, other = Barrier(2), Semaphore(1), Semaphore(0)
    turns = {"bare": Turns(start, one, other), "ours": Turns(start, other, one)}
    if not bare_first:
        turns = {"ours": Turns(start, one, other), "bare": Turns(start, other, one)}
    whole = ours(folder, plan, meter)
    trainers = {"bare": bare(folder, plan, whole), "ours": whole}
    for name, trainer in trainers.items():
        trainer.callback_handler.callbacks.insert(0, turns[name])
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(trainers[name].train) for name in turns]:
            done.result()
    logged = [turn.rewards for turn in turns.values()]
    assert logged[0] == logged[1], f"they must do the same work: {logged}"
    inner = slice(1, -1)
    seconds = {name: {"cpu": turn.cpu[inner], "wall": turn.wall[inner]} for name, turn in turns.items()}
    return seconds | {"telemetry": meter.seconds / sum(turns["ours"].cpu)}


def row(number: int, seconds: dict[str, Any]) -> list[str]:
    """Median seconds per step of both in one process, and their ratio."""
    medians = {kind: [statistics.median(seconds[name][kind]) for name in ("bare", "ours")] for kind in ("cpu", "wall")}
    return [str(number), *(text for pair in medians.values() for text in shown(*pair))]


def shown(before: float, after: float) -> list[str]:
    """Both in seconds, and the ratio."""
    return [f"{before:.4f}", f"{after:.4f}", f"{after / before:.4f}"]


def median_ratio(measured: list[dict[str, Any]], kind: str) -> float:
    """Median over all steps of ours divided by the step of bare TRL beside it."""
    pairs = [pair for one in measured for pair in zip(one["bare"][kind], one["ours"][kind], strict=True)]
    return float(statistics.median(after / before for before, after in pairs))


def measure_all(processes: int, steps: int) -> list[dict[str, Any]]:
    """What `measure` returns, of so many processes after each other."""
    os.environ |= KEEP_FREED_MEMORY
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model")
        problems = "".join(json.dumps({"prompt": f"say {number % 10}"}) + "\n" for number in range(64))
        (folder / "problems.jsonl").write_text(problems)
        arguments = [{"steps": steps + 2, "bare_first": number % 2 == 0} for number in range(processes)]
        return [run_gang(f"{MODULE}:measure", folder, 1, fresh=True, **named)[0] for named in arguments]


def main() -> int:
    """Measure, print, write; 1 if ours costs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="of each trainer in each process")
    parser.add_argument("--write", action="store_true", help="write the table into docs/strategies.md")
    options = parser.parse_args()
    measured = measure_all(options.processes, options.steps)
    cpu, wall = median_ratio(measured, "cpu"), median_ratio(measured, "wall")
    telemetry = statistics.median(one["telemetry"] for one in measured)
    header = ["process", "TRL: CPU s per step", "ours", "ratio", "TRL: wall s per step", "ours", "ratio"]
    text = (
        f"{table(header, [row(*one) for one in enumerate(measured, 1)])}\nMedian over "
        f"{options.processes * options.steps} pairs of steps: CPU {cpu:.4f}, wall {wall:.4f} (limit {LIMIT}). "
        f"Telemetry's share of a step: {telemetry:.2%} (limit {TELEMETRY_LIMIT:.1%})."
    )
    print(text)
    if options.write:
        replace_section(STRATEGIES, "overhead", text)
    return int(cpu > LIMIT or telemetry > TELEMETRY_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
