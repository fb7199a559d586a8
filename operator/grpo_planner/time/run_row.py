"""A run as one row: what ran, on what, how long its completions were, and the seconds of its parts.

Published runs (calibration.yaml) and those that were measured on a cluster have the same fields, so
that one can be held against the other.
"""

from typing import Annotated, Literal

from pydantic import Field

from grpo_api.text.base import Model
from grpo_api.text.quantity import MAX_COUNT

Part = Literal["step", "training", "generation", "scoring", "sync", "token"]
"""What was timed: a whole step, its update, its sampling, its log-probabilities, one sync of
weights, or one decoded token of all sequences."""

Seconds = Annotated[float, Field(ge=1e-6, le=1e9)]
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class RunRow(Model):
    """One run."""

    source: Annotated[str, Field(min_length=1, max_length=320)]
    """Where its numbers are from: the key of a publication, or `namespace/job`."""
    model: Annotated[str, Field(min_length=1, max_length=512)]
    gpu: Annotated[str, Field(min_length=1, max_length=128)]
    """Label of the GPU product; `CPU` for a run on CPUs."""
    gpus: _Positive
    """GPUs that trained, or processes on CPUs."""
    sequences: _Positive
    """Completions of one step; for a token, those that are decoded at a time."""
    prompt: _Count
    completion: _Positive
    """Mean tokens of a completion."""
    limit: _Positive
    updates: _Positive = 1
    """Optimizer steps on these completions."""
    scores: _Count = 0
    """Passes for log-probabilities beside the update."""
    recompute: bool = True
    lora: bool = False
    zero: Literal[0, 2, 3] = 3
    split: _Positive = 1
    """GPUs that share one copy of the model beside ZeRO: tensor and pipeline parallelism."""
    tensor_parallel: _Positive = 1
    """GPUs of one engine."""
    graphs: bool = True
    """Whether the engine has CUDA graphs."""
    pass_tokens: _Positive = 16384
    """Tokens of one packed micro-batch."""
    seconds: dict[Part, Seconds]
