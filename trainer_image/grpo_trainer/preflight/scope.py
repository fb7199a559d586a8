"""What the checks of one preflight share, and how much it does where it runs: in a pod of its own,
at the start of rank 0, on a laptop."""

from dataclasses import dataclass, replace

from huggingface_hub import get_token

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.names import SecretKeySelector

from ..hub.repositories import Hub
from .findings import Findings, NotChecked


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The limits of one preflight."""

    most_rows: int
    """Rows of the dataset that are read."""
    wait_seconds: float
    """Longest wait for a hub or a store that does not answer."""
    reward_seconds: float
    """Time for all rewards together."""
    render_seconds: float = 60.0
    """Time for the chat template on all prompts; two thousand take less than a second."""
    is_whole: bool = True
    """False leaves out what is slow or needs transformers, which imports torch wherever that is not
    hidden: tokenizer, shape of the model, reward services, first rows of a hub's dataset."""
    is_in_cluster: bool = True
    """False on a laptop, which has neither the mounts nor the secrets of the job."""


POD = Scope(most_rows=2000, wait_seconds=15.0, reward_seconds=120.0)
LAPTOP = replace(POD, is_in_cluster=False)
RANK_0 = Scope(most_rows=200, wait_seconds=5.0, reward_seconds=1.0, is_whole=False)
"""Training makes the other checks itself, seconds later; only what is known at once is worth the
time of all GPUs."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """One preflight: what it checks, how far it goes, and what it has found."""

    plan: TrainingPlan
    scope: Scope
    hub: Hub
    findings: Findings

    def require_input(self, what: str, *, is_there: bool) -> None:
        """Leave out what only a pod of the job has.

        Raises:
            NotChecked: this is a laptop, and it is not there.
        """
        if not self.scope.is_in_cluster and not is_there:
            raise NotChecked(f"{what} is in the cluster only; add --in-cluster")

    def require_token(self, field: str, secret: SecretKeySelector | None) -> None:
        """Ask the hub for nothing that needs a token which only a pod of the job has.

        Raises:
            NotChecked: as require_input.
        """
        is_there = secret is None or get_token() is not None
        self.require_input(f"the Secret of {field}", is_there=is_there)
