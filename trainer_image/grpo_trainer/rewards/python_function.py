"""The `python` reward: a user's function with TRL's reward signature, run in a process of its own.

A function that hangs, crashes or returns nonsense costs its batch, or ends the run with its name.
It never hangs the gang, since a time-out ends the process. An async function runs beside the other
async rewards.

FunctionProcess runs math-verify too, whose run time is unbounded. The program at the other end is
function_child.py.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from grpo_api.spec.rewards import PythonReward

from ..runtime.child_process import ChildProcess
from ..runtime.errors import BadInput
from . import function_child
from .reward_base import RewardCounters, Scores, checked_scores, current_step, reward_error

START_SECONDS = 120.0
"""Time for a function's module to be imported."""
LOCATE_SECONDS = 10.0
"""Time to find the completion on which a function failed."""
_MAX_NAMES = 8


class FunctionFailed(Exception):
    """The function raised, or its process ended; `sample` is the completion on which it failed, if
    that was found."""

    def __init__(self, problem: str, sample: int | None = None) -> None:
        super().__init__(problem)
        self.sample = sample


class FunctionProcess:
    """`module:function`, imported in a process of its own from `folder` first."""

    def __init__(
        self, function: str, folder: Path | None = None, start_seconds: float = START_SECONDS
    ) -> None:
        """Starts the process and imports the function, which may take `start_seconds`.

        Raises:
            BadInput: the function can't be imported, with Python's reason.
        """
        self._function = function
        self._start_seconds = start_seconds
        self._path = [*([str(folder)] if folder else []), *sys.path]
        self._start()
        self.is_async = self._finish_start()

    def call(self, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What the function returned: `scores`, and what it logged as `metrics` and `extra`.

        Raises:
            TimeoutError: no answer within `seconds`; the process was ended and a new one is
                starting.
            FunctionFailed: the function raised, or its process ended or could not be started again.
        """
        if self._starting:
            # The function was imported before: it is there.
            try:
                self._finish_start()
            except BadInput as error:
                raise FunctionFailed(f"its process could not be started again: {error}") from error
        try:
            self._process.connection.send(arguments)
            answer = self._receive(seconds)
            if "problem" in answer:
                raise FunctionFailed(answer["problem"], self._sample())
        except TimeoutError:
            self.close()
            self._start()
            raise
        except (EOFError, ConnectionError) as error:
            raise FunctionFailed(
                f"the function's process ended with status {self._process.status()}"
            ) from error
        return answer

    def close(self) -> None:
        """End the process and everything that it started. Harmless when called twice."""
        self._process.close()

    def _start(self) -> None:
        self._process = ChildProcess([sys.executable, "-P", function_child.__file__])
        self._process.connection.send({"path": self._path, "function": self._function})
        self._starting = True

    def _finish_start(self) -> bool:
        """Waits until the function is imported; returns whether it is async."""
        try:
            answer = self._receive(self._start_seconds)
            problem = answer.get("problem")
        except TimeoutError:
            problem = f"the import took more than {self._start_seconds:.0f} s"
        except (EOFError, ConnectionError):
            problem = f"the process ended with status {self._process.status()} during the import"
        if problem is not None:
            self.close()
            raise BadInput(f"{self._function} can't be imported: {problem}")
        self._starting = False
        return bool(answer["async"])

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next message, if it comes in time; else TimeoutError."""
        if not self._process.connection.poll(seconds):
            raise TimeoutError
        answer: dict[str, Any] = json.loads(self._process.connection.recv_bytes())
        return answer

    def _sample(self) -> int | None:
        """The completion on which the function failed; None if that took too long to find."""
        try:
            return self._receive(LOCATE_SECONDS).get("sample")
        except (TimeoutError, EOFError, ConnectionError):
            return None


_PLAIN = int | float | str | bool | None


class PythonFunction:
    """Callable with TRL's reward signature; a time-out gives the whole batch None."""

    def __init__(
        self, name: str, spec: PythonReward, counters: RewardCounters, process: FunctionProcess
    ) -> None:
        """Takes over the process, which has the function imported."""
        self.__name__ = name
        self._spec = spec
        self._counters = counters
        self._process = process

    @property
    def longest_seconds(self) -> float:
        """The most time that one call can take: a restart after the last time-out, then the
        batch."""
        return START_SECONDS + self._spec.timeout_seconds

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def __call__(self, **arguments: Any) -> Scores:
        """One score per completion, or None for all after a time-out.

        Raises:
            RewardError: the function raised, its process ended, or it did not return one number or
                None for each.
        """
        return self._scores(arguments, self._answer(arguments))

    def _answer(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """What the function's process answers; None after a time-out."""
        try:
            return self._process.call(picklable_arguments(arguments), self._spec.timeout_seconds)
        except TimeoutError:
            problem = (
                f"{self._spec.function} did not return within timeoutSeconds = "
                f"{self._spec.timeout_seconds}"
            )
            self._counters.count_timeouts(len(arguments["completions"]), problem)
            return None
        except FunctionFailed as failure:
            problem = f"{self._spec.function} failed: {failure}"
            raise reward_error(
                self.__name__, current_step(arguments), problem, failure.sample
            ) from failure

    def _scores(self, arguments: dict[str, Any], answer: dict[str, Any] | None) -> Scores:
        expected = len(arguments["completions"])
        if answer is None:
            return [None] * expected
        if log_metric := arguments.get("log_metric"):
            for name, values in answer.get("metrics", {}).items():
                for value in values:
                    log_metric(name, value)
        if log_extra := arguments.get("log_extra"):
            for column, values in answer.get("extra", {}).items():
                log_extra(column, values)
        return checked_scores(
            answer["scores"], name=self.__name__, step=current_step(arguments), expected=expected
        )


class AsyncPythonFunction(PythonFunction):
    """A user's `async def` as a reward: TRL awaits it together with the other async rewards."""

    async def __call__(self, **arguments: Any) -> Scores:  # type: ignore[override]  # TRL asks which of the two it is
        """As PythonFunction; the wait for the process is off the event loop."""
        return self._scores(arguments, await asyncio.to_thread(self._answer, arguments))


def python_function(
    name: str, spec: PythonReward, counters: RewardCounters, folder: Path
) -> PythonFunction:
    """The function of a `python` reward; `folder` is where its ConfigMap is mounted.

    Raises:
        BadInput: the function can't be imported.
    """
    try:
        process = FunctionProcess(spec.function, folder if spec.config_map else None)
    except BadInput as error:
        raise BadInput(
            f"reward {name!r}: python.function {error}; {where_message(spec, folder)}"
        ) from error
    return (AsyncPythonFunction if process.is_async else PythonFunction)(
        name, spec, counters, process
    )


def where_message(spec: PythonReward, folder: Path | None) -> str:
    """Where a function's module should be, and which files are there."""
    if spec.config_map is None or folder is None:
        return "check that the image has it, or name a ConfigMap with it in python.configMap"
    names = sorted(path.name for path in folder.glob("*.py"))[:_MAX_NAMES]
    present = ", ".join(names) or "no .py file"
    return (
        f"ConfigMap {spec.config_map.name!r} has {present}: write MODULE:FUNCTION of a file in it, "
        "or of a module of the image"
    )


def picklable_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """TRL's arguments without its hooks, and with the plain values of its trainer_state."""
    state = arguments.get("trainer_state")
    fields = vars(state) if state is not None else {}
    plain = {key: value for key, value in fields.items() if isinstance(value, _PLAIN)}
    columns = {
        name: value for name, value in arguments.items() if name not in ("log_metric", "log_extra")
    }
    return {**columns, "trainer_state": plain}
