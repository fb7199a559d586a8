"""Compares answers as mathematics, by math-verify (LaTeX and plain expressions, sets, intervals,
fractions, percent).

Runs in a process of its own only: math-verify's time-outs use SIGALRM, which a run-away
multiplication of integers never looks at.
"""

import logging
from typing import Any

from math_verify import parse, verify

# It warns that its time-outs are off: ours is the process's.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def compare_answers(completions: list[str], expected: list[str], **_: Any) -> list[float]:
    """1 for each completion (an answer, without the words around it) that equals the expected one,
    else 0."""
    return [
        float(_is_same_answer(answer, right))
        for answer, right in zip(completions, expected, strict=True)
    ]


def _is_same_answer(answer: str, expected: str) -> bool:
    return bool(verify(_parse_answer(expected), _parse_answer(answer), timeout_seconds=None))


def _parse_answer(answer: str) -> Any:
    """The expression of an answer; with dollar signs math-verify takes the whole text as one."""
    return parse(f"${answer.strip().strip('$')}$", parsing_timeout=None)


# Builds math-verify's tables now, not on the clock of the first answer.
_is_same_answer("1/2", r"\frac{1}{2}")
