"""Reads the plan of a pod, the one input of everything that runs in it."""

import os
from pathlib import Path

from pydantic import ValidationError

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.base import dotted_path
from grpo_api.text.contract import PLAN_ENV, PLAN_PATH

from .errors import BadInput


def read_plan() -> TrainingPlan:
    """Return the plan that the pod was given.

    Raises:
        BadInput: the file is missing, no JSON, or doesn't fit this trainer's schema; all errors at
            once.
    """
    path = Path(os.environ.get(PLAN_ENV, PLAN_PATH))
    try:
        return TrainingPlan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(
            f"the plan {path} can't be read: {error.strerror}; set {PLAN_ENV} to its path"
        ) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{dotted_path(item['loc'])}: {item['msg']}" for item in error.errors()
        )
        raise BadInput(
            f"the plan {path} doesn't fit this trainer: {problems}. Do image and operator match?"
        ) from error
