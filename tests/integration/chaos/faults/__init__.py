"""All faults by kind, each with its weight in the draw."""

from . import api, content, deletions, ends, kills, wishes
from .base import Fault

FAULTS: tuple[Fault, ...] = (
    *kills.FAULTS, *ends.FAULTS, *content.FAULTS, *api.FAULTS, *deletions.FAULTS, *wishes.FAULTS,
)  # fmt: skip
