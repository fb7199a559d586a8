"""Warnings that follow from the spec alone: settings that do half of what is meant."""

import math
import re
from collections.abc import Iterator

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.quantity import quantity_bytes
from grpo_api.text.units import MIB

LORA_RATE_FACTOR = 10
"""LoRA learns best at about ten times the rate of full training, in supervised training and in
policy gradients alike (Schulman et al., "LoRA Without Regret", 2025)."""
FULL_TRAINING_RATE = TrainingSpec.model_fields["learning_rate"].default
"""TRL's default, which GRPOConfig has for training all parameters."""
TOKEN_SUMS = ("bnpo", "dr_grpo", "dapo", "cispo")
"""Values of lossType that weigh a completion by its length."""
LEVELS = {"luspo": "sequence", "vespo": "token"}
"""The importanceSamplingLevel that a lossType is made for."""


def spec_notes(spec: GRPOJobSpec) -> Iterator[str]:
    """Yield a sentence for each of these settings."""
    training = spec.training
    yield from _level_notes(training)
    yield from _unused_notes(training)
    yield from _schedule_notes(training)
    yield from _size_notes(spec)
    if not any(reward.weight for reward in spec.rewards):
        yield "every spec.rewards[].weight is 0, so nothing is learned: give one reward a weight"
    # A user who sets both the rate and the adapter has chosen them together.
    has_own_rate = spec.adapter.learning_rate is not None
    is_default = training.learning_rate == FULL_TRAINING_RATE
    if spec.is_adapter_requested and is_default and not has_own_rate:
        yield f"an adapter is trained, and {low_rate_message(spec)}"
    column = _text_column(spec.dataset)
    if column and is_chat_model(spec.model.name):
        yield (
            f"spec.dataset.promptColumn: if {column} is text, this chat model's template is not "
            "applied to it; set spec.dataset.systemPrompt, or give chat messages (grpo plan "
            "--show-prompt shows the first prompt)"
        )


CHAT_COLUMNS = ("prompt", "messages", "conversation", "conversations", "chat")
"""Columns that hold chat messages in many datasets; what else a prompt is in is text."""
_CHAT = re.compile(r"(?i)[-_.](instruct|chat|it|thinking)(?![a-z])")
"""How the hub's models for chats are named, such as Llama-3.2-1B-Instruct and gemma-3-1b-it."""
_QWEN3 = re.compile(r"(?i)/qwen3-[0-9.]+b(-a[0-9.]+b)?$")
"""Qwen 3 names its base models and not its chat models."""


def is_chat_model(name: str) -> bool:
    """True if a model is one for chats, by its name."""
    return bool(_CHAT.search(name) or _QWEN3.search(name))


def _level_notes(training: TrainingSpec) -> Iterator[str]:
    """Yield what TRL warns of: a level of the ratio that the loss is not made for."""
    level, loss = training.importance_sampling_level, training.loss_type
    if level == "sequence" and loss in TOKEN_SUMS:
        yield (
            f"importanceSamplingLevel sequence with lossType {loss} is not "
            "GSPO, whose loss is the "
            "mean over sequences; set spec.training.lossType to grpo for that, and epsilon to "
            "about 3e-4"
        )
    better = LEVELS.get(loss, level)
    if level != better:
        yield (
            f"lossType {loss} is made for ratios of a {better}: set "
            f"spec.training.importanceSamplingLevel to {better}"
        )


def _unused_notes(training: TrainingSpec) -> Iterator[str]:
    """Yield a sentence for each setting that TRL's trainer passes over in silence."""
    normalises_each = training.multi_objective_aggregation == "normalize_then_sum"
    if normalises_each and training.scale_rewards != "batch":
        yield (
            "multiObjectiveAggregation normalize_then_sum divides advantages by the batch's "
            f"standard deviation, whatever scaleRewards says ({training.scale_rewards})"
        )
    highest_clip = 1 + (
        training.epsilon if training.epsilon_high is None else training.epsilon_high
    )
    if training.delta is not None and training.delta <= highest_clip:
        yield (
            f"training.delta {training.delta:g} cuts ratios off before 1 + epsilonHigh "
            f"({highest_clip:g}) does; TRL recommends a larger one"
        )


def _size_notes(spec: GRPOJobSpec) -> Iterator[str]:
    """Yield a sentence for each size that lacks its unit."""
    claim = spec.checkpoint.volume_claim_template
    sizes = {
        "placement.gpuMemory": spec.placement.gpu_memory,
        "sharedMemory": spec.shared_memory,
        "checkpoint.volumeClaimTemplate.size": claim.size if claim else None,
    }
    for path, size in sizes.items():
        if size is not None and quantity_bytes(size) < MIB:
            yield f"spec.{path} {size} counts bytes: write {size}Gi if gibibytes are meant"


def _schedule_notes(training: TrainingSpec) -> Iterator[str]:
    """Yield a sentence for each schedule whose rate is not what its settings seem to say."""
    kind, arguments = training.lr_scheduler_type, training.lr_scheduler_kwargs
    if kind == "constant" and training.warmup_ratio:
        yield (
            f"lrSchedulerType constant ignores warmupRatio {training.warmup_ratio:g}: set "
            "lrSchedulerType to constant_with_warmup"
        )
    rate = training.learning_rate
    least_share = arguments.min_lr_rate or (arguments.min_lr or 0) / rate
    if max(least_share, arguments.min_lr_ratio or 0) > 1:
        yield (
            f"lrSchedulerType {kind} rises above learningRate {rate:g}: lower min_lr, min_lr_rate "
            "or min_lr_ratio of lrSchedulerKwargs"
        )
    if kind != "warmup_stable_decay" or training.max_steps is None:
        return
    steps = training.max_steps
    parts = math.ceil(training.warmup_ratio * steps) + (arguments.num_decay_steps or 0)
    parts += arguments.num_stable_steps or 0
    # Without num_stable_steps the rest of the run is stable.
    if parts > steps or (arguments.num_stable_steps is not None and parts < steps):
        yield (
            f"the parts of lrSchedulerType warmup_stable_decay take {parts} steps and the run has "
            f"{steps}: change warmupRatio, num_decay_steps or num_stable_steps"
        )


def low_rate_message(spec: GRPOJobSpec) -> str:
    """Why training.learningRate does not suit an adapter, and what to write."""
    rate = spec.training.learning_rate
    better = min(1.0, LORA_RATE_FACTOR * rate)
    return (
        f"training.learningRate {rate:g} is usually ten times too small for LoRA: write "
        f"adapter.learningRate: {better:g}"
    )


def _text_column(dataset: DatasetSpec) -> str:
    """The dataset's own name of a prompt column that is likely to be text, without a system prompt;
    empty for others."""
    if dataset.system_prompt is not None:
        return ""
    column = dataset.columns.get(dataset.prompt_column, dataset.prompt_column)
    return "" if column in CHAT_COLUMNS else column
