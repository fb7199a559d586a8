"""What all reward functions share: the text of a completion, counters, time budgets and errors that
name the sample.

Every kind of reward thus fails, times out and reports in one way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from grpo_api.spec.rewards import AccuracyReward, FormatReward
from grpo_api.text.clock import Clock

from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import RewardError

Message = dict[str, Any]
Completion = str | list[Message]
Scores = list[float | None]
"""One number per completion; None where the reward has nothing to say (TRL leaves those out of the
sum)."""
TRL_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL gives a reward under other names."""
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(slots=True)
class RewardCounters:
    """What went wrong in one reward function of this process since it started."""

    timeouts: int = 0
    """Completions that got no reward because their time was up."""
    failures: int = 0
    """Completions that got no reward because scoring them failed."""
    last_problem: str = field(default="", compare=False)
    """Why the last of them got none."""

    def count_timeouts(self, completions: int, problem: str) -> None:
        """Count completions without a reward because their time was up; `problem` is for
        messages."""
        self.timeouts += completions
        self.last_problem = problem

    def count_failures(self, completions: int, problem: str) -> None:
        """Count completions without a reward because scoring them failed; `problem` is for
        messages."""
        self.failures += completions
        self.last_problem = problem


class Deadline:
    """A time budget in seconds, running from its construction."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        """Starts now, by this clock."""
        self._clock = clock
        self._end = clock.now() + seconds

    def seconds_left(self) -> float:
        """Seconds left; 0 or less when the budget is spent."""
        return self._end - self._clock.now()

    def timeout_message(self, spec: FormatReward | AccuracyReward) -> str:
        """Which of a reward's two budgets a completion exceeded, in words."""
        if self.seconds_left() <= 0:
            return f"the batch took longer than batchTimeoutSeconds = {spec.batch_timeout_seconds}"
        return f"a completion took longer than timeoutSeconds = {spec.timeout_seconds}"


def completion_text(completion: Completion) -> str:
    """What the model wrote: the completion itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def current_step(columns: dict[str, Any]) -> int:
    """The optimizer step under way, from 1, as TRL's `trainer_state` among a reward's arguments
    says."""
    state = columns.get("trainer_state")
    return 0 if state is None else int(state.global_step) + 1


def reward_arguments(
    columns: Mapping[str, Sequence[Any]],
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    max_steps: int | None,
    *,
    is_over: bool = False,
) -> dict[str, Any]:
    """What TRL gives a reward for these completions before a run's first step, or after its last
    where it `is_over`."""
    # A reward that changes with training divides by them, where their number is not known, too.
    steps = max_steps or 1
    state = SimpleNamespace(
        global_step=steps if is_over else 0, max_steps=steps, epoch=0.0, num_train_epochs=1
    )
    return {
        **{name: cells for name, cells in columns.items() if name not in TRL_COLUMNS},
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "trainer_state": state,
    }


def reward_error(name: str, step: int, problem: str, sample: int | None = None) -> RewardError:
    """A RewardError that says which reward, which completion of this process's batch (from 0) and
    which step."""
    where = "" if sample is None else f", sample {sample}"
    return RewardError(f"reward {name!r}{where}, step {step}: {problem}")


def checked_scores(scores: Sequence[object], *, name: str, step: int, expected: int) -> Scores:
    """The scores as floats and Nones.

    Raises:
        RewardError: there are more or fewer than `expected`, or one is not a finite number.
    """
    if len(scores) != expected:
        problem = f"returned {len(scores)} rewards for {expected} completions; return one for each"
        raise reward_error(name, step, problem)
    return [_checked_score(score, name, step, sample) for sample, score in enumerate(scores)]


def _checked_score(score: object, name: str, step: int, sample: int) -> float | None:
    if score is None:
        return None
    # the comparison is false for NaN too; TRL keeps rewards in float32
    if not isinstance(score, int | float) or not abs(score) <= FLOAT32_MAX:
        problem = f"returned {score!r:.80}; return a finite number, or None for no reward"
        raise reward_error(name, step, problem, sample)
    return float(score)
