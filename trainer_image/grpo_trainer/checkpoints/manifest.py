"""The files beside a checkpoint that say whose it is and that it is whole, and what makes two
attempts the same run.

Model, data, reference and the size of a batch each change the result, so none of them may change
silently between attempts. How a batch is cut into micro-batches, and whether activations are
recomputed, does not. It is recorded too, and may change where a plan ran out of memory.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.revisions import Generations
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.model import ModelSpec
from grpo_api.spec.rewards import HTTPReward, RewardSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.base import Model
from grpo_api.text.timing import Clock

from ..runtime.errors import BadInput

OWNER = "owner.json"


class Owner(Model):
    """Whose checkpoints a folder has."""

    uid: str
    """uid of the GRPOJob."""
    attempt: Annotated[int, Field(ge=1)]
    """The newest attempt that claimed the folder; it alone may commit and delete."""


class FileRecord(Model):
    """One file of a complete checkpoint."""

    bytes: Annotated[int, Field(ge=0)]
    """Its size."""
    algorithm: Literal["xxh3_128"] = "xxh3_128"
    """What it was hashed with."""
    chunk_bytes: Annotated[int, Field(ge=1)]
    """Its bytes under one hash; the last hash is of what remains."""
    hashes: Annotated[list[str], Field(min_length=1)]
    """The hash of each chunk, in order, in hex; an empty file has one, of nothing."""

    @model_validator(mode="after")
    def _one_hash_per_chunk(self) -> Self:
        chunks = max(1, -(-self.bytes // self.chunk_bytes))
        if len(self.hashes) != chunks:
            raise ValueError(
                f"{self.bytes} bytes in chunks of {self.chunk_bytes} have {chunks} hashes, not "
                f"{len(self.hashes)}"
            )
        return self


class Manifest(Model):
    """Proof that a checkpoint is complete: every rank's files were on disk when it was written."""

    attempt: int
    """The attempt that wrote it."""
    step: int
    """Finished optimizer steps."""
    identity: dict[str, str]
    """What the run is, by field path: a resumed run must agree (see `require_same_run`)."""
    skipped: list[Generations] = []
    """What the run had left out of the order of the data by then (spec.guard.onDivergence)."""
    clock: Clock = Clock()
    """What rank 0 of that attempt had spent its time on by then: a run that continues here keeps so
    much of it."""
    files: dict[str, FileRecord]
    """Every file by its path inside the checkpoint."""


def identity_text(value: object) -> str:
    """A value as a manifest has it: compact JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


EXECUTION = (
    "strategy",
    "method",
    "zero_stage",
    "world_size",
    "optimizer",
    "dtype",
    "autocast",
)
"""Fields of the execution plan on which the numbers of a step depend."""

SPLIT = (
    "micro_batch",
    "gradient_accumulation",
    "steps_per_generation",
    "generation_sub_batch",
    "gradient_checkpointing",
)
"""Fields of the execution plan that cut the work of a step. They may change with what must not:
completions per step and per generation on each process. Another generation_sub_batch draws other
samples of the same distribution; with the others, what is sampled stays and the loss moves by
rounding (measured in float32: 2e-7)."""

PER_MICRO_BATCH = ("loss_type", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy")
"""Fields of spec.training that decide whether the size of a micro-batch is part of what is trained
(TrainingSpec.is_micro_batch_dependent)."""


def identity(plan: TrainingPlan, dataset_fingerprint: str) -> dict[str, str]:
    """The run's identity: field path → value as compact JSON."""
    dump = plan.model_dump(mode="json")
    parts: dict[str, Any] = {
        "model.name": plan.model.name,
        "model.revision": plan.model.revision,
        "dataset": dataset_fingerprint,
        "rewards": [_fixed_reward_fields(reward) for reward in dump["rewards"]],
        "reference.sync": dump["reference"]["sync"],
    }
    parts |= _prompts_and_ends(plan.model, plan.generation)
    parts |= _training_parts(plan.training)
    parts |= {f"plan.{name}": getattr(plan.execution, name) for name in EXECUTION + SPLIT}
    # Without LoRA the adapter's settings change no number of the run.
    if plan.execution.method == "LoRA":
        parts["adapter"] = plan.adapter.model_dump(mode="json", exclude_none=True)
    return {path: identity_text(value) for path, value in parts.items()}


