"""The stored errors of the fit: errors.yaml, which docs/internals/step-times.md shows."""

from functools import cache

from grpo_api.text.base import Model

from ..tables import read_data


class Errors(Model):
    """How far predictions were from what was published."""

    count: int
    """Published numbers."""
    median: float
    """Factor that half of them are within."""
    near: float
    """Share of them within 1.5 times."""
    worst: float
    """Largest factor."""
    bias: float
    """Median of predicted by published."""


class FitErrors(Model):
    """The errors of predictions by fits that knew neither source nor model of the run."""

    parts: dict[str, Errors]
    """By what was timed."""
    left_out: dict[str, Errors]
    """By source and model."""


@cache
def stored_errors() -> FitErrors:
    """The errors as the last fit stored them."""
    return FitErrors.model_validate(read_data(__package__, "errors.yaml"))
