"""Shows the steps of a run: the phase clock, sample completions with their rewards, and TRL's logs
for the recorder.

The trainer, which touches TRL's private names, writes to StepObserver and knows nothing else of
telemetry.

PublishLogs feeds TRL's logs into the recorder and writes each step as one JSON line: TRL writes its
numbers to experiment trackers only. A key that a step did not log keeps its last value; it is never
set to zero. NaN is shown as what it is.

KeepSamples writes samples to the checkpoint volume, `attempt-N/samples.jsonl`, one JSON object per
line. /progress shows the latest completions only and ends with its pod, while people look
afterwards at how the answers changed over a run. The samples are rank 0's own.
"""

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_api.findings.diagnosis import RULES, Diagnosis
from grpo_api.findings.step_row import RANK_SECONDS, step_row
from grpo_api.findings.verdict import RunLimits
from grpo_api.report import training_metrics as catalogue
from grpo_api.report.report import Finding
from grpo_api.report.training_metrics import WEIGHTS_VERSION

from ..gang import ranks
from ..process.recorder import Recorder
from ..process.step_counters import StepCounters
from ..tracking.tracking import Tracking
from .compute_timer import ComputeTimer
from .phases import PhaseClock

log = logging.getLogger(__name__)

_TIMED = (f"{catalogue.PHASE_SECONDS.key}/", "checkpoint")
"""Metrics that this pod measures itself, at each step or save."""
SAMPLES = 3
"""Completions kept of a generation."""
SAMPLE_CHARACTERS = 600
"""Longest prompt and completion text of a sample; the middle is cut out."""


class StepObserver:
    """The live view of a step."""

    def __init__(self, counters: StepCounters | None = None) -> None:
        """`counters` are rank 0's; without them nothing is counted."""
        self.clock = PhaseClock(time.perf_counter)
        self.counters = counters
        self.samples: list[dict[str, str | float]] = []
        """The last generation's samples: prompt, completion and one number per reward function."""
        self.weights_versions: Sequence[int] = ()
        """Numbers of the weights that an engine sampled the last generation's completions with, one
        for each; none where the policy samples."""
        self.compute = ComputeTimer()
        self.rank_seconds: list[float] = []
        """Own seconds of each rank in the step that ended last; empty where not measured."""
        self.num_scored = 0
        """Completions of this process that were put to the reward functions since it started."""

    def record_completions(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        rewards: torch.Tensor,
        names: Sequence[str],
    ) -> None:
        """Count the completions of a generation, and keep a few, of different prompts where there
        are any.

        Args:
            prompts: texts or chats of this process.
            completions: texts or chats, one per prompt.
            rewards: shape (completions, reward functions), float32, NaN where a function gave none.
            names: of the reward functions.
        """
        self.num_scored += len(completions)
        chosen = spread_positions(len(completions), SAMPLES)
        scores = rewards[chosen].tolist() if chosen else []
        samples: list[dict[str, str | float]] = []
        for index, row in zip(chosen, scores, strict=True):
            sample: dict[str, str | float] = {"prompt": bounded_text(prompts[index])}
            sample["completion"] = bounded_text(completions[index])
            # A reward function that gave no score has NaN here.
            sample |= {
                name: score for name, score in zip(names, row, strict=True) if not math.isnan(score)
            }
            if self.weights_versions:
                sample[WEIGHTS_VERSION.key] = float(self.weights_versions[index])
            samples.append(sample)
        self.samples = samples


