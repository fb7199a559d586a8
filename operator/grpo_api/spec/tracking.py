"""`spec.tracking`: the experiment trackers that follow a run, each in the words of its own
documentation.

Several may be set together. A tracker never decides anything: a run goes on without it.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ..text.base import Model, exactly_one
from ..text.names import DataKey, LocalObjectReference, Path, ServiceURL
from ..text.quantity import PATTERN_HINT
from .checkpoint import HubRepository

TrackerName = Literal["wandb", "mlflow", "trackio", "tensorboard"]
"""As transformers' `report_to` names them; each is a field of TrackingSpec."""
TABLE_TRACKERS: tuple[TrackerName, ...] = ("wandb", "trackio")
"""Those to which TRL sends completions (`log_completions`), as a table."""

_Text = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
_PROJECT = r"^[^/\\#?%:\x00-\x1f\x7f]+$"
"""W&B refuses other names: its pages have them in their address."""
_Project = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=_PROJECT,
        json_schema_extra={PATTERN_HINT: "write a name without / \\ # ? % and :"},
    ),
]


class TokenSelector(LocalObjectReference):
    """One key of a Secret. Pods start without it, since a run does not need its tracker."""

    key: DataKey
    """Key inside it."""


class WandbTracking(Model):
    """Weights & Biases."""

    project: _Project
    """Project of the run."""
    entity: Annotated[str, Field(max_length=128, pattern=r"^[-_a-zA-Z0-9]+$")] | None = None
    """Owner of the project. Unset: the API key's default."""
    url: ServiceURL | None = None
    """W&B server. Unset: https://api.wandb.ai."""
    token_secret_ref: TokenSelector
    """API key."""


class MLflowTracking(Model):
    """MLflow."""

    url: ServiceURL
    """Tracking server."""
    experiment: _Text = "Default"
    """Created if it is missing. Unset: Default."""
    token_secret_ref: TokenSelector | None = None
    """Bearer token. Unset: none."""


class TrackioTracking(Model):
    """Trackio."""

    RULES = (exactly_one("space", "url"),)

    project: _Project
    """Project of the run."""
    space: HubRepository | None = None
    """Space such as `team/training`, created private. Unset: `url`."""
    url: ServiceURL | None = None
    """Own server. Unset: `space`."""
    token_secret_ref: TokenSelector
    """Hub token that may write to the Space, or the server's."""


class TensorboardTracking(Model):
    """TensorBoard's event files."""

    directory: Path | None = None
    """Folder of a mounted volume. Unset: `tensorboard` beside the checkpoints."""


Tracker = WandbTracking | MLflowTracking | TrackioTracking | TensorboardTracking


class TrackingSpec(Model):
    """Experiment trackers."""

    run_name: _Text | None = None
    """Name of the run. Unset: namespace/name of the job."""
    samples: bool = False
    """Send samples to wandb and trackio, too. Unset: false."""
    wandb: WandbTracking | None = None
    """Unset: not used."""
    mlflow: MLflowTracking | None = None
    """Unset: not used."""
    trackio: TrackioTracking | None = None
    """Unset: not used."""
    tensorboard: TensorboardTracking | None = None
    """Unset: not used."""

    @property
    def trackers(self) -> Iterator[tuple[TrackerName, Tracker]]:
        """Those that are set, in the order of the fields."""
        settings: tuple[tuple[TrackerName, Tracker | None], ...] = (
            ("wandb", self.wandb),
            ("mlflow", self.mlflow),
            ("trackio", self.trackio),
            ("tensorboard", self.tensorboard),
        )
        return ((name, tracker) for name, tracker in settings if tracker is not None)


def token_of(tracker: Tracker) -> TokenSelector | None:
    """The Secret with the tracker's token, if it has one."""
    return None if isinstance(tracker, TensorboardTracking) else tracker.token_secret_ref