def _training_parts(training: TrainingSpec) -> dict[str, Any]:
    """spec.training by field path.

    Of arguments that TRL and transformers name only those that are set: a later version of them
    has others.
    """
    dump = training.model_dump(mode="json")
    arguments = {
        "overrides": training.overrides.arguments,
        "lrSchedulerKwargs": training.lr_scheduler_kwargs.arguments,
    }
    parts = {f"training.{key}": value for key, value in dump.items() if key not in arguments}
    for name, argument_values in arguments.items():
        parts |= {f"training.{name}.{key}": value for key, value in argument_values.items()}
    return parts


def _prompts_and_ends(model: ModelSpec, generation: GenerationSpec) -> dict[str, Any]:
    """What turns messages into prompts and ends completions, as far as it is set."""
    template = model.chat_template
    parts = {
        # A message names the values that differ, and a template has thousands of characters.
        "model.chatTemplate": template and hashlib.sha256(template.encode()).hexdigest(),
        "model.chatTemplateKwargs": model.chat_template_kwargs,
        "generation.stop": generation.stop,
        "generation.kwargs": generation.kwargs,
    }
    return {path: value for path, value in parts.items() if value}


def _fixed_reward_fields(reward: dict[str, Any]) -> dict[str, Any]:
    """A reward without what may change between attempts: how its service is reached, and how much
    of it may fail."""
    service = reward.get("http") or {}
    http = {name: value for name, value in service.items() if name not in HTTPReward.REACHED_BY}
    fields = {name: value for name, value in reward.items() if name not in RewardSpec.JUDGED_BY}
    return {**fields, "http": http or None}


MAY_DIFFER = ("training.maxSteps", "training.numTrainEpochs")
"""What may differ from the run that this one begins with: how far it goes."""


def require_same_run(checkpoint: Path, manifest: Manifest, current: dict[str, str]) -> None:
    """Reject another run's checkpoint.

    Raises:
        BadInput: with every field that differs.
    """
    if differences := _differences(manifest.identity, current):
        raise BadInput(
            f"{checkpoint} belongs to a different run and resuming it would change the result: "
            f"{'; '.join(differences)}. Restore these settings, or start a new job (it begins at "
            "step 0)"
        )


def require_continuable(checkpoint: Path, manifest: Manifest, current: dict[str, str]) -> None:
    """Reject a checkpoint of spec.resumeFrom that this run would not continue exactly.

    Raises:
        BadInput: with every field that differs, but for MAY_DIFFER.
    """
    all_differences = _differences(manifest.identity, current)
    differences = [each for each in all_differences if not each.startswith(MAY_DIFFER)]
    if differences:
        raise BadInput(
            f"spec.resumeFrom: {checkpoint} can't be continued by this job, which differs from the "
            f"one that made it: {'; '.join(differences)}. Set these fields of the spec as they "
            "were there, or remove spec.resumeFrom"
        )


def trained_identity(identity: dict[str, str]) -> dict[str, str]:
    """The part of an identity that must match: without the split, but with what the split may not
    change."""
    meaning = {
        path: value for path, value in identity.items() if path.removeprefix("plan.") not in SPLIT
    }
    micro, per_step, per_generation = (identity.get(f"plan.{name}") for name in SPLIT[:3])
    # A split may change only if each process still trains on as many completions per step and per
    # generation.
    if micro and per_step and per_generation:
        meaning["plan.completions_per_step"] = str(int(micro) * int(per_step))
        meaning["plan.completions_per_generation"] = str(int(micro) * int(per_generation))
    if micro and _depends_on_micro_batch(identity):
        meaning["plan.micro_batch"] = micro
    return meaning


def _depends_on_micro_batch(identity: dict[str, str]) -> bool:
    texts = {name: identity.get(f"training.{to_camel(name)}") for name in PER_MICRO_BATCH}
    settings = {name: json.loads(text) for name, text in texts.items() if text}
    return TrainingSpec().model_copy(update=settings).is_micro_batch_dependent


def _differences(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    # A setting that is newer than the checkpoint had its default, which trains as before: otherwise
    # no job could be resumed after an upgrade of the image.
    defaults = _training_parts(TrainingSpec())
    by_path = {path: identity_text(value) for path, value in defaults.items()}
    current_defaults = {path: value for path, value in by_path.items() if path in current}
    saved, current = trained_identity(current_defaults | saved), trained_identity(current)
    paths = sorted(saved.keys() | current.keys())
    changed = [path for path in paths if saved.get(path) != current.get(path)]
    return [
        f"{path}: checkpoint {saved.get(path, 'unset')}, now {current.get(path, 'unset')}"
        for path in changed
    ]
