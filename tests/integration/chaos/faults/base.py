"""What a fault is."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from ..world import World

Strike = Callable[[World, random.Random], str]
"""Does it, and tells to what; empty when there was nothing to do it to."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. `disturbs`: the operator can't be expected to keep up while and right
    after it."""

    kind: str
    weight: float
    strike: Strike
    disturbs: bool = False


def name_of(one: dict[str, object]) -> str:
    """`namespace/name` of an object."""
    metadata = one["metadata"]
    assert isinstance(metadata, dict)
    return f"{metadata.get('namespace', '')}/{metadata['name']}"
