"""The one exchange of all ranks per optimizer step: SIGTERM, step times, phase times and memory peaks.

Exists so that agreeing on a stop and showing the slowest rank cost one small collective together, and none of them
a synchronisation of the GPU. A TrainerCallback of the trainer that worker.py builds.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .host_memory import resident_bytes
from .phases import PHASES, PhaseClock
from .preemption import Preemption
from .recorder import Recorder
from .watchdog import Watchdog

FIELDS = ("sigterm", "step_seconds", "host", *(f"seconds/{name}" for name in PHASES), *(f"peak/{name}" for name in PHASES))


class Pulse(TrainerCallback):
    """Gathers a row of numbers from every rank after each step and acts on them."""

    def __init__(self, recorder: Recorder, watchdog: Watchdog, clock: PhaseClock, preemption: Preemption) -> None:
        self._recorder = recorder
        self._watchdog = watchdog
        self._clock = clock
        self._preemption = preemption
        self._began = time.perf_counter()
        self.verdict = "continue"
        """What became of SIGTERM: continue, save or stop."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training starts, at the step of a checkpoint when resumed."""
        self._recorder.begin(state.global_step, state.max_steps)
        self._began = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Exchange, publish, and stop if any rank was told to."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        rows = exchange(self._row(seconds))
        worst = dict(zip(FIELDS, rows.amax(dim=0).tolist(), strict=True))
        self._recorder.finished_step(state.global_step, state.epoch, seconds)
        self._publish(rows, worst)
        if worst["sigterm"] >= 0:
            self._stop(state.global_step, worst, control)

    def _row(self, seconds: float) -> list[float]:
        waited = self._watchdog.seconds_since_sigterm
        phases = self._clock.take()
        own = [-1.0 if waited is None else waited, seconds, float(resident_bytes())]
        return own + [phases[name] for name in PHASES] + [float(self._clock.peaks[name]) for name in PHASES]

    def _publish(self, rows: torch.Tensor, worst: dict[str, float]) -> None:
        self._recorder.logged({f"phase_seconds/{name}": worst[f"seconds/{name}"] for name in PHASES})
        peaks = {name: int(worst[f"peak/{name}"]) for name in PHASES if worst[f"peak/{name}"]}
        self._recorder.memory({**peaks, "host": int(worst["host"])})

    def _stop(self, step: int, worst: dict[str, float], control: TrainerControl) -> None:
        self.verdict = self._preemption.decide(step, worst["sigterm"], worst["step_seconds"])
        if self.verdict != "continue":
            control.should_training_stop = True
            control.should_save = self.verdict == "save"


def exchange(row: list[float]) -> torch.Tensor:
    """Every rank's row, shape (world, len(row)), float64, on the CPU. A collective."""
    own = torch.tensor(row, dtype=torch.float64)
    if not dist.is_initialized():
        return own.unsqueeze(0)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows)
