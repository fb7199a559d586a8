"""Numbers that are not finite, put into one rank at one moment of one step, and what becomes of the
run.

No input makes a chosen rank's gradient NaN in a chosen step. Runs on every rank of a gang, or in
one process.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.checkpoints.volume_checkpoints import complete
from grpo_trainer.gang import ranks
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.preemption import Preemption
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.errors import TrainingError
from grpo_trainer.runtime.paths import number_in_name
from grpo_trainer.training.guard import LossGuard
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights import parameters
from grpo_trainer.weights.models import load_policy
from tests.support.ranks.checkpoint_plans import claim, seal_checkpoints

from ..ranks import runs
from .fault_facts import PARAMETER, STAGES
from .step_facts import saved_model

MOMENTS = ("reward", "loss", "gradient", "weights", "optimizer")
STEPS, SAVED = 4, 2
"""Steps of a run, and steps between its checkpoints."""
HUGE = 3e38
"""A finite reward whose group's mean is not."""


@dataclass(frozen=True, slots=True)
class Strike:
    """What is not finite, from which step on and where."""

    moment: str
    step: int
    rank: int = 0
    parallelism: str = "1 process"
    beta: float = 0.04
    dtype: str = "float32"

    def hits(self, finished: int) -> bool:
        """Whether the strike hits this rank in the step after `finished` steps."""
        return finished == self.step - 1 and ranks.rank() == self.rank

    @property
    def everywhere(self) -> bool:
        """Whether all ranks are struck: what they all hold, and would notice to differ."""
        return self.parallelism != "ZeRO-3"


def all_of(folder: Path, strikes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What becomes of a run under each of these strikes, on this rank."""
    model = saved_model(folder)
    return [struck(folder, model, Strike(**strike)) for strike in strikes]


def struck(folder: Path, model: Path, strike: Strike) -> dict[str, Any]:
    """How the run ended, which checkpoints it sealed, and whether all that it sealed and holds is
    finite."""
    runs.reset()
    stage, strategy = STAGES[strike.parallelism]
    job = runs.plan(
        model,
        strategy if strike.beta else "None",
        stage,
        ranks.world_size(),
        training={"beta": strike.beta, "maxSteps": STEPS, "scaleRewards": "none"},
        execution={"saveEverySteps": SAVED, "dtype": strike.dtype},
        folder=folder / "runs",
    )
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"keep": 1})})
    ranks.run_on_rank0(lambda: claim(job))
    witness = Witness()
    trainer = _trainer(job, strike, witness)
    ended = ""
    try:
        trainer.train()
    except TrainingError as error:
        ended = f"{type(error).__name__}: {error}"
    ranks.gather(0)
    sealed = [number_in_name(checkpoint) for checkpoint in complete(folder / "runs")]
    facts = {
        "ended": ended,
        "sealed": sealed,
        "good": witness.good,
        "finite": finite(trainer),
        **asdict(strike),
    }
    ranks.gather(0)
    if ranks.rank() == 0:
        shutil.rmtree(folder / "runs")
    runs.reset()
    return facts


def _trainer(job: TrainingPlan, strike: Strike, witness: "Witness") -> ReferenceGRPOTrainer:
    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        scores = runs.digits(completions)
        if strike.moment == "reward" and strike.hits(trainer_state.global_step):
            scores[:2] = HUGE, HUGE
        return scores

    seal = seal_checkpoints(
        job,
        {},
        Recorder(job.job.attempt, Placement(0, 0, 1, 1), 0.0),
        Preemption(60.0, can_save=True),
    )
    config = runs.configuration(job)
    loaded = load_policy(job.model, job.execution, job.adapter)
    trainer = runs.trainer(
        job, config, loaded, Damage(strike), seal, witness, LossGuard(), rewards=reward
    )
    trainer.save, witness.trainer = seal.save, trainer
    real = trainer._compute_loss

    def compute(*args: Any) -> torch.Tensor:
        loss = real(*args)
        if not strike.hits(trainer.state.global_step):
            return loss
        function: Any = {"loss": InfiniteLoss, "gradient": NoGradient}.get(strike.moment)
        spoiled: torch.Tensor = function.apply(loss) if function else loss
        return spoiled

    patched: Any = trainer
    patched._compute_loss = compute
    return trainer


class InfiniteLoss(torch.autograd.Function):
    """An infinite loss with the gradient of the true one."""

    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        """Infinity."""
        return torch.full_like(loss, torch.inf)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The same."""
        return gradient


class NoGradient(torch.autograd.Function):
    """A true loss whose gradient is NaN."""

    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        """The same."""
        return loss.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """NaN."""
        return torch.full_like(gradient, torch.nan)


class Damage(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Puts a NaN into what is held after the optimizer's step and before the checkpoint."""

    def __init__(self, strike: Strike) -> None:
        self._strike = strike

    def on_step_end(
        self, _: Any, state: Any, *__: Any, model: Any, optimizer: Any, **___: Any
    ) -> None:
        """Into a weight, or into a moment of Adam."""
        if state.global_step != self._strike.step or not (
            self._strike.everywhere or ranks.rank() == self._strike.rank
        ):
            return
        if self._strike.moment == "weights":
            with parameters.local_share(
                parameters.unwrap_model(model).get_parameter(PARAMETER)
            ) as share:
                share.tensor[-1:] = torch.nan
        elif self._strike.moment == "optimizer":
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            next(iter(optimizer.state.values()))["exp_avg"].view(-1)[:1] = torch.inf


class Witness(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Looks at what was sealed, at the moment when it was."""

    def __init__(self) -> None:
        self.trainer: ReferenceGRPOTrainer | None = None
        self.good = True

    def on_save(self, *_: Any, **__: Any) -> None:
        """After the seal, which stands before in the list."""
        assert self.trainer is not None
        self.good = self.good and finite(self.trainer)


def finite(trainer: ReferenceGRPOTrainer) -> bool:
    """Whether all that this rank holds is finite."""
    return all(torch.isfinite(tensor).all().item() for tensor in _held(trainer))


def _held(trainer: ReferenceGRPOTrainer) -> Iterator[torch.Tensor]:
    for parameter in trainer.model.parameters():
        with parameters.local_share(parameter) as share:
            yield share.tensor
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
