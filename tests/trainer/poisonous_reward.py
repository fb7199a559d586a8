"""A `python` reward that is finite and far too large for one prompt, so that a run diverges when it
comes to that."""

from typing import Any

POISON = "say poison"


def digits(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Share of digits in each completion."""
    return [
        3e38 if prompt == POISON else sum(letter.isdigit() for letter in completion) / 8
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
