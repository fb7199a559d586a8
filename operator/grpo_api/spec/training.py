"""`spec.training`, `spec.reference` and `spec.adapter`: what is trained and against which
reference.

Fields carry TRL's own names in camelCase and TRL 1.16's defaults (GRPOConfig); where ours differ,
the field says why.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ..text.base import Model, Rule
from .keyword_arguments import (
    ARGUMENTS_BELONG,
    ARGUMENTS_SUFFICE,
    POLYNOMIAL_END,
    Overrides,
    ScheduleArguments,
    ScheduleType,
)

Coefficient = Annotated[float, Field(ge=-100, le=100)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Shape = Annotated[float, Field(ge=0, le=100)]
Temperature = Annotated[float, Field(gt=0, le=100)]

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Values of lossType that clip the probability ratio on both sides."""


class ImportanceSamplingClip(Model):
    """Bounds of the ratio of the trainer's to the engine's probability."""

    RULES = (Rule("!has(self.min) || self.min < self.max", "min must be below max"),)

    min: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower bound (TRL's vllm_importance_sampling_clip_min). Unset: none."""
    max: Annotated[float, Field(gt=0, le=1e9)] = 3.0
    """Upper bound (TRL's vllm_importance_sampling_clip_max). Unset: 3, as in TRL."""


class ImportanceSamplingSpec(Model):
    """How the loss corrects for an engine whose probabilities differ from the trainer's: tokens are
    weighted by the ratio of both. It is TRL's vllm_importance_sampling_mode in two parts; the
    ratio of two policies is importanceSamplingLevel's."""

    mode: Literal["mask", "truncate", "none"] = "mask"
    """What becomes of a ratio beyond the bounds: mask drops what it weights, truncate takes the
    bound, none corrects nothing. Unset: mask (TRL 1.16's default, sequence_mask)."""
    level: Literal["sequence", "token"] = "sequence"
    """Ratio of a whole completion, or of each token. A completion's ratio grows with its length,
    so that long completions are better corrected by token with mode truncate. Unset: sequence (TRL
    1.16's default, sequence_mask)."""
    clip: ImportanceSamplingClip = Field(default_factory=ImportanceSamplingClip)
    """Bounds of the ratio. Unset: at most 3."""


class TrainingSpec(Model):
    """GRPO and optimizer settings."""

    RULES = (
        Rule(
            "!has(self.perDeviceTrainBatchSize) || "
            "(self.promptsPerStep * self.numGenerations) % self.perDeviceTrainBatchSize == 0",
            (
                "perDeviceTrainBatchSize must divide promptsPerStep * numGenerations (the "
                "completions of one step)"
            ),
        ),
        Rule(
            "!has(self.generationBatchSize) || "
            "self.generationBatchSize % (self.promptsPerStep * self.numGenerations) == 0",
            (
                "generationBatchSize must be a multiple of promptsPerStep * numGenerations (whole "
                "steps, whole groups)"
            ),
        ),
        Rule(
            "!has(self.expectedCompletionLength) || self.expectedCompletionLength <= "
            "self.maxCompletionLength",
            "expectedCompletionLength must be at most maxCompletionLength",
        ),
        Rule(
            "!has(self.epsilonHigh) || self.epsilon <= self.epsilonHigh",
            "epsilonHigh must be at least epsilon",
        ),
        Rule(
            f"!has(self.delta) || self.lossType in {list(CLIPPED_LOSSES)}",
            f"delta belongs to lossType {', '.join(CLIPPED_LOSSES)}; remove it or change lossType",
        ),
        Rule(
            "self.lossType != 'vespo' || self.importanceSampling.mode == 'none' || "
            "self.importanceSampling.level == 'token'",
            "lossType vespo weighs tokens by an engine's ratio: set importanceSampling.level to "
            "token, or importanceSampling.mode to none",
        ),
        Rule(
            "self.entropyCoefMin <= self.entropyCoefMax",
            "entropyCoefMin must be at most entropyCoefMax",
        ),
        Rule(
            ARGUMENTS_BELONG,
            "lrSchedulerType does not take one of lrSchedulerKwargs: see docs/reference/api.md",
        ),
        Rule(
            ARGUMENTS_SUFFICE,
            "lrSchedulerType needs min_lr, min_lr_rate or num_decay_steps in lrSchedulerKwargs",
        ),
        Rule(
            "self.lrSchedulerType != 'polynomial' || [self.lrSchedulerKwargs].all(k, "
            "has(k.lr_end) && self.learningRate > k.lr_end || "
            f"!has(k.lr_end) && self.learningRate > {POLYNOMIAL_END:.7f})",
            "lrSchedulerType polynomial needs a learningRate above lrSchedulerKwargs.lr_end, "
            "which is 1e-7 unless set",
        ),
    )

    beta: Annotated[float, Field(ge=0, le=100)] = 0.04
    """Weight of the KL term. 0 trains without a reference. Unset: 0.04, as in the GRPO paper
    (TRL's default is 0)."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Peak learning rate. Unset: 1e-6."""
    num_generations: Annotated[int, Field(ge=2, le=1024)] = 8
    """Completions per prompt (the group). Unset: 8."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65536)] = 8
    """Prompts per optimizer step over all GPUs: the global batch is promptsPerStep * numGenerations
    completions, which the plan splits. Unset: 8."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Completions per GPU and micro-batch. Unset: the plan chooses."""
    generation_batch_size: Annotated[int, Field(ge=2, le=16777216)] | None = None
    """Completions generated at a time over all GPUs; more than one step's worth makes later steps
    off-policy. Unset: one step's worth."""
    max_prompt_length: Annotated[int, Field(ge=1, le=1048576)] = 512
    """Longest prompt in tokens (see dataset.onLongPrompt). Unset: 512."""
    max_completion_length: Annotated[int, Field(ge=1, le=1048576)] = 512
    """Longest completion in tokens. Unset: 512."""
    expected_completion_length: Annotated[int, Field(ge=1, le=1048576)] | None = None
    """Mean tokens of a completion: times and an engine's cache are planned for it, memory for
    maxCompletionLength. Unset: what attempts measured, else a share of the limit."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature. Unset: 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Unset: 1 (off)."""
    top_k: Annotated[int, Field(ge=0, le=1000000)] = 0
    """Sample from the k likeliest tokens. Unset: 0 (off)."""
    min_p: Share | None = None
    """Least probability relative to the likeliest token. Unset: off."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Penalty on repeated tokens. Unset: 1 (off)."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = (
        "dapo"
    )
    """How token losses follow from ratios and are averaged. Unset: dapo."""
    num_iterations: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer passes over each generation batch. Unset: 1."""
    epsilon: Annotated[float, Field(gt=0, le=10)] = 0.2
    """Clip range of the probability ratio. Unset: 0.2."""
    epsilon_high: Annotated[float, Field(gt=0, le=10)] | None = None
    """Upper clip range; of lossType cispo the largest ratio. Unset: epsilon."""
    delta: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Largest ratio of two-sided clipping, above 1 + epsilonHigh. Unset: none."""
    sapo_temperature_neg: Temperature = 1.05
    """Of lossType sapo, for advantages up to 0. Unset: 1.05."""
    sapo_temperature_pos: Temperature = 1.0
    """Above 0. Unset: 1."""
    vespo_k_pos: Shape = 2.0
    """Exponent of lossType vespo. Unset: 2."""
    vespo_lambda_pos: Shape = 3.0
    """Its decay. Unset: 3."""
    vespo_k_neg: Shape = 3.0
    """For negative advantages. Unset: 3."""
    vespo_lambda_neg: Shape = 2.0
    """Its decay. Unset: 2."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the probability ratio. Unset: true."""
    off_policy_mask_threshold: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Completions with negative advantage and a higher KL to their sampler are left out. Unset:
    none."""
    top_entropy_quantile: Share = 1.0
    """Share of tokens, those of highest entropy in a micro-batch of all GPUs, that count. Unset: 1
    (all)."""
    entropy_coef: Coefficient = 0.0
    """Weight of the tokens' mean entropy as a bonus. Unset: 0 (off)."""
    use_adaptive_entropy: bool = False
    """Raise entropyCoef after a step with an entropy up to entropyTarget, else lower it. Unset:
    false."""
    entropy_coef_min: Coefficient = 0.0
    """Its lower bound. Unset: 0."""
    entropy_coef_max: Coefficient = 1.0
    """Its upper bound. Unset: 1."""
    entropy_coef_delta: Annotated[float, Field(ge=0, le=100)] = 0.005
    """Its change per step. Unset: 0.005."""
    entropy_target: Annotated[float, Field(ge=0, le=100)] = 0.2
    """In nats; above it there is no adaptive bonus. Unset: 0.2."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or per sequence; GSPO is sequence with lossType grpo. Unset: token."""
    importance_sampling: ImportanceSamplingSpec = Field(default_factory=ImportanceSamplingSpec)
    """Correction for an engine (vLLM); without one it means nothing. Unset: as in TRL."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """By whose standard deviation advantages are divided. Unset: group."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """Whether the sum of rewards is normalised, or each reward. Unset: sum_then_normalize."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the length limit out of the loss. Unset: false."""
    num_train_epochs: Positive = 1.0
    """Passes over the dataset, if maxSteps is unset. Unset: 1 (TRL's is 3; a pass of generation is
    dear)."""
    max_steps: Annotated[int, Field(ge=1, le=100000000)] | None = None
    """Optimizer steps; takes precedence over numTrainEpochs. Unset: by epochs."""
    lr_scheduler_type: ScheduleType = "linear"
    """Learning-rate schedule. Unset: linear."""
    lr_scheduler_kwargs: ScheduleArguments = Field(default_factory=ScheduleArguments)
    """Arguments of the schedule in transformers. Unset: its defaults."""
    warmup_ratio: Share = 0.0
    """Share of the steps that warm up. Unset: 0."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """AdamW's weight decay. Unset: 0."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's beta1. Unset: 0.9."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's beta2. Unset: 0.999."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """AdamW's epsilon. Unset: 1e-8."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Gradients are clipped to this norm. Unset: 1."""
    seed: Annotated[int, Field(ge=0, le=4294967295)] = 42
    """Seed of sampling, data order and adapters. Unset: 42."""
    dtype: Literal["Auto", "bfloat16", "float32"] = "Auto"
    """Dtype of the weights. Auto: bfloat16 where the GPUs have it, float32 on CPUs."""
    optimizer: Literal["Auto", "AdamW", "AdamW8bit"] = "Auto"
    """Optimizer. Auto: AdamW, or 8-bit AdamW where only that fits (the plan lists it under
    changes)."""
    gradient_checkpointing: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    """Recompute activations in the backward pass: less memory for 20 to 30 % more time. Auto: where
    it is needed."""
    ds3_gather_for_generation: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    """Under ZeRO-3, gather the whole policy on every GPU to generate. Auto: where it fits."""
    overrides: Overrides = Field(default_factory=Overrides)
    """Further fields of TRL's GRPOConfig, under its names. Unset: TRL's defaults."""

    def has_polynomial_end_below(self, learning_rate: float) -> bool:
        """Whether the schedule falls from that rate, if it is polynomial: transformers refuses
        another one."""
        end = self.lr_scheduler_kwargs.lr_end
        lowest = POLYNOMIAL_END if end is None else end
        return self.lr_scheduler_type != "polynomial" or lowest < learning_rate

    @property
    def is_micro_batch_dependent(self) -> bool:
        """Whether the loss is normalised, or its tokens are chosen, within a micro-batch, so that
        another size of it trains something else: bnpo, the entropy bonus and the quantile."""
        has_entropy_bonus = self.entropy_coef != 0 or self.use_adaptive_entropy
        return self.loss_type == "bnpo" or has_entropy_bonus or self.top_entropy_quantile < 1

    @property
    def truncation(self) -> list[str]:
        """Settings, by their names, by which tokens are sampled from another distribution than the
        policy's at the temperature; empty where there are none."""
        shifts = {
            "topP": self.top_p < 1,
            "topK": self.top_k > 0,
            "minP": bool(self.min_p),
            "repetitionPenalty": self.repetition_penalty != 1,
        }
        return [name for name, on in shifts.items() if on]

    @property
    def has_engine_comparison(self) -> bool:
        """Whether TRL compares an engine's log-probabilities of all completions with the
        trainer's, which it does in order to correct for the difference."""
        return self.importance_sampling.mode != "none"


class ReferenceSync(Model):
    """Moves the reference towards the policy while training (TRL's sync_ref_model)."""

    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 512
    """Steps between two moves. Unset: 512."""
    mixup: Annotated[float, Field(gt=0, le=1)] = 0.6
    """New reference = mixup * policy + (1 - mixup) * reference. Unset: 0.6."""


class ReferenceOffload(Model):
    """Where a reference lives between its passes."""

    RULES = (
        Rule(
            "self.target != 'NVMe'",
            "target NVMe is not supported: DeepSpeed swaps to disks with its async_io extension "
            "alone, which the trainer's image doesn't have; set target to CPU",
        ),
    )

    target: Literal["CPU", "NVMe"] = "CPU"
    """Host memory; NVMe is refused. Unset: CPU."""


class ReferenceSpec(Model):
    """The frozen model that the KL term is measured against."""

    RULES = (
        Rule(
            "!has(self.sync) || !(self.strategy in ['Adapter', 'None'])",
            "sync needs a reference of its own; strategy Adapter and None have none",
        ),
        Rule(
            "!has(self.offload) || self.strategy in ['Auto', 'Offload', 'Sharded']",
            "offload belongs to strategy Offload, Sharded or Auto; remove it or change strategy",
        ),
    )

    strategy: Literal["Auto", "Clone", "Adapter", "Sharded", "Offload", "None"] = "Auto"
    """Clone: a frozen copy on every GPU. Adapter: the base with the adapter disabled. Sharded:
    reloaded and partitioned under ZeRO-3. Offload: a copy in host memory. None: no KL (beta 0).
    Auto: the plan chooses and says why."""
    sync: ReferenceSync | None = None
    """Move the reference towards the policy. Unset: it stays at step 0."""
    offload: ReferenceOffload | None = None
    """Where an offloaded reference lives. Unset: host memory for strategy Offload, the GPUs for
    Sharded."""


def _with_all_linear_alone(names: list[str]) -> list[str]:
    if len(names) > 1 and "all-linear" in names:
        raise ValueError("all-linear stands alone and means all linear layers but the head")
    return names


class AdapterSpec(Model):
    """LoRA: the user's consent, and its shape."""

    RULES = (
        Rule(
            "self.use != 'Never' || !has(self.learningRate)",
            "learningRate belongs to use IfNeeded or Always; remove it or change use",
        ),
    )

    use: Literal["Never", "IfNeeded", "Always"] = "IfNeeded"
    """IfNeeded: only when no plan with all parameters fits, and then condition TrainsAdapterOnly
    says so. Unset: IfNeeded."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Peak learning rate while an adapter is trained; LoRA usually needs ten times that of full
    training. Unset: training.learningRate."""
    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the adapter. Unset: 16."""
    alpha: Annotated[float, Field(gt=0, le=65536)] = 32.0
    """Scale: the adapter's output times alpha / rank. Unset: 32."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter. Unset: 0."""
    target_modules: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
        Field(min_length=1, max_length=64),
        AfterValidator(_with_all_linear_alone),
    ] = ["all-linear"]
    """Modules that get an adapter. Unset: `all-linear`."""
    merge_on_export: bool = False
    """Export base and adapter merged into one model. Unset: false, the adapter alone."""
