"""README.md of an exported model: what it was made of and how to load it, in the form that the hub
reads.

It says nothing of the attempt: a later one that exports the same model writes the same page. What
users wrote comes into the front matter only as names that the hub itself would take. Below it, it
comes only as code, which renders as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is in __all__

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import WEIGHTS, sha256_digests, weights_hash
from grpo_api.report.revisions import DATASET_FINGERPRINT
from grpo_api.spec.rewards import reward_names

CARD = "README.md"
TAGS = ["grpo", "trl", "grpo-operator"]
HERE = "PATH_OF_THIS_FOLDER"
"""What a model that is in no repository is loaded by."""
CHOICES = {
    "strategy", "method", "zero_stage", "offload", "accelerator", "gpu_product", "gpus", "nodes",
    "processes_per_node",
    "micro_batch", "gradient_accumulation", "steps_per_generation", "gradient_checkpointing",
    "optimizer", "dtype",
    "autocast",
}  # fmt: skip
"""Of the plan, what says how it was computed; prices and labels of the cluster are not
published."""
SECTIONS = ("model", "dataset", "training", "reference", "adapter")
"""Of the spec, what is shown; rewards by name only, since they may hold addresses."""
LEFT_OUT = {"token_secret_ref", "volume", "cache", "files", "chat_template"}
"""Fields of these sections that describe the cluster and not the model; and the template, a file of
the export."""
HASH = f"- hash of the weights (`sha256sum *{WEIGHTS} | sha256sum`):"
LOADERS = {
    True: ("peft", "AutoPeftModelForCausalLM"),
    False: ("transformers", "AutoModelForCausalLM"),
}
"""Library and class that load an adapter (True) or a whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that is trained, and what it was made of."""

    plan: TrainingPlan
    steps: int
    """Optimizer steps of the whole run."""
    metrics: Mapping[str, float]
    """Of the last step, by the keys of grpo_api.report.training_metrics."""
    revisions: Mapping[str, str]
    """Commits by path in the spec, and the data's fingerprint."""
    address: str = HERE
    """What it is loaded by."""

    @property
    def is_adapter(self) -> bool:
        """Whether the export is an adapter that needs its base."""
        return self.plan.execution.method == "LoRA" and not self.plan.adapter.merge_on_export


def write_card(trained: TrainedModel, folder: Path) -> None:
    """Write the page into the folder of an exported model, in place of one that a library wrote.

    Raises:
        OSError: a file can't be read or written.
    """
    weights = {path.name: path for path in folder.glob(f"*{WEIGHTS}")}
    hash_of_weights = weights_hash(sha256_digests(weights))
    (folder / CARD).write_text(model_card(trained, hash_of_weights), encoding="utf-8")


def converted_card(page: str, hash_of_weights: str, conversion: str) -> str:
    """The page of an export, as it is true of the whole model that a conversion made of it;
    `conversion` says how."""
    (peft, adapter), (library, whole) = LOADERS[True], LOADERS[False]
    beginnings = {
        "base_model_relation: adapter": "base_model_relation: finetune",
        f"library_name: {peft}": f"library_name: {library}",
        "This adapter was": "This model was",
        f"from {peft} import {adapter}": f"from {library} import {whole}",
        f"model = {adapter}.": f"model = {whole}.",
    }
    lines = []
    for line in page.split("\n"):  # no line that users wrote begins like one of these
        begun = next((old for old in beginnings if line.startswith(old)), "")
        lines.append(beginnings.get(begun, "") + line.removeprefix(begun))
        if line.startswith(HASH):
            lines[-1:] = [f"{HASH} {_code(hash_of_weights)}", f"- converted: {conversion}"]
    return "\n".join(lines)


def model_card(trained: TrainedModel, hash_of_weights: str) -> str:
    """The page: front matter between two lines `---`, then Markdown."""
    return "\n".join(
        ["---", _front_matter(trained).to_yaml(), "---", "", *_body(trained, hash_of_weights), ""]
    )


def _front_matter(trained: TrainedModel) -> ModelCardData:
    plan, datasets = trained.plan, _repository_name(trained.plan.dataset.name)
    base = _repository_name(plan.model.name)
    relation = "adapter" if trained.is_adapter else "finetune"
    return ModelCardData(
        base_model=base,
        base_model_relation=relation if base else None,
        datasets=[datasets] if datasets else None,
        library_name=LOADERS[trained.is_adapter][0],
        pipeline_tag="text-generation",
        tags=TAGS,
    )


def _repository_name(name: str | None) -> str | None:
    """The name if it can be a repository's: the hub refuses a page with another, such as a
    folder's."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return None
    return name


def _body(trained: TrainedModel, hash_of_weights: str) -> Iterator[str]:
    plan = trained.plan
    kind = "adapter" if trained.is_adapter else "model"
    yield f"# {_code(plan.job.name)}"
    yield f"\nThis {kind} was trained by GRPO with grpo-operator for {trained.steps} steps.\n"
    yield from _facts(trained, hash_of_weights)
    yield f"\n## Load\n\n{_loading(trained)}\n"
    yield f"## Metrics of step {trained.steps}\n"
    for key, value in sorted(trained.metrics.items()):
        yield f"- {_code(key)}: {value:.6g}"
    hidden: dict[str, Any] = dict.fromkeys(("model", "dataset"), LEFT_OUT)
    settings = plan.model_dump(
        mode="json", include=set(SECTIONS), exclude=hidden, exclude_none=True, by_alias=True
    )
    yield f"\n## Settings\n\n```json\n{_json(settings)}\n```\n"
    choices = plan.execution.model_dump(mode="json", include=CHOICES, by_alias=True)
    yield f"## Plan\n\n```json\n{_json(choices)}\n```"


def _facts(trained: TrainedModel, hash_of_weights: str) -> Iterator[str]:
    plan, revisions = trained.plan, trained.revisions
    yield f"- base: {_name_with_commit(plan.model.name, revisions.get('model'))}"
    yield f"- dataset: {_name_with_commit(plan.dataset.name or 'files', revisions.get('dataset'))}"
    fingerprint = revisions.get(DATASET_FINGERPRINT, "unknown")
    yield f"- fingerprint of the rows (sha256): {_code(fingerprint)}"
    yield f"- rewards: {', '.join(map(_code, reward_names(plan.rewards)))}"
    yield f"{HASH} {_code(hash_of_weights)}"


def _name_with_commit(name: str, commit: str | None) -> str:
    return f"{_code(name)}, commit {_code(commit)}" if commit else _code(name)


def _loading(trained: TrainedModel) -> str:
    library, loader = LOADERS[trained.is_adapter]
    lines = (
        f"from {library} import {loader}",
        "from transformers import AutoTokenizer",
        "",
        f'model = {loader}.from_pretrained("{trained.address}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{trained.address}")',
    )
    return "\n".join(["```python", *lines, "```"])


def _json(value: Any) -> str:
    """JSON on lines that begin with a space, a quote or a bracket, so that none of them ends the
    block of code."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def _code(text: str) -> str:
    """A text of any content as code in one line (CommonMark, section 6.1): more backticks around it
    than inside."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(printable.split()) or "?"
    runs = re.findall("`+", line)
    ticks = "`" * (1 + max(map(len, runs), default=0))
    return f"{ticks} {line} {ticks}"