def spread_positions(count: int, limit: int) -> list[int]:
    """At most `limit` positions spread over `count`: completions of one prompt stand together."""
    if count < limit:
        return list(range(count))
    return [index * count // limit for index in range(limit)]


def bounded_text(text: Any) -> str:
    """A prompt or completion as bounded text; of a chat the last message."""
    whole = text if isinstance(text, str) else str(text[-1]["content"])
    half = SAMPLE_CHARACTERS // 2
    return whole if len(whole) <= SAMPLE_CHARACTERS else f"{whole[:half]} […] {whole[-half:]}"


SAMPLES_EVERY_STEPS = 10
"""Optimizer steps between two lines; the first step has one."""
SAMPLES_FILE = "samples.jsonl"
OLDER_SAMPLES_FILE = "samples.older.jsonl"
SAMPLES_FILE_BYTES = 8 * 2**20
"""Size at which FILE takes the place of OLDER: together they have the newest 8 to 16 MiB of an
attempt."""


class KeepSamples(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Appends the last generation's samples every EVERY_STEPS steps; a full disk costs samples,
    never the run."""

    def __init__(self, folder: Path | None, observer: StepObserver) -> None:
        """`folder` is the attempt's; without one no samples are kept."""
        self._folder = folder
        self._observer = observer

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        """Write a line where one is due. Not atomically: a crash can tear the last line, and
        readers skip it."""
        if (
            self._folder is None
            or not state.is_world_process_zero
            or (state.global_step - 1) % SAMPLES_EVERY_STEPS
        ):
            return
        try:
            append_sample(
                self._folder, {"step": state.global_step, "samples": self._observer.samples}
            )
        except OSError as error:
            log.warning(f"samples of step {state.global_step} are not kept: {error}")


def append_sample(folder: Path, line: dict[str, Any]) -> None:
    """Append a line to FILE, which moves aside first when it is full.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    path = folder / SAMPLES_FILE
    if path.exists() and path.stat().st_size >= SAMPLES_FILE_BYTES:
        path.replace(folder / OLDER_SAMPLES_FILE)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


_REWARD_METRICS = {"mean": catalogue.REWARD, "std": catalogue.REWARD_STD}
_BY_TRL_KEY = {metric.trl: metric.key for metric in catalogue.TRAINING if metric.trl}


def translate_logs(logs: Mapping[str, Any]) -> dict[str, float]:
    """TRL's logs by the catalogue's keys; values that are None are left out."""
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
        self, recorder: Recorder, observer: StepObserver, limits: RunLimits | None = None
    ) -> None:
        self._recorder = recorder
        self._observer = observer
        self._diagnosis = Diagnosis(limits)
        self._places: list[tuple[str, str]] = []
        """Pod and node of each rank; empty texts where they are not known."""

    def on_train_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        """Judge the steps of earlier attempts again, which the checkpoint brings: the beginning of
        a run stays the measure after a restart. A collective."""
        self._recorder.counters.begin_tokens(float(state.num_input_tokens_seen))
        place = os.environ.get("POD_NAME", ""), os.environ.get("NODE_NAME", "")
        self._places = ranks.gather(place)
        if state.is_world_process_zero:
            for logged in state.log_history:
                row = step_row(logged)
                if row is not None and "loss" in logged:
                    # The ranks are other pods by now, maybe on other nodes.
                    self._diagnosis.add(replace(row, rank_seconds=()))

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
        values = translate_logs(logs)
        if catalogue.TOKENS.key in values:
            self._recorder.counters.record_tokens(values[catalogue.TOKENS.key])
        if not all(math.isfinite(values.get(key, 0.0)) for key in catalogue.MUST_BE_FINITE):
            self._recorder.record_nonfinite_step(state.global_step)
        overflow = catalogue.KL_OVERFLOW.key
        if overflow in values:  # TRL logs the mean over the step's micro-batches
            before = self._recorder.progress.metrics.get(overflow, 0.0)
            values[overflow] = before + values[overflow] * args.gradient_accumulation_steps
        self._recorder.record_metrics(values, self._observer.samples)
        if state.is_world_process_zero and "loss" in logs:
            version = catalogue.WEIGHTS_VERSION.key  # of an engine, which TRL knows nothing of
            sampled = {version: self._recorder.progress.metrics.get(version)}
            step, steps = state.global_step, state.max_steps
            own = {RANK_SECONDS: logs.get(RANK_SECONDS)}
            log_numbers(
                f"step {step} of {steps}", step=step, totalSteps=steps, **values, **sampled, **own
            )
            self._judge(state.global_step, logs)

    def _judge(self, step: int, logs: Mapping[str, Any]) -> None:
        """Add a step to the diagnosis, and publish what is wrong with the run.

        `logs` are TRL's own, as a checkpoint has them: the rules read more of them than is
        exported, and a number that only the steps before a restart had would stand still.
        """
        metrics = self._recorder.progress.metrics
        # Others that this step did not log are old.
        timed = {key: value for key, value in metrics.items() if key.startswith(_TIMED)}
        row = step_row({**timed, **logs, "step": step})
        if row is None:
            return
        self._diagnosis.add(row)
        findings = [self._with_place(finding) for finding in self._diagnosis.findings]
        names = {finding.finding for finding in findings}
        self._recorder.record_findings(findings)
        self._recorder.record_metrics(
            {f"{catalogue.FINDING.key}/{name}": float(name in names) for name in RULES}
        )

    def _with_place(self, finding: Finding) -> Finding:
        """The finding with the pod and the node of the rank that it names."""
        rank = int(finding.evidence.get("rank", -1))
        if not 0 <= rank < len(self._places):
            return finding
        pod, node = self._places[rank]
        return finding.model_copy(update={"pod": pod or None, "node": node or None})

    def on_save(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        """Say what became of a checkpoint, and how long training stood still for it."""
        progress = self._recorder.progress
        if not state.is_world_process_zero:
            return
        if progress.checkpoint_problem:
            failures = progress.metrics.get(catalogue.CHECKPOINT_FAILURES.key)
            log_numbers(
                f"the checkpoint of step {state.global_step} could not be written",
                checkpointFailed=state.global_step,
                failures=failures,
                problem=progress.checkpoint_problem,
            )
        else:
            log_numbers(
                f"checkpoint of step {state.global_step}",
                checkpoint=state.global_step,
                seconds=progress.metrics.get(catalogue.CHECKPOINT_SECONDS.key),
            )


class SendLogs(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Passes the logs of every step on to the trackers of spec.tracking; TRL's own `report_to` is
    none."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def on_train_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        """Open the trackers' runs."""
        self._tracking.begin(state.global_step)

    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Pass a row on."""
        self._tracking.log(state.global_step, logs or {})
