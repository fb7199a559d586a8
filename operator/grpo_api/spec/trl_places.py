"""Says where a GRPOJob sets each field of the pinned TRL's GRPOConfig, and each other setting of
`trl grpo`. There is one decision per field, and TRL is not imported.

trl_fields.json is generated from the installed sources of TRL and transformers by `make codegen`.
A field whose value changes memory or time is a field of the spec that the planner reads, or it is
refused. What is left may be overridden, and its entry says why the plan stays right.
"""

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from pydantic.alias_generators import to_camel


class TrlField(NamedTuple):
    """One field of GRPOConfig."""

    name: str
    type: str
    """Its annotation in TRL's source, such as `list[float] | None`."""
    default: Any
    """Its default, as JSON has it."""
    is_own: bool
    """Whether GRPOConfig declares it; it inherits the others, most from TrainingArguments."""


def _fields() -> dict[str, TrlField]:
    rows = json.loads(files(__package__).joinpath("trl_fields.json").read_text(encoding="utf-8"))
    return {
        row["name"]: TrlField(row["name"], row["type"], row["default"], row["isOwn"])
        for row in rows
    }


FIELDS: Mapping[str, TrlField] = _fields()
"""Every field of GRPOConfig by its name, in GRPOConfig's order."""


class Place(NamedTuple):
    """The decision about one field of GRPOConfig."""

    kind: Literal["Spec", "Override", "Refused"]
    """Spec: a field of the spec says it. Override: `training.overrides` passes it on. Refused:
    neither does."""
    path: str
    """Where it is set, without `spec.`; of a refused one what to use instead, or nothing."""
    reason: str
    """Of an override why the plan stays right, of a refused field why it can't be set."""


SAME_NAME = (
    "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "loss_type", "num_iterations", "epsilon", "epsilon_high", "delta",
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos",
    "vespo_k_neg", "vespo_lambda_neg", "use_bias_correction_kl", "off_policy_mask_threshold",
    "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_coef_min",
    "entropy_coef_max", "entropy_coef_delta", "entropy_target", "importance_sampling_level",
    "scale_rewards", "multi_objective_aggregation", "mask_truncated_completions",
    "num_train_epochs", "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "seed",
)  # fmt: skip
"""Fields of GRPOConfig that spec.training has under the same name and with the same meaning."""

_SPEC = {name: f"training.{to_camel(name)}" for name in SAME_NAME} | {
    "per_device_train_batch_size": "training.perDeviceTrainBatchSize",
    "max_steps": "training.maxSteps",
    "learning_rate": "training.learningRate",
    "lr_scheduler_kwargs": "training.lrSchedulerKwargs",
    "warmup_steps": "training.warmupRatio",
    "optim": "training.optimizer",
    "bf16": "training.dtype",
    "activation_checkpointing": "training.gradientCheckpointing",
    "gradient_checkpointing": "training.gradientCheckpointing",
    "report_to": "tracking",
    "run_name": "tracking",
    "project": "tracking",
    "trackio_space_id": "tracking",
    "log_completions": "tracking.samples",
    "save_steps": "checkpoint.everySteps",
    "save_total_limit": "checkpoint.keep",
    "push_to_hub": "export.hub",
    "hub_token": "export.hub.tokenSecretRef",
    "hub_private_repo": "export.hub.private",
    "hub_model_id": "export.hub.repository",
    "resume_from_checkpoint": "resumeFrom",
    "use_cpu": "placement.accelerator",
    "ddp_timeout": "guard.hangTimeoutSeconds",
    "trust_remote_code": "model.trustRemoteCode",
    "ds3_gather_for_generation": "training.ds3GatherForGeneration",
    "shuffle_dataset": "dataset.shuffle",
    "generation_batch_size": "training.generationBatchSize",
    "generation_kwargs": "generation.kwargs",
    "chat_template_kwargs": "model.chatTemplateKwargs",
    "use_vllm": "generation.engine",
    "vllm_mode": "generation.engine",
    "vllm_enable_sleep_mode": "generation.sleep",
    "vllm_gpu_memory_utilization": "generation.memoryShare",
    "vllm_max_model_length": "generation.maxModelLength",
    "vllm_tensor_parallel_size": "generation.tensorParallel",
    "beta": "training.beta",
    "reward_weights": "rewards[].weight",
    "sync_ref_model": "reference.sync",
    "ref_model_mixup_alpha": "reference.sync.mixup",
    "ref_model_sync_steps": "reference.sync.everySteps",
    "vllm_importance_sampling_correction": "training.importanceSampling.mode",
    "vllm_importance_sampling_mode": "training.importanceSampling",
    "vllm_importance_sampling_clip_max": "training.importanceSampling.clip.max",
    "vllm_importance_sampling_clip_min": "training.importanceSampling.clip.min",
}
"""Fields that a field of the spec says, by its path."""

