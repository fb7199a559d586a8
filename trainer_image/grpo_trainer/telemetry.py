"""Feeds TRL's logs and completions into the recorder, and stops a run whose KL diverges.

Exists because TRL writes its numbers to experiment trackers only. TrainerCallbacks of the trainer that worker.py
builds; keys that a step did not log are left as they were, never set to zero.
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api import metrics as catalogue
from grpo_api.running import GuardSpec

from .errors import DivergedKL
from .recorder import Recorder

_BY_TRL_KEY = {metric.trl: metric.key for metric in catalogue.TRAINING if metric.trl}


def translate(logs: Mapping[str, Any]) -> dict[str, float]:
    """TRL's logs by the catalogue's keys; values that are None, NaN or infinite are left out."""
    values = {}
    for name, value in logs.items():
        key = _BY_TRL_KEY.get(name) or _reward_key(name)
        if key and isinstance(value, int | float) and math.isfinite(value):
            values[key] = float(value)
    return values


def _reward_key(name: str) -> str | None:
    parts = name.split("/")
    if len(parts) == 3 and parts[0] == "rewards" and parts[2] == "mean":
        return f"{catalogue.REWARD.key}/{parts[1]}"
    return None


class Telemetry(TrainerCallback):
    """Publishes the logs of every step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Merge the step's numbers."""
        self._recorder.logged(translate(logs or {}))
        if state.is_world_process_zero:
            print({"step": state.global_step, **(logs or {})}, flush=True)


class KLGuard(TrainerCallback):
    """Ends the run when the KL stays above guard.maxKL; a KL that is no finite number counts as above."""

    def __init__(self, guard: GuardSpec) -> None:
        self._guard = guard
        self._above = 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Count the steps above the limit. TRL logs the same mean on every rank, so all of them stop together.

        Raises:
            DivergedKL: maxKLSteps steps in a row were above maxKL.
        """
        kl = (logs or {}).get("kl")
        if self._guard.max_kl is None or kl is None:
            return
        self._above = self._above + 1 if not kl <= self._guard.max_kl else 0
        if self._above >= self._guard.max_kl_steps:
            raise DivergedKL(
                f"the KL was above guard.maxKL = {self._guard.max_kl} for {self._above} steps, {kl:.4g} at step "
                f"{state.global_step}; lower training.learningRate, or raise training.beta or guard.maxKL"
            )
