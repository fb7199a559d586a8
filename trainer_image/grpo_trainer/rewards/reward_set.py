"""RewardSet: `spec.rewards` as functions, weights and names for TRL's trainer, and the limits of
their failures.

The one place where a declared reward becomes a callable. Torch and transformers are imported where
a reward is a model, and only then.

A run ends when a reward fails for a larger share of the completions than declared. The share is
that of the last ten generations of all ranks together. Judged by one rank or one generation, a
single time-out, which costs its whole batch, would end a run that scored nearly all. Every rank
judges the same sums, which the step's exchange brings, so all end together.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_api.spec.rewards import JUDGED_GENERATIONS, AccuracyReward, RewardSpec, reward_names
from grpo_api.text.contract import REWARD_MOUNT, REWARD_MOUNT_ENV, reward_token_env

from ..gang import ranks
from ..runtime.clock import OnWait, ignore_wait
from ..runtime.errors import BadInput
from .answers import expected_answer, parse_number
from .builtin_rewards import AccuracyFunction, FormatFunction
from .http_service import HTTPFunction
from .python_function import python_function
from .reward_base import RewardCounters, Scores, reward_error

if TYPE_CHECKING:
    import datasets
    import torch

    from ..hub.repositories import Hub


@dataclass(frozen=True, slots=True)
class ScoredCompletions:
    """What became of the completions of all ranks since the start."""

    completions: float
    """Those that were put to the rewards."""
    missing: Mapping[str, float]
    """Those of them that got no reward because of failures and time-outs, by reward."""


@dataclass(slots=True)
class FailureLimits:
    """Compares what was added in the last generations with the declared shares."""

    counters: dict[str, RewardCounters]
    """Of this process; they know the last failure's words."""
    shares: dict[str, float]
    """maxFailureShare by reward."""
    _sums: deque[ScoredCompletions] = field(
        default_factory=lambda: deque([ScoredCompletions(0.0, {})], JUDGED_GENERATIONS + 1)
    )
    """After each of the last generations, and before them."""

    def judge(self, step: int, scored: ScoredCompletions, *, is_last: bool) -> None:
        """To be called after every step, with `is_last` after the run's. A collective where a share
        is exceeded.

        A run that has made fewer than ten generations is judged as if those to come lost nothing,
        until it has made its is_last: so a failure at its beginning may pass, and a reward that
        never answers ends it after the second.

        Raises:
            RewardError: a share is exceeded; on all ranks alike.
        """
        if scored.completions > self._sums[-1].completions:
            self._sums.append(scored)
        before, generations = self._sums[0], len(self._sums) - 1
        requested = scored.completions - before.completions
        # As many completions as JUDGED_GENERATIONS generations ask for; after the last step, as
        # many as there were.
        is_final = is_last or not generations
        judged = requested if is_final else requested / generations * JUDGED_GENERATIONS
        for name, limit in self.shares.items():
            missing = scored.missing[name] - before.missing.get(name, 0.0)
            if judged and missing / judged > limit:
                of = "" if judged == requested else f" of {JUDGED_GENERATIONS} generations"
                share = f"{missing / judged:.1%}{of}, more than its maxFailureShare, {limit:.1%}"
                counted = f"{missing:.0f} of the {requested:.0f} completions"
                self._end(name, step, f"{counted} of {generations} generations", share)

    def unscored_shares(self) -> dict[str, float]:
        """Share of the judged generations' completions that got no reward, by reward; as of the
        last `judge`."""
        first, last = self._sums[0], self._sums[-1]
        requested = last.completions - first.completions
        if not requested:
            return {}
        missing = {
            name: count - first.missing.get(name, 0.0) for name, count in last.missing.items()
        }
        return {name: count / requested for name, count in missing.items()}

    def _end(self, name: str, step: int, lost: str, share: str) -> None:
        """Raise the error, in the words of a rank that met a failure. A collective."""
        last_problem = next(filter(None, ranks.gather(self.counters[name].last_problem)), "unknown")
        raise reward_error(
            name,
            step,
            f"{lost}, all ranks together, got no reward: {share}. The last failure: {last_problem}",
        )


RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class RewardSet:
    """The rewards of a run; positions agree in all lists."""

    specs: list[RewardSpec]
    """What was declared."""
    names: list[str]
    """Distinct names, as metrics show them; each function's `__name__`."""
    functions: list[RewardFunction]
    """TRL's `reward_funcs`: callables with its signature, and reward models."""
    counters: dict[str, RewardCounters]
    """Live counters of this process, by name."""

    @property
    def weights(self) -> list[float]:
        """TRL's `reward_weights`: factor of each reward in the sum."""
        return [spec.weight for spec in self.specs]

    @property
    def processing_classes(self) -> list[Any]:
        """TRL's `reward_processing_classes`: the tokenizer of each reward model, None for
        functions."""
        return [getattr(function, "tokenizer", None) for function in self.functions]

    @property
    def longest_seconds(self) -> float:
        """The most time that scoring one batch can take, forward passes of reward models left out.

        TRL calls sync rewards one after the other and awaits async ones together. The process group
        must wait longer than this.
        """
        together = one_by_one = 0.0
        for function in self.functions:
            seconds = getattr(function, "longest_seconds", 0.0)
            if inspect.iscoroutinefunction(type(function).__call__):
                together = max(together, seconds)
            else:
                one_by_one += seconds
        return together + one_by_one

    @property
    def failure_limits(self) -> FailureLimits:
        """Ends the run where a reward fails too often."""
        named = zip(self.names, self.specs, strict=True)
        return FailureLimits(self.counters, {name: spec.max_failure_share for name, spec in named})

    def check_dataset(self, rows: datasets.Dataset) -> None:
        """Whether the dataset has what the rewards need, before anything is trained.

        Raises:
            BadInput: an answer column is missing, or one of its cells has no answer (names the
                row); or a reward model can't read chats.
        """
        tokenizers = self.processing_classes
        for spec, name, tokenizer in zip(self.specs, self.names, tokenizers, strict=True):
            if tokenizer:
                check_chat_template(name, tokenizer, is_chat=not isinstance(rows[0]["prompt"], str))
            if spec.accuracy:
                check_answers(name, spec.accuracy, rows)

    def close(self) -> None:
        """Ends the processes that the rewards started. Harmless when called twice."""
        for function in self.functions:
            if hasattr(function, "close"):
                function.close()


