"""The ends of a training process as exceptions, each with the Result that the operator acts on.

    TrainingError
    ├── BadInput            the plan, model, data or checkpoint can't be used as declared; a restart won't help
    ├── WeightsDiffer       ranks or restarts don't hold the weights that they should
    ├── RewardError         a reward function failed
    ├── RendezvousTimeout   the peers did not come
    ├── DivergedKL          guard.maxKL was exceeded
    ├── Hang                no step finished for guard.hangTimeoutSeconds
    └── Preempted           SIGTERM

Exists so that whoever finds a problem names its class where it is found. Raised all over the trainer; only
`__main__` turns it into an Outcome and an exit code.
"""

from grpo_api.report import Result


class TrainingError(Exception):
    """A known end of a training process; the message is a sentence that a user can act on."""

    result: Result = Result.ERROR


class BadInput(TrainingError):
    """The plan, model, data or checkpoint can't be used as declared."""

    result = Result.BAD_INPUT


class WeightsDiffer(TrainingError):
    """A rank's weights are not the ones that the run must start from."""

    result = Result.WEIGHTS_DIFFER


class RewardError(TrainingError):
    """A reward function raised, or failed for too large a share of a step."""

    result = Result.REWARD_ERROR


class RendezvousTimeout(TrainingError):
    """The process group did not form in time."""

    result = Result.RENDEZVOUS_TIMEOUT


class DivergedKL(TrainingError):
    """The KL stayed above guard.maxKL."""

    result = Result.DIVERGED_KL


class Hang(TrainingError):
    """No optimizer step finished for guard.hangTimeoutSeconds."""

    result = Result.HANG


class Preempted(TrainingError):
    """The pod was told to stop; the run continues from its last checkpoint."""

    result = Result.PREEMPTED
