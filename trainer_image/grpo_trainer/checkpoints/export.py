"""Exports a finished run as a plain Hugging Face folder that `from_pretrained` loads: the model, or the adapter.

A training checkpoint won't do: it has optimizer state and partitions that only the trainer reads.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from peft import PeftConfig, PeftModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from grpo_api.plan import TrainingPlan

from ..errors import DiskFailed
from ..files import disk_errors, patiently, sync_folder, sync_tree
from ..gang import ranks
from ..paths import EXPORT, attempt_name, run_folder
from ..weights.files import ADAPTER, ADAPTER_CONFIG
from ..weights.models import Source, load_causal
from .volume import require_owner


def export_model(plan: TrainingPlan, source: Source, save: Callable[[str], None]) -> Path | None:
    """Write `<checkpoint_directory>/export`, whole or not at all; None without a volume. A collective.

    LoRA is exported as an adapter, or merged into its base with spec.adapter.mergeOnExport. A full disk is waited for:
    all that is left to do is this.

    Raises:
        DiskFailed: the disk took nothing for minutes; the last checkpoint stands.
        Preempted: a newer attempt owns the folder.
    """
    root = run_folder(plan)
    if root is None:
        return None
    folder = root / EXPORT
    patiently(lambda: _export(plan, source, save, folder))
    return folder


def _export(plan: TrainingPlan, source: Source, save: Callable[[str], None], folder: Path) -> None:
    temporary = folder.with_name(f".{EXPORT}-{attempt_name(plan)}")
    ranks.on_main(lambda: shutil.rmtree(temporary, ignore_errors=True))  # of a try that failed
    ranks.together(lambda: save(str(temporary)), DiskFailed)
    ranks.on_main(disk_errors()(lambda: _publish(plan, source, temporary, folder)))


def _publish(plan: TrainingPlan, source: Source, temporary: Path, folder: Path) -> None:
    require_owner(plan)
    if plan.execution.method == "LoRA" and plan.adapter.merge_on_export:
        _merge(source, temporary, remote_code=plan.model.trust_remote_code)
    elif plan.execution.method == "LoRA":
        _name_base(source, temporary)
    sync_tree(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    sync_folder(folder.parent)


def _name_base(source: Source, folder: Path) -> None:
    """Name the base by what the plan calls it and its commit; PEFT names the folder of its files on this node."""
    config = PeftConfig.from_pretrained(folder)
    config.base_model_name_or_path, config.revision = source.name, source.revision or None
    config.save_pretrained(folder)


def _merge(source: Source, folder: Path, *, remote_code: bool) -> None:
    """Replace the saved adapter by the merged model.

    On a copy of the base read anew into host memory: the live one may be partitioned, and is read without ZeRO's
    zero.Init, which a DeepSpeed config in force would bring in.
    """
    unset_hf_deepspeed_config()
    base = load_causal(source, remote_code)
    merged = PeftModel.from_pretrained(base, folder).merge_and_unload()
    for name in (ADAPTER_CONFIG, ADAPTER):
        (folder / name).unlink()
    merged.save_pretrained(folder)
