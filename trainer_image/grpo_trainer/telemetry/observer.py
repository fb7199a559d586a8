"""What the engine shows of a step while it runs: the phase clock, and a few completions with their rewards.

The engine, which touches TRL's private names, writes here and knows nothing else of telemetry.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from grpo_api.report.training_metrics import WEIGHTS_VERSION

from .phases import PhaseClock

SAMPLES = 3
"""Completions kept of a generation."""
SAMPLE_CHARACTERS = 600
"""Longest prompt and completion text of a sample; the middle is cut out."""


class StepObserver:
    """The live view of a step."""

    def __init__(self) -> None:
        self.clock = PhaseClock(time.perf_counter)
        self.samples: list[dict[str, str | float]] = []
        """The last generation's samples: prompt, completion and one number per reward function."""
        self.weights_versions: Sequence[int] = ()
        """Numbers of the weights that an engine sampled the last generation's completions with, one for each; none
        where the policy samples."""
        self.scored = 0
        """Completions of this process that were put to the reward functions since it started."""

    def completed(
        self, prompts: Sequence[Any], completions: Sequence[Any], rewards: torch.Tensor, names: Sequence[str]
    ) -> None:
        """Count the completions of a generation, and keep a few, of different prompts where there are any.

        Args:
            prompts: texts or chats of this process.
            completions: texts or chats, one per prompt.
            rewards: shape (completions, reward functions), NaN where a function gave none.
            names: of the reward functions.
        """
        self.scored += len(completions)
        chosen = spread(len(completions), SAMPLES)
        scores = rewards[chosen].tolist() if chosen else []
        samples: list[dict[str, str | float]] = []
        for index, row in zip(chosen, scores, strict=True):
            sample: dict[str, str | float] = {"prompt": shown(prompts[index])}
            sample["completion"] = shown(completions[index])
            # A reward function that gave no score has NaN here.
            sample |= {name: score for name, score in zip(names, row, strict=True) if not math.isnan(score)}
            if self.weights_versions:
                sample[WEIGHTS_VERSION.key] = float(self.weights_versions[index])
            samples.append(sample)
        self.samples = samples


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` positions spread over `count`: completions of one prompt stand together."""
    if count < wanted:
        return list(range(count))
    return [index * count // wanted for index in range(wanted)]


def shown(text: Any) -> str:
    """A prompt or completion as bounded text; of a chat the last message."""
    whole = text if isinstance(text, str) else str(text[-1]["content"])
    half = SAMPLE_CHARACTERS // 2
    return whole if len(whole) <= SAMPLE_CHARACTERS else f"{whole[:half]} […] {whole[-half:]}"
