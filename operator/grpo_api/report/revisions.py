"""What a run is made of: commits of the hub, and stretches of its data.

A module of its own, since every plan names them and few commands read reports, whose types take
long to build.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ..text.base import Model
from ..text.quantity import Count

RevisionKey = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[a-z][\[\].a-zA-Z0-9]*$")
]
Revisions = Annotated[
    dict[
        RevisionKey, Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
    ],
    Field(max_length=40),
]
"""What a run was found to be made of: commits on the hub by path in the spec (`model`, `dataset`,
`rewards[0].model`), and the data's DATASET_FINGERPRINT."""
DATASET_FINGERPRINT = "dataset.fingerprint"
"""Key of the sha256 of the rows that are trained on."""


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
