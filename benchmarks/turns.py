"""Two trainers in one process that take their steps in turns, and what a step of the one costs
beside the other's.

Whatever slows one of them down slows the other down too, so that a difference of 1 % is seen, which
is less than a shared machine's noise from one minute to the next. What stays for a process's life,
such as where its memory lies, moves the ratio by 1 % as well, so several processes are measured,
and the two are built in turns first.
"""

import json
import os
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from threading import Barrier, Semaphore
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.pages import replace_section, table
from harness.programs.cache import REPOSITORY
from tests.support.ranks.gang import run_gang

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""For both: giving memory back and faulting it in again costs either of them up to 5 % of a step,
by chance."""
HEADER = [
    "process",
    "TRL: CPU s per step",
    "ours",
    "ratio",
    "TRL: wall s per step",
    "ours",
    "ratio",
]


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


def take_turns(trainers: Mapping[str, Any], bare_first: bool) -> dict[str, Turns]:
    """Train `bare` and `ours` to their ends; what each step took, by the same names."""
    start, one, other = Barrier(2), Semaphore(1), Semaphore(0)
    first, second = ("bare", "ours") if bare_first else ("ours", "bare")
    turns = {first: Turns(start, one, other), second: Turns(start, other, one)}
    for name, turn in turns.items():
        trainers[name].callback_handler.callbacks.insert(0, turn)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(trainers[name].train) for name in turns]:
            done.result()
    return turns


def seconds_of(turns: Mapping[str, Turns]) -> dict[str, Any]:
    """Seconds of every step of both but the first and last."""
    inner = slice(1, -1)
    return {
        name: {"cpu": turn.cpu[inner], "wall": turn.wall[inner]} for name, turn in turns.items()
    }


def save_model(folder: Path) -> None:
    """A random model of about two million parameters: its steps are long enough for 1 % of them to
    be seen."""
    from transformers import Qwen2ForCausalLM, set_seed

    from grpo_acceptance.tiny_model import tiny_tokenizer
    from tests.support.ranks import demo_model

    settings = demo_model.config()
    settings.update({"hidden_size": 256, "intermediate_size": 1024})
    set_seed(0)
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def asked(description: str, page: Path, processes: int) -> Namespace:
    """Return the command line's options; `processes` is the default of --processes."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--processes", type=int, default=processes)
    parser.add_argument("--steps", type=int, default=16, help="of each trainer in each process")
    where = page.relative_to(REPOSITORY)
    parser.add_argument("--write", action="store_true", help=f"write the table into {where}")
    return parser.parse_args()


def measure_all(scenario: str, options: Namespace) -> list[dict[str, Any]]:
    """Run the scenario in `options.processes` processes, one after the other, and return their
    results."""
    os.environ |= KEEP_FREED_MEMORY
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model")
        problems = "".join(
            json.dumps({"prompt": f"say {number % 10}"}) + "\n" for number in range(64)
        )
        (folder / "problems.jsonl").write_text(problems)
        arguments = [
            {"steps": options.steps + 2, "bare_first": n % 2 == 0} for n in range(options.processes)
        ]
        return [run_gang(scenario, folder, 1, fresh=True, **named)[0] for named in arguments]


def tell(options: Namespace, page: Path, measured: list[dict[str, Any]], found: str) -> None:
    """Print every process and what was found of all, and write it into the page where that was
    asked for."""
    pairs = f"Median over {options.processes * options.steps} pairs of steps"
    text = f"{table(HEADER, [row(*one) for one in enumerate(measured, 1)])}\n{pairs}: {found}"
    print(text)
    if options.write:
        replace_section(page, "overhead", text)


def row(number: int, seconds: dict[str, Any]) -> list[str]:
    """Median seconds per step of both in one process, and their ratio."""
    medians = {
        kind: [statistics.median(seconds[name][kind]) for name in ("bare", "ours")]
        for kind in ("cpu", "wall")
    }
    return [str(number), *(text for pair in medians.values() for text in shown(*pair))]


def shown(before: float, after: float) -> list[str]:
    """Both in seconds, and the ratio."""
    return [f"{before:.4f}", f"{after:.4f}", f"{after / before:.4f}"]


def median_ratio(measured: list[dict[str, Any]], kind: str) -> float:
    """Median over all steps of ours divided by the step of bare TRL beside it."""
    pairs = [
        pair for one in measured for pair in zip(one["bare"][kind], one["ours"][kind], strict=True)
    ]
    return float(statistics.median(after / before for before, after in pairs))
