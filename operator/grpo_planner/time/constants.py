"""The constants of the time model, fitted to published runs and stored with their errors.

Each fitted constant has a meaning of its own, so that runs of which none was published can be
predicted. The file calibration.yaml has the runs, and `python -m grpo_codegen.calibration fit`
writes constants.yaml. The page docs/internals/step-times.md shows both with their errors.
"""

from dataclasses import dataclass, field, fields
from functools import cache

from ..tables import read_data


def _meaning(text: str) -> float:
    """A fitted constant with its meaning."""
    value: float = field(metadata={"meaning": text})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the fit to published runs decides."""

    utilisation: float = _meaning("share of the peak FLOP/s that matrix products reach")
    moved_bytes: float = _meaning("bytes moved between products, per width, layer and token")
    expert_bytes: float = _meaning("the same for each expert that a token is sent to")
    blackwell: float = _meaning("share of Hopper's efficiency that Blackwell GPUs reach")
    step_seconds: float = _meaning("seconds of an update beside its products: optimizer, Python")
    lora_passes: float = _meaning("forward passes that forward and backward of LoRA count as")
    read_share: float = _meaning("share of the memory bandwidth that an engine reaches")
    token_seconds: float = _meaning("seconds of one token of all sequences beside its reads")
    sampling_seconds: float = _meaning("seconds per sequence and token to sample of 100,000 words")
    sync_gb_per_s: float = _meaning("GB/s at which weights reach an engine")
    layer_seconds: float = _meaning("seconds to launch a layer's kernels for one micro-batch")
    runaway: float = _meaning("share of completions that run to the limit, whatever the mean")

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """The meaning of each constant, by name."""
        return {each.name: each.metadata["meaning"] for each in fields(cls)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFit:
    """constants.yaml, as `python -m grpo_codegen.calibration fit` writes it."""

    constants: dict[str, float]
    """Constants by name."""
    runs: int
    """Published whole steps that were predicted without their source."""
    low: float
    """Published by predicted, of which one of ten runs is below."""
    high: float
    """The same, of which one of ten runs is above."""
    share: float
    """Mean share of its limit that a published mean length has."""


@cache
def stored_fit() -> StoredFit:
    """The constants, the range of a step and the usual length."""
    return StoredFit(**read_data(__package__, "constants.yaml"))


FITTED = Constants(**stored_fit().constants)
"""The constants that every plan uses."""
