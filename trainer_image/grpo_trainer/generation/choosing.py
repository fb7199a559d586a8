"""Which engine the plan has: one interface, and what is made of it where the policy doesn't sample by itself."""

from collections.abc import Callable

from torch import nn

from grpo_api.plan.plan import TrainingPlan

from ..process.recorder import Recorder
from ..telemetry.observer import StepObserver
from ..weights.models import Source
from .base import EngineGeneration, EngineSetup
from .colocated import ColocatedGeneration
from .servers import ServersGeneration


def engine_maker(
    plan: TrainingPlan, source: Source, observer: StepObserver, recorder: Recorder
) -> Callable[[nn.Module, list[int]], EngineGeneration] | None:
    """Makes the plan's engine of the policy and the tokens that end a completion; None for Transformers."""
    if plan.execution.engine is None:
        return None
    setup = EngineSetup(plan, source.folder, observer.clock, recorder.logged, recorder.event)
    kind = ServersGeneration if plan.execution.engine.kind == "Servers" else ColocatedGeneration
    return lambda model, stop_tokens: kind(setup, model, stop_tokens)
