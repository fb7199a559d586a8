"""Defines the one exchange of all ranks per optimizer step.

It carries SIGTERM, memory peaks, reward failures, and the times of the step, of its phases and of
each rank's own compute.

Agreeing on a stop and showing the slowest rank cost one small collective together, and none of it
synchronises the GPU.
"""

import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from grpo_api.findings.running_rules import times_median
from grpo_api.findings.thresholds import SLOW_RANK
from grpo_api.report.report import STEP_PHASES
from grpo_api.report.training_metrics import (
    COMPLETIONS,
    PHASE_SECONDS,
    REWARD_FAILURES,
    REWARD_TIMEOUTS,
    UNSCORED,
)

from ..gang import ranks
from ..process.preemption import Preemption
from ..process.recorder import Recorder
from ..process.watchdog import Watchdog
from ..rewards.reward_set import FailureLimits, ScoredCompletions
from .observer import StepObserver
from .phases import MEMORY, device_bytes


def resident_bytes() -> int:
    """Anonymous resident memory in bytes: resident minus shared pages."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


SIZES = (*MEMORY, "reserved", "device", "host")
"""Peak of allocated bytes by phase, then most reserved bytes, and the device's and the host's use
after the step."""
_SECONDS_FIELDS = [f"seconds/{name}" for name in STEP_PHASES]
_MEMORY_FIELDS = [f"memory/{name}" for name in SIZES]
_COMPUTE_FIELDS = ("compute_seconds", "compute_tokens")
FIELDS = (
    "sigterm", "step_seconds", *_SECONDS_FIELDS, *_MEMORY_FIELDS, *_COMPUTE_FIELDS, "scored"
)  # fmt: skip
"""Columns of the exchanged rows; the counters of the reward functions follow."""


class StepExchange(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Gathers a row of numbers from every rank after each step and acts on them."""

    def __init__(
        self,
        recorder: Recorder,
        watchdog: Watchdog,
        observer: StepObserver,
        preemption: Preemption,
        failure_limits: FailureLimits,
    ) -> None:
        self._recorder = recorder
        self._watchdog = watchdog
        self._observer = observer
        self._clock = observer.clock
        self._preemption = preemption
        self._failure_limits = failure_limits
        self._counters = failure_limits.counters
        self._began = time.perf_counter()
        self._saving = 0.0
        self.verdict = "continue"
        """What became of SIGTERM: continue, save or stop."""

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Training starts, at the step of a checkpoint when resumed."""
        self._recorder.begin_training(state.global_step, state.max_steps)
        if ranks.world_size() > 1:
            self._observer.compute.begin_step(state.global_step + 1)
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The optimizer step begins (DeepSpeed makes it inside the backward phase instead)."""
        self._clock.enter("step")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The optimizer step ended."""
        self._clock.enter(None)

    def on_step_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Exchange the step's numbers between the ranks, publish them, and stop if any rank
        received SIGTERM.

        Raises:
            RewardError: a reward failed for too many completions of all ranks.
        """
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        rows = exchange_rows(self._row(seconds - self._saving))
        self._saving = 0.0
        worst = dict(zip(FIELDS, rows.amax(dim=0).tolist(), strict=False))
        self._recorder.record_step(state.global_step, state.epoch, seconds)
        # Failures and time-outs of all ranks since the start, by reward.
        sums = rows[:, len(FIELDS) :].sum(dim=0).reshape(-1, 2).tolist()
        counted = dict(zip(self._counters, sums, strict=True))
        self._publish(worst, counted)
        self._compare_ranks(rows, state.global_step + 1)
        completions = rows[:, FIELDS.index("scored")].sum().item()
        missing = {name: sum(both) for name, both in counted.items()}
        scored = ScoredCompletions(completions, missing)
        is_last = state.global_step >= state.max_steps
        try:
            self._failure_limits.judge(state.global_step, scored, is_last=is_last)
        finally:  # what ends a run is seen, too
            metrics = {COMPLETIONS.key: scored.completions}
            for name, share in self._failure_limits.unscored_shares().items():
                metrics[f"{UNSCORED.key}/{name}"] = share
            self._recorder.record_metrics(metrics)
        if worst["sigterm"] >= 0:
            self._stop(worst, control)

    def on_save(self, *_: Any, **__: Any) -> None:
        """A checkpoint's time is in how long a step takes until the next, and not in how long a
        step itself takes."""
        self._saving = time.perf_counter() - self._began

    def _row(self, seconds: float) -> list[float]:
        waited = self._watchdog.seconds_since_sigterm
        phases = self._clock.take_seconds()
        row = [-1.0 if waited is None else waited, seconds]
        row += [phases[name] for name in STEP_PHASES]
        row += [*self._clock.peaks.values(), self._clock.reserved, device_bytes(), resident_bytes()]
        row += [*self._observer.compute.take(), self._observer.num_scored]
        for counter in self._counters.values():
            row += [counter.failures, counter.timeouts]
        return row

    def _publish(self, worst: dict[str, float], counted: dict[str, list[float]]) -> None:
        phase_seconds = {name: worst[f"seconds/{name}"] for name in STEP_PHASES}
        self._recorder.counters.add_step(worst["step_seconds"], phase_seconds)
        values = {f"{PHASE_SECONDS.key}/{name}": spent for name, spent in phase_seconds.items()}
        for name, (failures, timeouts) in counted.items():
            values[f"{REWARD_FAILURES.key}/{name}"] = failures
            values[f"{REWARD_TIMEOUTS.key}/{name}"] = timeouts
        self._recorder.record_metrics(values)
        sizes = {name: int(worst[f"memory/{name}"]) for name in SIZES}
        self._recorder.record_memory_peaks({name: size for name, size in sizes.items() if size})

    def _compare_ranks(self, rows: torch.Tensor, next_step: int) -> None:
        """Publish each rank's own seconds if the step was measured; look again soon if one is
        slow."""
        self._observer.rank_seconds = seconds = rank_seconds(rows)
        ratio = max(times_median(seconds), default=0.0)
        if seconds:
            self._recorder.record_metrics({"straggler_ratio": ratio})
        if len(rows) > 1:
            has_slow_rank = ratio >= SLOW_RANK.value
            self._observer.compute.begin_step(next_step, has_slow_rank=has_slow_rank)

    def _stop(self, worst: dict[str, float], control: TrainerControl) -> None:
        self.verdict = self._preemption.decide(worst["sigterm"], worst["step_seconds"])
        control.should_training_stop = True
        control.should_save = self.verdict == "save"


def rank_seconds(rows: torch.Tensor) -> list[float]:
    """Own seconds of each rank in a measured step, as if all had had the same number of tokens;
    empty for another step.

    A rank's completions are padded to the longest of its own, so that ranks differ in their tokens.
    """
    seconds, tokens = (rows[:, FIELDS.index(name)] for name in _COMPUTE_FIELDS)
    if not bool(tokens.all()):
        return []
    shares: list[float] = (seconds / tokens * tokens.mean()).tolist()
    return [float(f"{share:.4g}") for share in shares]


def exchange_rows(row: list[float]) -> torch.Tensor:
    """Every rank's row, shape (world, len(row)), float64, on the CPU. A collective."""
    own_row = torch.tensor(row, dtype=torch.float64)
    if not dist.is_initialized():
        return own_row.unsqueeze(0)
    rows = [torch.empty_like(own_row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own_row)
    return torch.stack(rows)
