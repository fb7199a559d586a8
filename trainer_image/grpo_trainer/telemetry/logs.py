"""Feeds TRL's logs and completions into the recorder, and writes each step as one JSON line.

TRL writes its numbers to experiment trackers only. A key that a step did not log keeps its last value; it is never set
to zero. NaN is shown as what it is.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api.report import training_metrics as catalogue

from ..process.recorder import Recorder
from .observer import StepObserver

_BY_TRL_KEY = {metric.trl: metric.key for metric in catalogue.TRAINING if metric.trl}


def translate(logs: Mapping[str, Any]) -> dict[str, float]:
    """TRL's logs by the catalogue's keys; values that are None are left out."""
    values = {}
    for name, value in logs.items():
        key = _BY_TRL_KEY.get(name) or _reward_key(name)
        if key and isinstance(value, int | float):
            values[key] = float(value)
    return values


def _reward_key(name: str) -> str | None:
    parts = name.split("/")
    if len(parts) == 3 and parts[0] == "rewards" and parts[2] == "mean":
        return f"{catalogue.REWARD.key}/{parts[1]}"
    return None


def log_line(**fields: Any) -> None:
    """Print one JSON object on one line of the log; NaN and infinity become text."""
    values = {key: _plain(value) for key, value in fields.items() if value is not None}
    print(json.dumps(values, ensure_ascii=False), flush=True)


def _plain(value: Any) -> Any:
    # JSON has no NaN and no infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class PublishLogs(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Publishes the logs of every step: in the recorder, and on rank 0 as one JSON line."""

    def __init__(self, recorder: Recorder, observer: StepObserver) -> None:
        self._recorder = recorder
        self._observer = observer
        self._tokens: float | None = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Merge the step's numbers."""
        logs = logs or {}
        values = translate(logs) | self._tokens_per_second(logs)
        if not all(math.isfinite(values.get(key, 0.0)) for key in catalogue.MUST_BE_FINITE):
            self._recorder.not_finite(state.global_step)
        overflow = catalogue.KL_OVERFLOW.key
        if overflow in values:  # TRL logs the mean over the step's micro-batches
            before = self._recorder.progress.metrics.get(overflow, 0.0)
            values[overflow] = before + values[overflow] * args.gradient_accumulation_steps
        self._recorder.logged(values, self._observer.samples)
        if state.is_world_process_zero and "loss" in logs:
            version = catalogue.WEIGHTS_VERSION.key  # of an engine, which TRL knows nothing of
            sampled = {version: self._recorder.progress.metrics.get(version)}
            log_line(step=state.global_step, totalSteps=state.max_steps, **values, **sampled)

    def on_save(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        """Say what became of a checkpoint, and how long training stood still for it."""
        progress = self._recorder.progress
        if not state.is_world_process_zero:
            return
        if progress.checkpoint_problem:
            failures = progress.metrics.get(catalogue.CHECKPOINT_FAILURES.key)
            log_line(checkpointFailed=state.global_step, failures=failures, problem=progress.checkpoint_problem)
        else:
            log_line(checkpoint=state.global_step, seconds=progress.metrics.get(catalogue.CHECKPOINT_SECONDS.key))

    def _tokens_per_second(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """From TRL's running total; absent on the first step and where the step generated nothing."""
        tokens, seconds = logs.get("num_tokens"), logs.get("step_time")
        before, self._tokens = self._tokens, tokens if tokens is not None else self._tokens
        if tokens is None or before is None or not seconds or tokens <= before:
            return {}
        return {"tokens_per_second": (tokens - before) / seconds}
