"""What a resumed run takes from its plan, where transformers goes on with what the checkpoint says.

checkpoint.everySteps may change between two attempts, and a run that begins with another's checkpoint may go further,
so that its learning rate falls more slowly: the other's last rate is often zero.
"""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class FollowPlan(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Puts the plan's interval and schedule back in force; in a run with the checkpoint's own plan nothing changes."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, *, lr_scheduler: Any, **_: Any
    ) -> None:
        """The checkpoint is loaded, and no step is taken yet."""
        # transformers has restored the intervals of the checkpoint, and the plan's may differ.
        state.compute_steps(args, state.max_steps)
        # Under ZeRO the scheduler is inside accelerate's wrapper.
        while not isinstance(lr_scheduler, LambdaLR):
            lr_scheduler = lr_scheduler.scheduler
        follow(lr_scheduler)


def follow(scheduler: LambdaLR) -> None:
    """Set the rate of the next step to what the schedule says of it; every schedule of spec.training is a LambdaLR."""
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": rates})
