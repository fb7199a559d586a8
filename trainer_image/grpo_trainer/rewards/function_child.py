"""The process that runs one user-written reward function, sync or async, for one training process.

Only a process can be ended: a thread that hangs or keeps the GIL would take the training with it.
This is a program of its own (`python -P function_child.py FD PARENT_PID`, see python_function.py).
It imports nothing of ours, so that it starts fast and the user's modules can have any name.

Protocol on the socket FD: the parent sends pickles (rows contain dates and the like), and the child
answers JSON. The parent never unpickles what user code made. First `{path, function}` → `{"async":
bool}` or `{"problem"}`; then, per batch, the function's arguments → `{"scores", "metrics",
"extra"}`, or `{"problem"}` and after it `{"sample"}`.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_PR_SET_PDEATHSIG = 1
_TRACE_LINES = 6
_MAX_NAMES = 8

Arguments = dict[str, Any]


class _Answer(dict[str, Any]):
    """What goes back for one batch; collects what the function logs through TRL's hooks."""

    def log_metric(self, name: str, value: float) -> None:
        self.setdefault("metrics", {}).setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: list[Any]) -> None:
        self.setdefault("extra", {}).setdefault(column, []).extend(values)


def main() -> None:
    """Serve the parent until it closes the socket."""
    _die_with(int(sys.argv[2]))
    with Connection(int(sys.argv[1])) as parent:
        try:
            function = _ready(parent)
            while True:
                _serve(parent, function, parent.recv())
        except EOFError:
            return


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent's thread dies: user code that hangs can't notice a
    closed socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the training process ended before its reward process began")


def _ready(parent: Connection) -> Callable[..., Any]:
    """Import the function and say whether it worked."""
    start = parent.recv()
    sys.path[:] = start["path"]
    module, _, name = start["function"].partition(":")
    try:
        function = _find(importlib.import_module(module), name)
        is_async = _is_async(function)
    except Exception as error:
        _send(parent, {"problem": _error_message(error)})
        raise EOFError from error
    _send(parent, {"async": is_async})
    return function


def _find(module: ModuleType, name: str) -> Callable[..., Any]:
    """The module's attribute of that name."""
    if _is_in_place_of_another(module):
        raise ImportError(
            f"Python has a module {module.__name__!r} of its own, which goes before yours; rename "
            f"{module.__name__}.py, such as to my_{module.__name__}.py"
        )
    if not hasattr(module, name):
        functions = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        present = ", ".join(functions[:_MAX_NAMES]) or "no function"
        raise AttributeError(f"module {module.__name__!r} has no {name!r}; it has {present}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def _is_in_place_of_another(module: ModuleType) -> bool:
    """Whether a file of that name comes first on the path, but Python had imported its own."""
    folder = Path(sys.path[0])
    loaded = getattr(module, "__file__", None)
    is_there = (folder / f"{module.__name__}.py").is_file()
    return is_there and (loaded is None or not Path(loaded).is_relative_to(folder))


def _is_async(function: Callable[..., Any]) -> bool:
    if not callable(function):
        raise TypeError(f"{function!r:.80} is not a function")
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def _serve(parent: Connection, function: Callable[..., Any], arguments: Arguments) -> None:
    answer = _Answer()
    try:
        answer["scores"] = _scores(_call_function(function, arguments, answer))
        # What the function has logged may be nothing that JSON has.
        _send(parent, answer)
    except Exception as error:
        _send(parent, {"problem": _error_message(error)})
        _send(parent, {"sample": _failing_sample(function, arguments)})


def _call_function(function: Callable[..., Any], arguments: Arguments, answer: _Answer) -> Any:
    """Call with TRL's signature; a coroutine runs to its end on this process's own event loop."""
    state = SimpleNamespace(**arguments["trainer_state"])
    hooks = {"trainer_state": state, "log_metric": answer.log_metric, "log_extra": answer.log_extra}
    result = function(**{**arguments, **hooks})
    return _loop().run_until_complete(result) if inspect.isawaitable(result) else result


def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the process's life: what a function keeps between batches may be bound to
    it."""
    global _event_loop  # noqa: PLW0603
    if _event_loop is None:
        _event_loop = asyncio.new_event_loop()
    return _event_loop


_event_loop: asyncio.AbstractEventLoop | None = None


def _scores(result: Any) -> list[float | None]:
    """The function's result as JSON can carry it; numbers of numpy and torch become floats."""
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        raise TypeError(
            f"returned {result!r:.80}; return a list with one number or None per completion"
        )
    return [_score(score) for score in result]


def _score(score: Any) -> float | None:
    if score is None:
        return None
    if not hasattr(score, "__float__"):
        raise TypeError(f"returned {score!r:.80} among the rewards; return numbers or None")
    return float(score)


def _failing_sample(function: Callable[..., Any], arguments: Arguments) -> int | None:
    """The first completion on which the function fails alone too; None if it fails only on the
    whole batch."""
    for sample in range(len(arguments["completions"])):
        try:
            _scores(_call_function(function, _slice(arguments, sample), _Answer()))
        except Exception:
            return sample
    return None


def _slice(arguments: Arguments, sample: int) -> Arguments:
    lists = {
        name: value[sample : sample + 1]
        for name, value in arguments.items()
        if isinstance(value, list)
    }
    return {**arguments, **lists}


def _error_message(error: Exception) -> str:
    """The error, and the last lines of its traceback."""
    shown = traceback.TracebackException.from_exception(error)
    # The user can mend nothing in this file.
    frames = [frame for frame in shown.stack if frame.filename != __file__]
    shown.stack = traceback.StackSummary.from_list(frames)
    last = "".join(shown.format()).strip().splitlines()[-_TRACE_LINES:-1]
    return "\n".join([f"{type(error).__name__}: {error}", *last])


def _send(parent: Connection, answer: dict[str, Any]) -> None:
    parent.send_bytes(json.dumps(answer, default=str).encode())


if __name__ == "__main__":
    main()
