"""What the live trainer does when the plan asks to save memory: its own optimizer, model and engine
are looked at.

An argument that reaches a configuration may still be ignored. `observed` runs in one process and as
part of a gang, where ZeRO-3's savers can be seen.
"""

import math
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.optim import GlobalOptimManager
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback

from grpo_api.plan.plan import TrainingPlan
from grpo_trainer.gang import ranks
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights.parameters import shape

from ..ranks import demo_model, runs

STEPS = 2
States = dict[str, torch.Tensor]


def zero3(folder: Path) -> dict[str, Any]:
    """ZeRO-3's savers on and off. Collective."""
    model = folder / "model"
    if ranks.rank() == 0:
        demo_model.save_policy(model)
    ranks.gather(0)
    savings = {"gatherForGeneration": False, "offload": "CPU", "gradientCheckpointing": True}
    return {
        name: observed(
            runs.plan(model, "Sharded", 3, 2, execution=execution, training={"maxSteps": STEPS}),
            folder,
        )
        for name, execution in {"off": {}, "on": savings}.items()
    }


def observed(job: TrainingPlan, folder: Path) -> dict[str, Any]:
    """Facts of a run of the job."""
    runs.reset()
    # bitsandbytes keeps 32-bit overrides by a parameter's index for all optimizers of a process; a
    # pod has one only.
    GlobalOptimManager.get_instance().initialize()
    trainer = runs.build(job, output_dir=str(folder / "output"), save_strategy="no")
    counts = watch(trainer)
    trainer.train()
    engine = getattr(trainer.model_wrapped, "optimizer", None)
    return counts | {
        "optimizer": type(innermost(trainer.optimizer)).__module__.split(".")[0],
        "state_dtypes": state_dtypes(trainer),
        "state_bytes": state_bytes(trainer),
        "checkpointing": trainer.model.is_gradient_checkpointing,
        "largest": sizes(trainer)[:2],
        "elements": sum(sizes(trainer)),
        "optimizer_offload": bool(getattr(engine, "offload_optimizer", False)),
    }


def resumed_states(
    job: TrainingPlan, folder: Path, step: int
) -> tuple[States, States, dict[str, Any]]:
    """The optimizer's tensors when a run saves after `step` and when another continues from there,
    and what both log in the steps that follow."""
    keeper, rows = KeepStates(), {}
    for name, checkpoint in {
        "uninterrupted": None,
        "resumed": str(folder / f"checkpoint-{step}"),
    }.items():
        runs.reset()
        GlobalOptimManager.get_instance().initialize()
        logs = runs.Logs()
        settings = {"output_dir": str(folder), "save_strategy": "steps", "save_steps": step}
        trainer = runs.build(job, logs, keeper, **settings)
        keeper.trainer = trainer
        trainer.train(resume_from_checkpoint=checkpoint)
        rows[name] = logs.numbers(step + 1, job.training.max_steps or 0)
    runs.reset()
    return keeper.states_by_step[step][0], keeper.states_by_step[step][-1], rows


class KeepStates(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Copies the optimizer's tensors when a run saves and when it begins, by step."""

    trainer: ReferenceGRPOTrainer

    def __init__(self) -> None:
        self.states_by_step: dict[int, list[States]] = {}

    def on_save(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """After a checkpoint."""
        self._keep(state.global_step)

    def on_train_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """After a resume."""
        self._keep(state.global_step)

    def _keep(self, step: int) -> None:
        names = {parameter: name for name, parameter in self.trainer.model.named_parameters()}
        states = {
            f"{kind} {names[parameter]}": value.clone()
            for parameter, state in innermost(self.trainer.optimizer).state.items()
            for kind, value in state.items()
            if isinstance(value, torch.Tensor) and not kind.startswith("qmap")
        }
        self.states_by_step.setdefault(step, []).append(states)


def watch(trainer: ReferenceGRPOTrainer) -> dict[str, list[int]]:
    """Lists that fill while the trainer runs: rows of each call that begins a generation, ZeRO's
    hooks on a matrix of the last layer then (TRL takes them off while everything is gathered), the
    most elements that were whole on this rank at once in each of the generation's passes, and the
    steps in which that layer ran again during backward."""
    counts: dict[str, list[int]] = {
        "generated_rows": [],
        "zero_hooks": [],
        "live_elements": [],
        "recomputed": [],
    }
    model = (
        trainer.model.get_base_model() if isinstance(trainer.model, PeftModel) else trainer.model
    )
    layer = model.get_submodule("model.layers.1")

    def begins(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids")
        if (
            not torch.is_grad_enabled()
            and kwargs.get("use_cache")
            and tokens is not None
            and tokens.shape[1] > 1
        ):
            counts["generated_rows"].append(len(tokens))
            counts["zero_hooks"].append(len(layer.mlp.down_proj._forward_pre_hooks))
        if not torch.is_grad_enabled() and kwargs.get("use_cache"):
            counts["live_elements"].append(0)

    def ends(*_: Any) -> None:
        if not torch.is_grad_enabled() and counts["live_elements"]:
            counts["live_elements"][-1] = max(
                counts["live_elements"][-1], live_elements(trainer.model)
            )

    def passes(*_: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:
            counts["recomputed"].append(trainer.state.global_step)

    model.get_submodule("model").register_forward_pre_hook(begins, with_kwargs=True)
    for module in trainer.model.modules():
        if not list(module.children()):
            module.register_forward_hook(ends)
    layer.mlp.register_forward_pre_hook(
        passes
    )  # inside: the layer's own hooks are not part of its recomputation
    return counts


def live_elements(model: nn.Module) -> int:
    """Elements of a model's partitioned parameters that are whole, or on their way, on this
    rank."""
    parameters: list[Any] = [
        parameter for parameter in model.parameters() if hasattr(parameter, "ds_status")
    ]
    return sum(
        parameter.ds_numel
        for parameter in parameters
        if parameter.ds_status.name != "NOT_AVAILABLE"
    )


def sizes(trainer: ReferenceGRPOTrainer) -> list[int]:
    """Elements of the policy's parameters, the largest first."""
    return sorted(
        (math.prod(shape(parameter)) for parameter in trainer.model.parameters()), reverse=True
    )


def innermost(optimizer: Any) -> Any:
    """The optimizer inside accelerate's and DeepSpeed's."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


def state_bytes(trainer: ReferenceGRPOTrainer) -> int:
    """Bytes of all moments and their scales; the 8-bit code books, one kilobyte each for all
    tensors, aside."""
    moments = ("state1", "state2", "absmax1", "absmax2", "exp_avg", "exp_avg_sq")
    states = innermost(trainer.optimizer).state.values()
    return sum(state[name].nbytes for state in states for name in moments if name in state)


def state_dtypes(trainer: ReferenceGRPOTrainer) -> dict[str, list[str]]:
    """Dtypes of both moments by kind of parameter: embedding, matrix (at least 4096 elements) and
    small."""
    dtypes_by_kind: dict[str, set[str]] = {}
    embedding = trainer.model.get_input_embeddings().weight
    for parameter, state in innermost(trainer.optimizer).state.items():
        kind = (
            "embedding"
            if parameter is embedding
            else "matrix"
            if parameter.numel() >= 4096
            else "small"
        )
        moments = {
            str(state[name].dtype)
            for name in ("state1", "state2", "exp_avg", "exp_avg_sq")
            if name in state
        }
        dtypes_by_kind.setdefault(kind, set()).update(moments)
    return {kind: sorted(dtypes) for kind, dtypes in dtypes_by_kind.items()}