def call_reward(function: RewardFunction, arguments: Mapping[str, Any]) -> Scores:
    """The scores of a batch outside of training; an async reward is run to its end."""
    answer = function(**arguments)
    return list(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)


def check_chat_template(name: str, tokenizer: Any, *, is_chat: bool) -> None:
    """Whether a reward model can read the prompts.

    Raises:
        BadInput: the prompts are chats, and its tokenizer has no template for them.
    """
    if is_chat and tokenizer.chat_template is None:
        problem = "the prompts are chats but the reward model's tokenizer has no chat template"
        raise BadInput(
            f"reward {name!r}: {problem}; take another model, or text prompts without a system "
            "prompt"
        )


def check_answers(name: str, accuracy: AccuracyReward, rows: datasets.Dataset) -> None:
    """Whether every row has an answer that completions can be compared with.

    Raises:
        BadInput: the column is missing, or a cell has no answer; names the row.
    """
    column, numeric = accuracy.answer_column, accuracy.compare == "Numeric"
    where = f"reward {name!r}: column {column!r}"
    if column not in rows.column_names:
        raise BadInput(
            f"{where} is not in the dataset; set accuracy.answerColumn to one of "
            f"{', '.join(rows.column_names)}"
        )
    for index, cell in enumerate(rows[column]):
        row = f"{where}, row {index + 1} of those that are trained on"
        if not isinstance(cell, str | int | float):
            raise BadInput(
                f"{row}: {cell!r:.80} is neither text nor a number; write an answer, or remove the "
                "row"
            )
        # A missing number of a table is NaN.
        if not expected_answer(cell) or cell != cell:  # noqa: PLR0124
            raise BadInput(f"{row}: the answer is empty; write one, or remove the row")
        if numeric and parse_number(expected_answer(cell)) is None:
            raise BadInput(
                f"{row}: {expected_answer(cell)!r:.80} is not a number; set accuracy.compare to "
                "Exact or Math"
            )


def reward_root() -> Path:
    """Return the folder whose subfolders have the rewards' files, each named by its position."""
    return Path(os.environ.get(REWARD_MOUNT_ENV, REWARD_MOUNT))


def build_rewards(
    rewards: list[RewardSpec],
    *,
    root: Path | None = None,
    device: torch.device | str = "cpu",
    hub: Hub | None = None,
    on_wait: OnWait = ignore_wait,
    without_models: bool = False,
) -> RewardSet:
    """The functions of `spec.rewards`; the reward at position i finds its files in `root`/i (None:
    the pod's mount), or its model in the hub. `on_wait` is called with the reason why a service is
    asked again. `without_models` leaves out rewards that are models.

    A collective where a reward is a model, and to be called before GRPOConfig is made (see
    load_reward_model).

    Raises:
        BadInput: a pattern, function or model can't be used.
        Transient: the hub of a reward model can't be asked now, or there is no room.
    """
    named = enumerate(zip(rewards, reward_names(rewards), strict=True))
    # A reward's files and token are known by its place among all rewards.
    places = [place for place in named if not (without_models and place[1][0].model)]
    specs = [reward for _, (reward, _) in places]
    names = [name for _, (_, name) in places]
    built = RewardSet(specs, names, [], {name: RewardCounters() for name in names})
    folder = root or reward_root()

    def build(position: int, reward: RewardSpec, name: str) -> RewardFunction:
        counters = built.counters[name]
        if reward.format:
            return FormatFunction(name, reward.format, counters)
        if reward.accuracy:
            return AccuracyFunction(name, reward.accuracy, counters)
        if reward.python:
            return python_function(name, reward.python, counters, folder / str(position))
        if reward.http:
            token = os.environ.get(reward_token_env(position), "").strip()
            return HTTPFunction(name, reward.http, counters, token, on_wait)
        assert reward.model is not None, "the schema rejects a reward without a kind"
        from ..weights.models import load_reward_model
        from .reward_model import RewardModel

        loaded = load_reward_model(reward.model, f"rewards[{position}].model", hub)
        return RewardModel(name, loaded, reward.model.batch_size, counters, device)

    try:
        for position, (reward, name) in places:
            built.functions.append(build(position, reward, name))
    except BaseException:
        built.close()
        raise
    return built
