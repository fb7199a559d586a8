"""Where the trackers' packages are: in a folder of the image that only their own processes see.

TRL imports wandb and trackio wherever it finds them, and a training process must not depend on what
they do then. The folder comes last on the path, so that it shadows no package of the trainer's.
"""

import os
import sys
from importlib.machinery import PathFinder

from grpo_api.spec.tracking import TrackerName
from grpo_api.text.contract import TRACKERS_ENV, TRACKERS_FOLDER

_MODULES: dict[TrackerName, str] = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    # The package `tensorboard` has its writer in torch, which takes 470 MiB to import.
    "tensorboard": "tensorboardX",
}


def search_path() -> list[str]:
    """sys.path with the trackers' folder at its end."""
    return [*sys.path, os.environ.get(TRACKERS_ENV, TRACKERS_FOLDER)]


def has_package(tracker: TrackerName) -> bool:
    """Whether the image has the tracker's package; imports nothing."""
    return PathFinder.find_spec(_MODULES[tracker], search_path()) is not None
