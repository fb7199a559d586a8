"""Stretches of the data that a run trains on, in its order."""

from typing import Self

from pydantic import model_validator

from ..text.base import Model
from ..text.quantity import Count


class Generations(Model):
    """Generations that follow each other in the order of the data, which begins with 0 in the first
    pass and goes on through all passes. A generation is the prompts that the policy answers at
    once."""

    first: Count
    """The first of them."""
    last: Count
    """The last of them; the first again where there is one."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"last {self.last} is before first {self.first}")
        return self
