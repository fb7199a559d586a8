"""The ends of an engine that does not come to its first completions.

vLLM has no exception of its own for it. Settings that do not fit raise ValueError, kernels that do
not compile RuntimeError, and a worker without a method AttributeError. So what it raises until it
has sampled once is taken for a failed start, and only what has another known cause is not.

A hang and a signal raise nothing. The frame of start_engine in the stack of the main thread shows
them (process/watchdog.py).
"""

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from grpo_api.report.report import Result
from grpo_api.spec.generation import GenerationSpec

from ..runtime.errors import (
    BadInput,
    EngineNotStarted,
    TrainingError,
    classify_error,
    is_lost_peer,
)

T = TypeVar("T")

MAX_TEXT = 800
"""Characters of vLLM's own text in a message."""
_NO_ROOM = re.compile(r"Free memory on device .* GPU memory utilization \([^()]*, ([\d.]+ GiB)\)")
"""What vLLM says before it allocates anything, and how much the engine takes (v1/worker/utils.py,
request_memory)."""


def start_engine(step: Callable[[], T]) -> T:
    """Run a step of the start and return its result.

    Raises:
        EngineNotStarted: vLLM raised an error. Our own errors, a want of memory and a lost rank
            stay as they are.
        torch.OutOfMemoryError: the GPU has less free memory than the engine takes.
    """
    try:
        return step()
    except Exception as error:
        has_known_cause = isinstance(error, TrainingError) or is_lost_peer(error)
        if has_known_cause or classify_error(error)[0] is Result.OUT_OF_MEMORY:
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"vLLM did not start: {text[:MAX_TEXT]}"
        # Another engine would lack the room, too; a plan with a smaller one does not.
        if wanted := _NO_ROOM.search(text):
            raise torch.OutOfMemoryError(f"{message} Tried to allocate {wanted[1]}") from error
        raise EngineNotStarted(message) from error


def error_for_choice(error: EngineNotStarted, generation: GenerationSpec) -> TrainingError:
    """The error as it is where Transformers may sample instead; else BadInput, which the user has
    to answer."""
    return error if generation.fallback == "Auto" else BadInput(str(error))