_OVERRIDES = {
    "tf32": "Float32 products of other GPU kernels: no memory, and less time than predicted.",
    "torch_empty_cache_steps": "Less memory than predicted, for about a tenth more time.",
    "log_level": "What transformers logs changes neither memory nor time.",
    "log_level_replica": "What transformers logs changes neither memory nor time.",
    "log_on_each_node": "What transformers logs changes neither memory nor time.",
    "ddp_bucket_cap_mb": (
        "The buckets hold all gradients together, whatever the size of each; only their exchange "
        "overlaps otherwise."
    ),
    "ddp_broadcast_buffers": "A decoder's buffers are kilobytes and the same on all ranks.",
    "router_aux_loss_coef": (
        "TRL computes the loss wherever the model's config declares a coefficient; another value "
        "costs nothing, and 0 saves."
    ),
}
"""Fields that are passed on, with the reason why the plan stays right."""

_REFUSED: Mapping[tuple[str, str], Iterable[str]] = {
    ("", "the trainer chooses the folder: each attempt writes its own"): ("output_dir",),
    (
        "training.promptsPerStep",
        "the plan splits a step into micro-batches",
    ): ("gradient_accumulation_steps",),
    ("training.generationBatchSize", "the plan derives it"): ("steps_per_generation",),
    ("training.perDeviceTrainBatchSize", "TRL's GRPOTrainer refuses it"): ("auto_find_batch_size",),
    ("training.dtype", "the loss is scaled for bfloat16 and float32 only"): ("fp16",),
    ("training.optimizer", "AdamW and 8-bit AdamW take no further arguments"): (
        "optim_args",
        "optim_target_modules",
    ),
    (
        "training.gradientCheckpointing",
        "how layers are recomputed changes memory, and follows from the ZeRO stage",
    ): ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
    ("", "the memory model knows eager modules, and compiled ones take other memory"): (
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_liger_kernel",
        "liger_kernel_config",
    ),
    ("", "a training pass would keep keys and values that the memory model does not count"): (
        "use_cache",
    ),
    ("", "deterministic kernels take memory and time that the plan does not count"): (
        "full_determinism",
    ),
    ("training.dtype", "weights, checkpoints and ZeRO's partitions have one dtype"): (
        "cast_lm_head_to_fp32",
    ),
    (
        "",
        "noise in the embeddings gives log-probabilities of another policy than the one that "
        "sampled",
    ): ("neftune_noise_alpha",),
    ("adapter.dropout", "only the adapter may have dropout: it changes the policy's ratio"): (
        "disable_dropout",
    ),
    ("model", "the trainer loads the policy itself and proves it against its files"): (
        "model_init_kwargs",
    ),
    ("", "longer sequences take memory, and only compilers need them"): ("pad_to_multiple_of",),
    ("generation.engine", "the memory model counts transformers' dynamic cache only"): (
        "cache_implementation",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
    ),
    ("", "weights are sent to vLLM's own classes of models, and proved in them"): (
        "vllm_model_impl",
    ),
    (
        "rewards[].format",
        "the engine's log-probabilities would be the grammar's, and the trainer's the policy's",
    ): ("vllm_structured_outputs_regex",),
    ("generation.servers", "the operator starts the engines and knows their addresses"): (
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
    ),
    ("training.importanceSampling.clip.max", "TRL has given it another name"): (
        "vllm_importance_sampling_cap",
    ),
    ("", "a GRPOJob has no tools"): ("max_tool_calling_iterations",),
    ("", "GRPO's loss does not use it"): (
        "average_tokens_across_devices",
        "label_smoothing_factor",
        "label_names",
    ),
    ("", "TRL counts the tokens itself, as num_tokens"): ("include_num_input_tokens_seen",),
    ("", "every step is logged, by a recorder that leaves out nothing"): (
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_nan_inf_filter",
        "disable_tqdm",
    ),
    ("samples", "whole groups are kept beside the checkpoints, for `grpo samples`"): (
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_completions_hub_repo",
    ),
    ("tracking", "a job tracks itself to a server of the team"): (
        "trackio_bucket_id",
        "trackio_static_space_id",
    ),
    (
        "command",
        "a run has no evaluation dataset; a second GRPOJob with command "
        "[python, -m, grpo_trainer.evaluation] scores its model",
    ): (
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "per_device_eval_batch_size",
        "num_generations_eval",
        "prediction_loss_only",
        "eval_on_start",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "bf16_full_eval",
        "fp16_full_eval",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "do_train",
        "do_eval",
        "do_predict",
    ),
    ("checkpoint", "a checkpoint is whole, so that a run continues from it in every digit"): (
        "save_only_model",
        "save_strategy",
        "save_on_each_node",
        "enable_jit_checkpoint",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
    ),
    ("export.hub", "the finished model is pushed once, to the main branch"): (
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
    ),
    ("training.seed", "one seed orders the prompts and samples"): ("data_seed",),
    ("dataset", "the trainer deals out whole groups of prompts, which are in memory"): (
        "accelerator_config",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "remove_unused_columns",
        "train_sampling_strategy",
        "length_column_name",
    ),
    ("placement", "the plan decides how ranks work together"): (
        "parallelism_config",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "ddp_backend",
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "local_rank",
    ),
    ("guard", "the trainer ends a run whose numbers are not finite, and says where"): ("debug",),
    ("", "the trainer measures the peak of memory itself, which transformers would reset"): (
        "skip_memory_metrics",
    ),
}
"""Fields that can't be set, by what to use instead and the reason."""

