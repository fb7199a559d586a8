"""The `python` reward: a user's function with TRL's reward signature.

A function that hangs, crashes or returns nonsense costs its batch, or ends the run with a name, and never hangs the
gang: sync and async functions run in a process of their own. An async one runs beside the other async rewards.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_api.spec.rewards import PythonReward

from ..errors import BadInput
from .base import RewardCounters, Scores, checked_scores, current_step, reward_error
from .child_process import START_SECONDS, FunctionFailed, FunctionProcess

Hook = Callable[..., None]
_PLAIN = int | float | str | bool | None


class PythonFunction:
    """Callable with TRL's reward signature; a time-out gives the whole batch None."""

    def __init__(self, name: str, spec: PythonReward, counters: RewardCounters, process: FunctionProcess) -> None:
        """Takes over the process, which has the function imported."""
        self.__name__ = name
        self._spec = spec
        self._counters = counters
        self._process = process

    @property
    def longest_seconds(self) -> float:
        """The most time that one call can take: a restart after the last time-out, then the batch."""
        return START_SECONDS + self._spec.timeout_seconds

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def __call__(self, **arguments: Any) -> Scores:
        """One score per completion, or None for all after a time-out.

        Raises:
            RewardError: the function raised, its process ended, or it did not return one number or None for each.
        """
        hooks = arguments.get("log_metric"), arguments.get("log_extra")
        answer = self._answer(arguments)
        return self._scores(arguments, answer, *hooks)

    def _answer(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """What the function's process answers; None after a time-out."""
        try:
            return self._process.call(sendable(arguments), self._spec.timeout_seconds)
        except TimeoutError:
            problem = f"{self._spec.function} did not return within timeoutSeconds = {self._spec.timeout_seconds}"
            self._counters.timed_out(len(arguments["completions"]), problem)
            return None
        except FunctionFailed as failure:
            problem = f"{self._spec.function} failed: {failure}"
            raise reward_error(self.__name__, current_step(arguments), problem, failure.sample) from failure

    def _scores(
        self, arguments: dict[str, Any], answer: dict[str, Any] | None, log_metric: Hook | None, log_extra: Hook | None
    ) -> Scores:
        expected = len(arguments["completions"])
        if answer is None:
            return [None] * expected
        if log_metric:
            for name, values in answer.get("metrics", {}).items():
                for value in values:
                    log_metric(name, value)
        if log_extra:
            for column, values in answer.get("extra", {}).items():
                log_extra(column, values)
        return checked_scores(answer["scores"], name=self.__name__, step=current_step(arguments), expected=expected)


class AsyncPythonFunction(PythonFunction):
    """A user's `async def` as a reward: TRL awaits it together with the other async rewards."""

    async def __call__(self, **arguments: Any) -> Scores:  # type: ignore[override]  # TRL asks which of the two it is
        """As PythonFunction; the wait for the process is off the event loop."""
        hooks = arguments.get("log_metric"), arguments.get("log_extra")
        answer = await asyncio.to_thread(self._answer, arguments)
        return self._scores(arguments, answer, *hooks)


def python_function(name: str, spec: PythonReward, counters: RewardCounters, folder: Path) -> PythonFunction:
    """The function of a `python` reward; `folder` is where its ConfigMap is mounted.

    Raises:
        BadInput: the function can't be imported.
    """
    try:
        process = FunctionProcess(spec.function, folder if spec.config_map else None)
    except BadInput as error:
        where = f"ConfigMap {spec.config_map.name!r} or the image" if spec.config_map else "the image"
        raise BadInput(f"reward {name!r}: python.function {error}; check that {where} has it") from error
    return (AsyncPythonFunction if process.is_async else PythonFunction)(name, spec, counters, process)


def sendable(arguments: dict[str, Any]) -> dict[str, Any]:
    """TRL's arguments without its hooks, and with the plain values of its trainer_state."""
    state = arguments.get("trainer_state")
    fields = vars(state) if state is not None else {}
    plain = {key: value for key, value in fields.items() if isinstance(value, _PLAIN)}
    columns = {name: value for name, value in arguments.items() if name not in ("log_metric", "log_extra")}
    return {**columns, "trainer_state": plain}
