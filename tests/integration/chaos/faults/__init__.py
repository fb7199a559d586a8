"""All faults by kind, each with its weight in the draw."""

from . import api, content, deletions, ends, kills, lies, stops, wishes
from .base import Fault

FAULTS: tuple[Fault, ...] = (
    *kills.FAULTS, *stops.FAULTS, *ends.FAULTS, *content.FAULTS, *lies.FAULTS, *api.FAULTS,
    *deletions.FAULTS,
    *wishes.FAULTS,
)  # fmt: skip
