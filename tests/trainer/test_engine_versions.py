"""Every completion carries the number of the weights that it was sampled with, also where they were
brought again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from grpo_api.report.training_metrics import ENGINE_PROOF_FAILURES, WEIGHTS_VERSION
from grpo_trainer.generation.generation_base import (
    ATTEMPT_VERSIONS,
    EngineGeneration,
    EngineSetup,
    Sample,
)
from grpo_trainer.runtime.errors import EngineWeightsDiffer
from grpo_trainer.telemetry.phases import PhaseClock
from tests.support.ranks import runs

FIRST = ATTEMPT_VERSIONS + 1
"""Number of the first attempt's first sync."""


class Changing(EngineGeneration):
    """An engine whose weights are others after its first generations, so many times."""

    def __init__(self, losses: int) -> None:
        self.logged: dict[str, float] = {}
        self.losses = losses
        plan, folder = runs.plan(Path("/models/demo")), Path("/models/demo")
        setup = EngineSetup(plan, folder, PhaseClock(lambda: 0.0), self.logged.update, lambda: None)
        super().__init__(setup, nn.Linear(1, 1), [])

    def attempt_sync(self, _: int) -> Sequence[str]:
        """All is well."""
        return ()

    def sample(self, prompts: list[list[int]], *_: Any, **__: Any) -> list[Sample]:
        """Each prompt's first token."""
        assert self.proven_version is not None
        return [Sample(prompt[:1], [0.0], self.proven_version) for prompt in prompts]

    def changed_weights(self) -> Sequence[str]:
        """Whether they are others by now."""
        self.losses -= 1
        return ["k_proj"] if self.losses >= 0 else []


def generated(engine: EngineGeneration) -> Any:
    """The tokens of two completions."""
    return engine.generate([[7], [8]], None, 1)[1]


@pytest.mark.parametrize("losses", [0, 1])
def test_completions_carry_the_number_that_they_were_sampled_with(losses: int) -> None:
    engine = Changing(losses)
    engine.sync_weights()
    assert generated(engine) == [[7], [8]]
    assert engine.versions == [FIRST + losses] * 2
    assert engine.logged == {WEIGHTS_VERSION.key: FIRST + losses, ENGINE_PROOF_FAILURES.key: losses}


def test_no_completion_of_other_weights_is_used() -> None:
    engine = Changing(2)
    with pytest.raises(EngineWeightsDiffer, match="no completion of it was used"):
        generated(engine)
    assert engine.versions == []
