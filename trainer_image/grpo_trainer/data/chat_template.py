"""Chat templates: is one well formed, and what is wrong where one fails on a prompt.

Both answers name the line. A template is a program of the user's, so any exception may come out of
it, and it may take as long as it likes.
"""

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..runtime.errors import BadInput

FIELD = "spec.model.chatTemplate"
_FILE = "<template>"
"""Name of a template's frames in a traceback (jinja2/environment.py)."""


class _Generation(Extension):
    """transformers' block `{% generation %}`, which marks the assistant's tokens."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """The block's own statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def require_template(text: str) -> None:
    """Compile a template as transformers does (utils/chat_template_utils.py), without transformers.

    Raises:
        BadInput: it can't be compiled; with line and cause.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    try:
        environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        problem = str(error.message).rstrip(".")
        raise BadInput(f"{FIELD}: line {error.lineno}: {problem}; correct it") from error
    # Nested too deeply, for Jinja or for Python's own compiler.
    except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
        raise BadInput(f"{FIELD}: it can't be compiled: {error}; make it simpler") from error


def template_problem(error: BaseException) -> str:
    """Why a template failed on a prompt, with the line of it where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _FILE]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{place}{error or type(error).__name__}"


@contextmanager
def render_limit(seconds: float) -> Iterator[None]:
    """Bound the time for rendering in the block; in a main thread alone, which has the signals.

    Raises:
        BadInput: it is over.
    """

    def end(*_: Any) -> None:
        raise BadInput(
            f"{FIELD}: the template was not done with the first prompts after {seconds:g} s; does "
            "a loop of it end?"
        )

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
