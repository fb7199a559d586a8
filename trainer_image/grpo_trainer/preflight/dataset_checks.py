"""Checks the first rows of the dataset, by the code that prepares all of them for training."""

from dataclasses import dataclass
from typing import Any

import datasets

from grpo_api.report.preflight import TemplateUse

from ..data.dataset import Rows, build_prompts, data_root, make_prompts, read_rows
from ..data.prompts import Prompt, PromptEncoder, render_limit
from ..data.row_sources import dataset_repository
from ..weights.model_files import require_decoder
from .findings import NotChecked, Preflight


@dataclass(frozen=True, slots=True)
class FirstRows:
    """Rows of the dataset, and the prompts that they make."""

    table: datasets.Dataset
    prompts: list[Prompt]
    """Empty where the rows make none."""
    are_trained_on: bool = False
    """False if training may drop some of them: without a tokenizer it is unknown which are long."""

    @property
    def has_chats(self) -> bool:
        """Whether the prompts are lists of messages."""
        return bool(self.prompts) and not isinstance(self.prompts[0], str)

    @property
    def trained_on(self) -> datasets.Dataset:
        """The rows that are certainly trained on; maybe none, with the columns' names."""
        return self.table if self.are_trained_on else self.table.select(range(0))


def check_dataset(preflight: Preflight, tokenizer: Any) -> FirstRows | None:
    """Check files, columns, prompts and their lengths; None if no rows could be read."""
    dataset, findings, hub = preflight.plan.dataset, preflight.findings, preflight.hub
    root, rows = data_root(), None
    with findings.check("spec.dataset.name" if dataset.name else "spec.dataset.files"):
        repository = dataset_repository(dataset)
        folder = root if dataset.files else repository.folder
        if folder is not None:
            preflight.require_input(f"folder {folder}", is_there=folder.is_dir())
        else:
            findings.require_hub()
            preflight.require_token("dataset.tokenSecretRef", dataset.token_secret_ref)
            if not preflight.scope.is_whole:
                hub.commit(repository)
                return None
        rows = read_rows(dataset, root=root, hub=hub, most_rows=preflight.scope.most_rows)
    if rows is None:
        return None
    prompts: list[Prompt] = []
    trained_on: datasets.Dataset | None = None
    with findings.check("spec.dataset.promptColumn"):
        prompts = list(build_prompts(rows, dataset).values())
    if prompts and tokenizer is not None:
        if preflight.plan.generation.stop:
            with findings.check("spec.generation.stop"):
                require_decoder(tokenizer)
        shape, kwargs = findings.architecture, preflight.plan.model.chat_template_kwargs
        encoder = PromptEncoder(tokenizer, kwargs, shape.vocab_size if shape else None)
        with findings.check("spec.dataset"):
            trained_on = _measure(rows, prompts[0], encoder, preflight)
    if trained_on is not None:
        return FirstRows(trained_on, list(trained_on["prompt"]), are_trained_on=True)
    return FirstRows(rows.table, prompts)


def _measure(
    rows: Rows, first: Prompt, encoder: PromptEncoder, preflight: Preflight
) -> datasets.Dataset:
    """Report the prompts' lengths, and what the chat template makes of the first. Return the rows
    that are trained on. Raises NotChecked where there are none."""
    plan, findings = preflight.plan, preflight.findings
    with render_limit(preflight.scope.render_seconds):
        prompts = make_prompts(rows, plan.dataset, plan.training, encoder)
    if not len(prompts.rows) and plan.dataset.files:
        # Rows that are sorted by length, the longest first, are no mistake.
        all_rows = read_rows(plan.dataset, root=data_root())
        prompts = make_prompts(all_rows, plan.dataset, plan.training, encoder)
    lengths = prompts.lengths
    findings.first_prompt = encoder.render(first)
    template = _template_use(first, encoder)
    findings.prompts = lengths.model_copy(update={"template": template})
    # All rows of files were read by now. Those of a hub that follow may be shorter.
    if lengths.rows and lengths.dropped == lengths.rows:
        raise NotChecked(
            f"each of the first {lengths.rows} prompts is longer than training.maxPromptLength = "
            f"{plan.training.max_prompt_length} tokens, and their mean is {lengths.mean:.0f}; "
            "training drops them, and needs shorter ones after them"
        )
    return prompts.rows


def _template_use(prompt: Prompt, encoder: PromptEncoder) -> TemplateUse:
    """What becomes of the tokenizer's chat template."""
    if not isinstance(prompt, str):
        return "Applied"
    has_template = encoder.tokenizer.chat_template is not None
    return "Unused" if has_template else "None"
