"""Translates a plan into arguments of GRPOConfig and a DeepSpeed configuration.

Every plan field reaches TRL here, in one place, and without a training library. A test compares
these arguments with what the live trainer was given.
"""

import math
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_api.spec.training import AdapterSpec, TrainingSpec
from grpo_api.spec.trl_places import SAME_NAME
from grpo_api.text.contract import SCRATCH

from ..runtime.paths import attempt_folder

ALL_STEPS = math.nextafter(1.0, 0.0)
"""A warm-up over the whole run: transformers takes `warmup_steps` below 1 as a share of the steps,
rounded up, and 1 as one step. Of as many steps as the spec allows this share is, rounded up, all.
"""

LOGGING = {
    "logging_steps": 1,
    # The filter would show a NaN loss as 0.0.
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "disable_tqdm": True,
}
"""Log every step, unfiltered."""
OPTIMIZERS = {"AdamW": "adamw_torch_fused", "AdamW8bit": "adamw_8bit"}
"""The plan's optimizer in the words of transformers' OptimizerNames."""


def config_arguments(plan: TrainingPlan) -> dict[str, Any]:
    """Keyword arguments of trl.GRPOConfig for this plan; rewards' weights are added where the
    rewards are built."""
    training, execution = plan.training, plan.execution
    arguments = {name: getattr(training, name) for name in SAME_NAME}
    folder = attempt_folder(plan.checkpoint_directory, plan.job.attempt)
    arguments |= (
        _precision_arguments(execution, plan.adapter)
        | _saving_arguments(execution, folder)
        | LOGGING
    )
    arguments["per_device_train_batch_size"] = execution.micro_batch
    arguments["gradient_accumulation_steps"] = execution.gradient_accumulation
    arguments["steps_per_generation"] = execution.steps_per_generation
    arguments["ds3_gather_for_generation"] = execution.gather_for_generation
    arguments["learning_rate"] = plan.learning_rate
    arguments["lr_scheduler_kwargs"] = training.lr_scheduler_kwargs.arguments or None
    arguments["chat_template_kwargs"] = plan.model.chat_template_kwargs
    arguments["generation_kwargs"] = plan.generation.kwargs
    arguments["beta"] = 0.0 if execution.strategy == "None" else training.beta
    arguments["max_steps"] = training.max_steps or -1
    arguments["warmup_steps"] = min(training.warmup_ratio, ALL_STEPS)
    arguments["shuffle_dataset"] = plan.dataset.shuffle
    arguments["trust_remote_code"] = plan.model.trust_remote_code
    if execution.engine:
        arguments |= engine_arguments(training)
    if uses_deepspeed(execution):
        arguments["deepspeed"] = deepspeed_config(execution)
    return arguments | training.overrides.arguments


def engine_arguments(training: TrainingSpec) -> dict[str, Any]:
    """Keyword arguments of GRPOConfig for a run with an engine; all else about the engine is in
    generation/.

    TRL's correction weights tokens by the ratio of the trainer's to the engine's probability, if
    both are of the same distribution.
    """
    arguments: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_importance_sampling_correction": training.has_engine_comparison,
    }
    correction = training.importance_sampling
    if correction.mode != "none":
        arguments["vllm_importance_sampling_mode"] = f"{correction.level}_{correction.mode}"
    arguments["vllm_importance_sampling_clip_min"] = correction.clip.min
    arguments["vllm_importance_sampling_clip_max"] = correction.clip.max
    return arguments


def uses_deepspeed(execution: ExecutionPlan) -> bool:
    """True if DeepSpeed runs the plan; stage 0 is plain DDP."""
    return execution.zero_stage > 0


def _precision_arguments(execution: ExecutionPlan, adapter: AdapterSpec) -> dict[str, Any]:
    """bf16 asks for autocast, or under ZeRO for DeepSpeed's bf16 engine with float32 masters.

    Dropout is off (see models.without_dropout), but for the one before the adapter where
    spec.adapter.dropout asks for it: TRL would switch that off too, without a word.
    """
    has_bf16_engine = uses_deepspeed(execution) and execution.dtype == "bfloat16"
    keeps_adapter_dropout = execution.method == "LoRA" and adapter.dropout
    return {
        "bf16": execution.autocast or has_bf16_engine,
        "optim": OPTIMIZERS[execution.optimizer],
        "gradient_checkpointing": execution.gradient_checkpointing,
        "use_cpu": execution.accelerator == "CPU",
        "ddp_find_unused_parameters": False,
        "disable_dropout": not keeps_adapter_dropout,
    }


def _saving_arguments(execution: ExecutionPlan, folder: Path | None) -> dict[str, Any]:
    """save_total_limit stays unset: transformers would delete the old checkpoint before all ranks
    wrote the new one."""
    output = folder or Path(SCRATCH) / "grpo-output"
    return {
        "output_dir": str(output),
        "save_strategy": "no" if folder is None else "steps",
        "save_steps": execution.save_every_steps,
        "save_total_limit": None,
    }


def _gathering_arguments(execution: ExecutionPlan) -> dict[str, Any]:
    """When ZeRO-3 gathers and releases a parameter.

    Where the model may not be whole during generation, a module's parameters are gathered for its
    own pass only: by default DeepSpeed keeps all that is used again within 10^9 elements of a
    training step, which is a small model whole and 2 GB of a large one. And nothing is gathered
    ahead: generation runs the head as a module, training scores with its weights alone (TRL's fused
    head), so that by generation's order the weights would be on their way when TRL lets go of them
    ("Cannot partition a param in flight"; TRL issue 3858 is the same on several hosts).
    """
    if execution.gather_for_generation:
        return {"stage3_prefetch_bucket_size": "auto"}
    return {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}


def deepspeed_config(execution: ExecutionPlan) -> dict[str, Any]:
    """DeepSpeed configuration of a ZeRO-2 or ZeRO-3 plan; `auto` values are transformers' to fill
    in."""
    zero: dict[str, Any] = {
        "stage": execution.zero_stage,
        "overlap_comm": execution.accelerator == "GPU",
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if execution.zero_stage == 3:
        zero |= _gathering_arguments(execution) | {
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if execution.offload == "CPU":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": execution.accelerator == "GPU"}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
