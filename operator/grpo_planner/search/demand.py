"""Demand: what a job asks of the planner, worked out once before the search.

The search then sees shapes, limits and bytes instead of a spec's optional fields.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.spec.rewards import ModelReward
from grpo_api.text.quantity import parse_quantity, quantity_bytes

from ..hardware.products import Product
from ..memory.activations import no_grad_transient
from ..memory.disk import disk_note
from ..memory.host import tracker_bytes
from ..memory.phases import MARGIN, WORKSPACES, Prediction, device_bytes, export_bytes
from ..memory.setup import Precision, Setup
from ..model.architecture import ResolvedModel, by_name_and_size
from ..model.shapes import Shape
from ..result.result import PlanReason, SpecRejected
from ..time.constants import stored_fit
from ..time.measured_runs import NO_RUNS, MeasuredRuns, Sampler, Setting, StepCorrection
from . import batch
from .methods import Method
from .notes import spec_notes


@dataclass(frozen=True)
class Demand:
    """A job with the shapes of all its models."""

    spec: GRPOJobSpec
    model: ResolvedModel
    """The policy."""
    scorers: tuple[tuple[ModelReward, ResolvedModel], ...]
    """Reward models as the spec declares them, each with its shape."""
    learned: Learned = field(default_factory=Learned)
    """What earlier attempts found of the memory that the job needs."""
    measured: MeasuredRuns = NO_RUNS
    """Runs of this model that were measured on the cluster."""

    @cached_property
    def shape(self) -> Shape:
        """The policy's shape."""
        return self.model.shape

    @property
    def notes(self) -> list[str]:
        """What the user should know about where the shapes came from, and of settings that do half
        of what is meant."""
        of_models = [
            model.note
            for model in (self.model, *(model for _, model in self.scorers))
            if model.note
        ]
        settings = spec_notes(self.spec)
        others = (self._adapter_note, disk_note(self.spec, self.shape))
        return [*of_models, *settings, *filter(None, others)]

    @property
    def _adapter_note(self) -> str:
        """The note for an adapter on modules that the shape does not have; else empty."""
        targets = tuple(self.spec.adapter.target_modules)
        if self.spec.adapter.use == "Never" or self.shape.adapted_linears(targets):
            return ""
        return (
            f"spec.adapter.targetModules: no module of this model is known as "
            f"{' or '.join(targets)}, so the plan counts no memory for an adapter on it"
        )

    @property
    def length(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return self.spec.training.max_prompt_length + self.spec.training.max_completion_length

    @cached_property
    def margin(self) -> float:
        """Share of the allocated bytes kept free; wider for estimated shapes and for experts."""
        # Which experts a token takes varies from step to step, and with it the largest activation.
        return MARGIN["Estimated" if self.shape.experts else self.model.source]

    @property
    def resident_bytes(self) -> int:
        """What a GPU holds beside the policy in every phase: reward models and workspaces."""
        return self.reward_bytes + WORKSPACES

    @property
    def tracker_bytes(self) -> int:
        """Host memory of rank 0's trackers, in each pod: rank 0 may be in any."""
        return tracker_bytes(self.spec.tracking)

    def device_bytes(self, prediction: Prediction, world: int) -> int:
        """Bytes that a GPU must have for the predicted allocations of one of `world` processes."""
        return device_bytes(
            prediction, world, self.margin, expandable=self._has_expandable_segments
        )

    @cached_property
    def _has_expandable_segments(self) -> bool:
        # Kept, like the margin: a search asks thousands of times.
        return self.spec.has_expandable_segments

    def correct_prediction(self, prediction: Prediction) -> Prediction:
        """A prediction with what the job has learned of it."""
        return prediction.with_factors(self.learned.factor) if self.learned.memory else prediction

    @cached_property
    def most_gpus(self) -> int | None:
        """placement.gpus.max, None when open; all GPUs of nodes that are declared."""
        if declared := self.spec.placement.declared_gpus:
            return declared
        return self.spec.placement.gpus.max if self.spec.placement.gpus else None

    @cached_property
    def fewest_gpus(self) -> int:
        """placement.gpus.min, and at least one per node; all GPUs of nodes that are declared."""
        if declared := self.spec.placement.declared_gpus:
            return declared
        return max(
            self.spec.placement.gpus.min if self.spec.placement.gpus else 1,
            self.spec.placement.nodes or 1,
        )

    @cached_property
    def pod_cpu(self) -> float | None:
        """CPU cores that one pod requests where the spec says so."""
        cpu = self.spec.resources.completed_requests.get("cpu")
        return None if cpu is None else float(parse_quantity(cpu))

    @cached_property
    def pod_memory(self) -> int | None:
        """Host memory that one pod requests where the spec says so, in bytes."""
        memory = self.spec.resources.completed_requests.get("memory")
        return None if memory is None else quantity_bytes(memory)

    @cached_property
    def most_memory(self) -> int | None:
        """Host memory that one pod may use, in bytes: its limit, or without one its request."""
        # Past its request a pod without a limit is the first that the kubelet evicts.
        limit = self.spec.resources.limits.get("memory")
        return self.pod_memory if limit is None else quantity_bytes(limit)

    @property
    def has_given_up_engine(self) -> bool:
        """True if Transformers samples because the job's engines failed, also one that the spec
        names."""
        may_fall_back = self.spec.generation.fallback == "Auto"
        return may_fall_back and self.learned.rung == "Transformers"

    @cached_property
    def expected_completion(self) -> int:
        """Mean tokens of a completion: as the spec says, as an attempt measured, as other runs of
        the model had, or the share of the limit that those of published runs had."""
        training = self.spec.training
        limit = training.max_completion_length
        step = self.learned.step
        expected = training.expected_completion_length
        # The job's own steps know its data, other runs of the model only the model, and published
        # runs neither.
        if expected is None and step:
            expected = step.completion_length
        if expected is None:
            expected = self.measured.completion(limit)
        if expected is None:
            expected = round(limit * stored_fit().share)
        return min(limit, max(1, expected))

    def correction(
        self, label: str, gpus: int, nodes: int, sampler: Sampler | None = None
    ) -> StepCorrection | None:
        """The correction of step times on `gpus` of these GPUs: from the job's own attempts, else
        from the nearest runs of the model."""
        step = self.learned.step
        if step and step.gpu_product == label:
            return StepCorrection.of_step(step)
        if not self.measured.rows:
            return None
        setting = Setting(label, gpus, nodes, self.expected_completion, sampler)
        return self.measured.correction(setting)

    def with_spec(self, spec: GRPOJobSpec) -> "Demand":
        """The demand of the same job with another spec, with all that is known of it."""
        return build_demand(spec, self.model, self.learned, self.measured)

    @cached_property
    def updates_per_generation(self) -> int:
        """Optimizer steps taken on one generation batch."""
        return batch.updates_per_generation(self.spec)

    @cached_property
    def reward_bytes(self) -> int:
        """Weights of all reward models: every process has them whole, in their own dtype."""
        return sum(
            model.shape.parameters * (2 if reward.dtype == "bfloat16" else 4)
            for reward, model in self.scorers
        )

    @cached_property
    def scoring_bytes(self) -> int:
        """Temporaries of the largest reward model's pass over one of its batches."""
        training = self.spec.training
        passes = (
            no_grad_transient(
                model.shape,
                Setup(
                    precision="bfloat16" if reward.dtype == "bfloat16" else "float32",
                    prompt=training.max_prompt_length,
                    completion=training.max_completion_length,
                    micro_batch=reward.batch_size,
                ),
            )
            for reward, model in self.scorers
        )
        return max(map(round, passes), default=0)

    def precision(self, method: Method, hardware: Product) -> Precision | None:
        """Dtypes of a method on a GPU; None when a pinned bfloat16 is not to be had."""
        pinned = self.spec.training.dtype
        if not hardware.has_bfloat16:
            return None if pinned == "bfloat16" else "float32"
        if pinned == "float32":
            return "float32" if method.zero else "mixed"
        # In bfloat16 weights small updates round away. ZeRO keeps a float32 master copy of its own,
        # and an adapter's base takes no updates; full training without ZeRO needs float32 weights
        # under autocast.
        narrow = method.zero or method.lora or pinned == "bfloat16"
        return "bfloat16" if narrow else "mixed"


def refuse_long_sequences(demand: Demand) -> None:
    """Refuse sequences that the model has no positions for.

    Raises:
        SpecRejected: with the length to set.
    """
    training = demand.spec.training
    positions = demand.model.positions
    if not positions.is_certain or demand.length <= positions.tokens:
        return
    room = positions.tokens - training.max_prompt_length
    way = f"set spec.training.maxCompletionLength to {room}" if room > 0 else "lower both"
    if 0 < room < (training.expected_completion_length or 0):
        way += f", and expectedCompletionLength to {room} or less"
    message = (
        f"spec.training.maxPromptLength {training.max_prompt_length} + maxCompletionLength "
        f"{training.max_completion_length} = {demand.length} tokens, and {demand.spec.model.name} "
        f"was made for {positions.tokens} (max_position_embeddings): {way}"
    )
    raise SpecRejected(PlanReason.INVALID_COMBINATION, message)


def build_demand(
    spec: GRPOJobSpec,
    model: ResolvedModel,
    learned: Learned | None = None,
    measured: MeasuredRuns = NO_RUNS,
) -> Demand:
    """The demand of a job whose policy has been resolved; `learned` is what earlier attempts found
    of it, `measured` what runs of its model did.

    Raises:
        SpecRejected: a reward model's size is unknown.
    """
    scorers = (
        (
            reward.model,
            by_name_and_size(
                reward.model.name, reward.model.parameters, f"spec.rewards[{index}].model"
            ),
        )
        for index, reward in enumerate(spec.rewards)
        if reward.model
    )
    return Demand(spec, model, tuple(scorers), learned or Learned(), measured)


def training_fields(demand: Demand, method: Method, setup: Setup) -> dict[str, Any]:
    """The plan's fields that say what is trained, and how a step is split."""
    spec, model = demand.spec, demand.model
    share = batch.generation_share(spec, setup.world)
    # An engine takes all at once, and has a limit of its own.
    at_once = share if setup.engine else setup.generation_batch
    return {
        "strategy": method.strategy,
        "method": "LoRA" if method.lora else "Full",
        "zero_stage": method.zero,
        "micro_batch": setup.micro_batch,
        "gradient_accumulation": setup.accumulation,
        "steps_per_generation": share // setup.micro_batch,
        "generation_sub_batch": at_once if at_once < share else 0,
        "gradient_checkpointing": setup.checkpointing,
        "optimizer": "AdamW8bit" if setup.eight_bit else "AdamW",
        "dtype": "bfloat16" if setup.precision == "bfloat16" else "float32",
        "parameters": model.label,
        "architecture": model.source,
        "shape_source": model.found_in,
        "export_bytes": export_bytes(demand.shape, setup, merged=spec.adapter.merge_on_export),
        "save_every_steps": spec.checkpoint.every_steps,
    }


def step_fields(correction: StepCorrection | None) -> dict[str, Any]:
    """The plan's fields that name the source of its step time."""
    if correction is None:
        return {"step_basis": "Published", "step_spread": None, "step_runs": []}
    runs = list(correction.runs)
    return {"step_basis": "Measured", "step_spread": correction.spread, "step_runs": runs}
