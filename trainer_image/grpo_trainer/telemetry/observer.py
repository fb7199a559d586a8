"""Shows the steps of a run: the phase clock, sample completions with their rewards, and TRL's logs
for the recorder and the run's history.

The trainer, which touches TRL's private names, writes to StepObserver and knows nothing else of
telemetry.

PublishLogs feeds TRL's logs into the recorder and writes each step as one JSON line: TRL writes its
numbers to experiment trackers only. A key that a step did not log keeps its last value; it is never
set to zero. NaN is shown as what it is.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerState

from grpo_api.findings.diagnosis import RULES, Diagnosis
from grpo_api.findings.step_row import RANK_SECONDS, step_row
from grpo_api.report import training_metrics
from grpo_api.report.history import ATTEMPT, FINDINGS, STEP, Row
from grpo_api.report.report import Finding
from grpo_api.report.training_metrics import WEIGHTS_VERSION

from ..gang import ranks
from ..history.run_history import Generation, RunHistory
from ..process.recorder import Recorder
from ..process.step_counters import StepCounters
from ..runtime.clock import unix_time
from ..tracking.tracking import Tracking
from .compute_timer import ComputeTimer
from .phases import PhaseClock

log = logging.getLogger(__name__)

_TIMED = f"{training_metrics.PHASE_SECONDS.key}/"
"""Metrics that this pod measures itself at each step."""


class StepObserver:
    """The live view of a step."""

    def __init__(self, counters: StepCounters | None = None) -> None:
        """`counters` are rank 0's; without them nothing is counted."""
        self.clock = PhaseClock(time.perf_counter)
        self.counters = counters
        self.weights_versions: Sequence[int] = ()
        """Numbers of the weights that an engine sampled the last generation's completions with, one
        for each; none where the policy samples."""
        self.compute = ComputeTimer()
        self.rank_seconds: list[float] = []
        """Own seconds of each rank in the step that ended last; empty where not measured."""
        self.num_scored = 0
        """Completions of this process that were put to the reward functions since it started."""
        self.take_generation: Callable[[], Generation | None] = lambda: None
        """Returns the completions of all ranks that were generated since the last call; None where
        there are none, or samples are not kept."""


