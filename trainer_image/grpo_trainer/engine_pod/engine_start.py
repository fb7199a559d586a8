"""The ends of an engine that does not come to its first completions.

vLLM has no exception of its own for it. Settings that do not fit raise ValueError, kernels that do
not compile RuntimeError, and a worker without a method AttributeError. So what it raises until it
has sampled once is taken for a failed start, and only what has another known cause is not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from grpo_api.report.report import Result
from grpo_api.spec.generation import GenerationSpec

from ..runtime.errors import (
    BadInput,
    EngineNotStarted,
    TrainingError,
    classify_error,
    is_lost_peer,
)

MAX_TEXT = 800
"""Characters of vLLM's own text in a message."""


@contextmanager
def engine_start() -> Iterator[None]:
    """Raise EngineNotStarted for an error of vLLM within the block.

    Our own errors, a want of memory and a lost rank stay as they are.
    """
    try:
        yield
    except Exception as error:
        has_known_cause = isinstance(error, TrainingError) or is_lost_peer(error)
        if has_known_cause or classify_error(error)[0] is Result.OUT_OF_MEMORY:
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise EngineNotStarted(f"vLLM did not start: {text[:MAX_TEXT]}") from error


def error_for_choice(error: EngineNotStarted, generation: GenerationSpec) -> TrainingError:
    """The error as it is where Transformers may sample instead; else BadInput, which the user has
    to answer."""
    return error if generation.fallback == "Auto" else BadInput(str(error))