PLACES: Mapping[str, Place] = (
    {name: Place("Spec", path, "") for name, path in _SPEC.items()}
    | {
        name: Place("Override", f"training.overrides.{name}", reason)
        for name, reason in _OVERRIDES.items()
    }
    | {
        name: Place("Refused", path, reason)
        for (path, reason), names in _REFUSED.items()
        for name in names
    }
)
"""Every field of GRPOConfig with its place."""

_QUANTISED = "quantised base models are not trained: their gradients are not those of the weights"

MODEL_PLACES: Mapping[str, Place] = {
    "model_name_or_path": Place("Spec", "model.name", ""),
    "model_revision": Place("Spec", "model.revision", ""),
    "dtype": Place("Spec", "training.dtype", ""),
    "attn_implementation": Place(
        "Refused", "", "the memory model knows the attention that transformers chooses"
    ),
    "use_peft": Place("Spec", "adapter.use", ""),
    "lora_r": Place("Spec", "adapter.rank", ""),
    "lora_alpha": Place("Spec", "adapter.alpha", ""),
    "lora_dropout": Place("Spec", "adapter.dropout", ""),
    "lora_target_modules": Place("Spec", "adapter.targetModules", ""),
    "lora_target_parameters": Place(
        "Refused", "adapter.targetModules", "an adapter is made of modules"
    ),
    "lora_modules_to_save": Place(
        "Refused", "adapter.targetModules", "modules that are trained whole take other memory"
    ),
    "lora_task_type": Place("Refused", "", "a job trains a causal language model"),
    "use_rslora": Place(
        "Refused", "adapter.alpha", "alpha times the square root of the rank is the same scale"
    ),
    "use_dora": Place("Refused", "adapter", "its magnitudes take other memory and time"),
    "load_in_8bit": Place("Refused", "model.name", _QUANTISED),
    "load_in_4bit": Place("Refused", "model.name", _QUANTISED),
    "bnb_4bit_quant_type": Place("Refused", "model.name", _QUANTISED),
    "use_bnb_nested_quant": Place("Refused", "model.name", _QUANTISED),
    "bnb_4bit_quant_storage": Place("Refused", "model.name", _QUANTISED),
}
"""Every field of trl.ModelConfig with its place."""

SCRIPT_PLACES: Mapping[str, Place] = {
    "dataset_name": Place("Spec", "dataset.name", ""),
    "dataset_config": Place("Spec", "dataset.config", ""),
    "dataset_train_split": Place("Spec", "dataset.split", ""),
    "dataset_test_split": Place(
        "Refused",
        "command",
        "a run has no evaluation dataset; a second GRPOJob with command "
        "[python, -m, grpo_trainer.evaluation] scores its model",
    ),
    "dataset_streaming": Place("Refused", "dataset", "the prompts are in memory"),
    "ignore_bias_buffers": Place(
        "Refused", "placement", "the plan decides how ranks work together"
    ),
    "reward_model_name_or_path": Place("Spec", "rewards[].model.name", ""),
    "reward_funcs": Place("Spec", "rewards[].python.function", ""),
    "datasets": Place("Spec", "dataset", ""),
    "streaming": Place("Refused", "dataset", "the prompts are in memory"),
    "test_split_size": Place("Refused", "dataset.split", "a run has no evaluation dataset"),
}
"""Every field of GRPOScriptArguments and DatasetMixtureConfig with its place."""

CLI_PLACES: Mapping[str, Place] = {**MODEL_PLACES, **SCRIPT_PLACES}
"""Every setting of `trl grpo` that GRPOConfig lacks."""