class KeepSamples(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Adds samples of a new generation to the run's history where they are due, and passes them on
    to the trackers."""

    def __init__(self, observer: StepObserver, history: RunHistory, tracking: Tracking) -> None:
        self._observer = observer
        self._history = history
        self._tracking = tracking

    def on_step_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Look at the generation of this step, before a checkpoint of it is saved: a resumed run
        has only completions that it has generated itself."""
        generation = self._observer.take_generation()
        if generation is not None and self._history.is_sample_due(state.global_step):
            groups = self._history.add_samples(state.global_step, generation)
            self._tracking.send_samples(state.global_step, groups)


_REWARD_METRICS = {"mean": training_metrics.REWARD, "std": training_metrics.REWARD_STD}
_BY_TRL_KEY = {metric.trl: metric.key for metric in training_metrics.TRAINING if metric.trl}


def translate_logs(logs: Mapping[str, Any]) -> dict[str, float]:
    """TRL's logs by the keys of training_metrics.py; values that are None are left out."""
    values = {}
    for name, value in logs.items():
        key = _BY_TRL_KEY.get(name) or _reward_key(name)
        if key and isinstance(value, int | float):
            values[key] = float(value)
    return values


def _reward_key(name: str) -> str | None:
    parts = name.split("/")
    if len(parts) == 3 and parts[0] == "rewards" and parts[2] in _REWARD_METRICS:
        return f"{_REWARD_METRICS[parts[2]].key}/{parts[1]}"
    return None


def log_numbers(message: str, **fields: Any) -> None:
    """Write a line of the log with these fields; those that are None are left out."""
    log.info(message, extra={key: value for key, value in fields.items() if value is not None})


class PublishLogs(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Publishes the logs of every step: in the recorder, and on rank 0 as one JSON line."""

    def __init__(
        self, recorder: Recorder, history: RunHistory, max_kl: float | None = None
    ) -> None:
        self._recorder = recorder
        self._history = history
        self._checkpoint_step: float | None = None
        self._diagnosis = Diagnosis(max_kl)
        self._places: list[tuple[str, str]] = []
        """Pod and node of each rank; empty texts where they are not known."""

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Go on from the steps of earlier attempts, which the checkpoint brings. They are judged
        again: the beginning of a run stays the measure after a restart. A collective."""
        self._recorder.counters.begin_tokens(float(state.num_input_tokens_seen))
        place = os.environ.get("POD_NAME", ""), os.environ.get("NODE_NAME", "")
        self._places = ranks.gather(place)
        if state.is_world_process_zero:
            self._history.begin(state.log_history)
            for logged in state.log_history:
                row = step_row(logged)
                if row is not None and "loss" in logged:
                    # The ranks are other pods by now, maybe on other nodes.
                    self._diagnosis.add(replace(row, rank_seconds=()))

    def on_log(
        self, args: Any, state: TrainerState, *_: Any, logs: dict[str, Any], **__: Any
    ) -> None:
        """Merge the step's numbers."""
        values = translate_logs(logs)
        if training_metrics.TOKENS.key in values:
            self._recorder.counters.record_tokens(values[training_metrics.TOKENS.key])
        if not all(math.isfinite(values.get(key, 0.0)) for key in training_metrics.MUST_BE_FINITE):
            self._recorder.record_nonfinite_step(state.global_step)
        overflow = training_metrics.KL_OVERFLOW.key
        if overflow in values:  # TRL logs the mean over the step's micro-batches
            before = self._recorder.progress.metrics.get(overflow, 0.0)
            values[overflow] = before + values[overflow] * args.gradient_accumulation_steps
        self._recorder.record_metrics(values)
        if state.is_world_process_zero and "loss" in logs:
            version = WEIGHTS_VERSION.key  # of an engine, which TRL knows nothing of
            more = {
                version: self._recorder.progress.metrics.get(version),
                RANK_SECONDS: logs.get(RANK_SECONDS),
            }
            step, steps = state.global_step, state.max_steps
            text = f"step {step} of {steps}"
            log_numbers(text, step=step, totalSteps=steps, **values, **more)
            row = self._row(step, logs)
            row[FINDINGS] = self._judge(row)
            # Every checkpoint contains log_history.
            state.log_history[-1:] = [row]
            self._history.add_row(row)

    def _row(self, step: int, logs: Mapping[str, Any]) -> Row:
        """A step's row: TRL's own keys, and what this process has measured.

        The rules read more of TRL's numbers than is exported, and a number that only the steps
        before a restart had would never change.
        """
        metrics = self._recorder.progress.metrics
        # Numbers of others that this step did not log are old.
        row: Row = {key: value for key, value in metrics.items() if key.startswith(_TIMED)}
        row |= logs
        # After TRL's, among which a user's function may have logged some of such a name.
        row |= {STEP: step, ATTEMPT: self._recorder.progress.attempt, "time": unix_time()}
        version = metrics.get(WEIGHTS_VERSION.key)
        if version is not None:
            row[WEIGHTS_VERSION.key] = version
        return row | self._checkpoint_numbers(metrics)

    def _checkpoint_numbers(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What is new of the run's checkpoints since the last row."""
        failures = metrics.get(training_metrics.CHECKPOINT_FAILURES.key, 0.0)
        numbers = {training_metrics.CHECKPOINT_FAILURES.key: failures} if failures else {}
        step = metrics.get(training_metrics.CHECKPOINT_STEP.key)
        if step is not None and step != self._checkpoint_step:
            self._checkpoint_step = step
            keys = (training_metrics.CHECKPOINT_STEP.key, training_metrics.CHECKPOINT_SECONDS.key)
            numbers |= {key: metrics[key] for key in keys if key in metrics}
        return numbers

    def _judge(self, logged: Row) -> list[str]:
        """Add a step to the diagnosis, and publish what is wrong with the run; returns the names
        of the findings."""
        row = step_row(logged)
        if row is not None:
            self._diagnosis.add(row)
        findings = [self._with_place(finding) for finding in self._diagnosis.findings]
        names = [finding.finding for finding in findings]
        self._recorder.record_findings(findings)
        self._recorder.record_metrics(
            {f"{training_metrics.FINDING.key}/{name}": float(name in names) for name in RULES}
        )
        return names

    def _with_place(self, finding: Finding) -> Finding:
        """The finding with the pod and the node of the rank that it names."""
        rank = int(finding.evidence.get("rank", -1))
        if not 0 <= rank < len(self._places):
            return finding
        pod, node = self._places[rank]
        return finding.model_copy(update={"pod": pod or None, "node": node or None})

    def on_save(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Say what became of a checkpoint, and how long training stood still for it."""
        if not state.is_world_process_zero:
            return
        step, progress = state.global_step, self._recorder.progress
        problem, metrics = progress.checkpoint_problem, progress.metrics
        if problem:
            text = f"the checkpoint of step {step} could not be written"
            failures = metrics.get(training_metrics.CHECKPOINT_FAILURES.key)
            log_numbers(text, checkpointFailed=step, failures=failures, problem=problem)
        else:
            seconds = metrics.get(training_metrics.CHECKPOINT_SECONDS.key)
            log_numbers(f"checkpoint of step {step}", checkpoint=step, seconds=seconds)


class SendLogs(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Passes the logs of every step on to the trackers of spec.tracking; TRL's own `report_to` is
    none."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Open the trackers' runs."""
        self._tracking.begin(state.global_step)

    def on_log(
        self, _: Any, state: TrainerState, *__: Any, logs: dict[str, Any], **___: Any
    ) -> None:
        """Pass a row on."""
        self._tracking.log(state.global_step, logs)
