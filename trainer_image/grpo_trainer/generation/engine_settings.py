"""What an engine pod takes from its plan: its model's folder and vLLM's arguments."""

from pathlib import Path
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.generation import EnginePlan

from ..errors import BadInput
from ..hub.repositories import Hub, Repository
from .vllm_arguments import vllm_arguments

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
"""What an engine needs of a model's repository: its configuration, and remote code. The weights come from the trainer.
"""
WORKER = "grpo_trainer.generation.receiving.ReceivingWorker"


def engine_plan(plan: TrainingPlan) -> EnginePlan:
    """The plan's engine.

    Raises:
        BadInput: it has none in pods of its own.
    """
    engine = plan.execution.engine
    if engine is None or engine.kind != "Servers" or plan.engines is None:
        raise BadInput("the plan's execution.engine has no engines in pods of their own, but this is such a pod")
    return engine


def model_folder(plan: TrainingPlan, hub: Hub) -> Path:
    """The folder with the model's configuration.

    Raises:
        BadInput: it does not exist.
        Transient: the hub can't be asked now, or there is no room.
    """
    folder = Path(plan.model.name)
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise BadInput(
            f"spec.model.name: folder {folder} does not exist in the engine's pod; mount it with model.volume"
        )
    repository = Repository("model", plan.model.name, plan.model.revision, "model")
    return hub.snapshot(repository, lambda fetch: fetch(SMALL_FILES))[0]


def engine_settings(plan: TrainingPlan, folder: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs, of a plan with engines in pods of their own."""
    return vllm_arguments(plan, folder) | {"worker_extension_cls": WORKER}
