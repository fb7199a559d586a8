"""Exports a finished run as a plain Hugging Face folder that `from_pretrained` loads: the model, or
the adapter.

A training checkpoint won't do: it has optimizer state and partitions that only the trainer reads.
"""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from peft import PeftConfig, PeftModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import TRAINING_ARGS_NAME

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.artifacts import SUMS, Export, ReportBytes, sums_text, weights_hash
from grpo_api.spec.checkpoint import ExportSpec
from grpo_api.text.contract import EXPORT_FOLDER

from ..gang import ranks
from ..runtime.durable_files import disk_errors, retry_disk_errors, sync_folder, sync_tree
from ..runtime.errors import DiskFailed
from ..runtime.paths import attempt_folder_name, number_in_name, run_folder
from ..weights.checkpoint_files import ADAPTER, ADAPTER_CONFIG
from ..weights.model_files import Source
from ..weights.models import load_causal
from .checkpoint_target import CheckpointTarget
from .hashing import list_files, read_sums, sha256_sums

Describe = Callable[[Path], None]
"""Writes into the folder of a model that is complete what it was made of."""


def export_model(
    plan: TrainingPlan,
    target: CheckpointTarget | None,
    source: Source,
    save: Callable[[str], None],
    *,
    describe: Describe = lambda _: None,
    attest: Describe = lambda _: None,
    report_bytes: ReportBytes = lambda _: None,
) -> Path | None:
    """Write `<checkpoint_directory>/export`, whole or not at all; None if nothing is to be kept. A
    collective.

    Without a volume a model that goes elsewhere is written to the pod's own disk first. LoRA is
    exported as an adapter, or merged into its base with spec.adapter.mergeOnExport. A full disk is
    waited for: all that is left to do is this. Before the folder has its name, rank 0 calls
    `describe`, when the model is complete, `attest`, when the hashes of all files are there, and
    `report_bytes`, from any thread, with the bytes of each piece of a file that was hashed.

    Raises:
        DiskFailed: the disk took nothing for minutes; the last checkpoint stands.
        Preempted: a newer attempt owns the folder.
    """
    root = _root(plan.checkpoint_directory, plan.export, plan.job.uid)

    def require_owner() -> None:
        if target:
            target.require_owner()

    def require_owner_if_readable() -> None:
        # A disk that fails costs a run without a model nothing.
        with suppress(OSError):
            require_owner()

    if root is None or (plan.export and not plan.export.is_model_kept):
        # What ends as a success is the run's, also of a superseded attempt.
        ranks.run_on_rank0(require_owner_if_readable)
        return None
    folder = root / EXPORT_FOLDER
    temporary = _temporary_folder(root, plan.job.attempt)

    def complete(temporary: Path) -> None:
        describe(temporary)
        sums = sha256_sums(temporary, list_files(temporary), report_bytes)
        (temporary / SUMS).write_text(sums_text(sums), encoding="utf-8")
        attest(temporary)

    @disk_errors()
    def publish() -> None:
        require_owner()
        _complete_model(plan, source, complete, temporary)
        # Merging and hashing take minutes, in which a newer attempt may claim the folder.
        require_owner()
        _replace_export(temporary, folder)

    def write_and_publish() -> None:
        ranks.run_on_rank0(lambda: _remove_begun(temporary))
        ranks.run_on_all(lambda: save(str(temporary)), DiskFailed)
        ranks.run_on_rank0(publish)

    retry_disk_errors(write_and_publish)
    return folder


def describe_export(folder: Path, url: str | None = None) -> Export:
    """The Export entry of the Outcome for a published export; `url` is its address on an object
    store."""
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    size = sum(list_files(folder).values())
    hashed = weights_hash(read_sums(folder))
    form: Literal["Adapter", "Model"] = "Adapter" if is_adapter else "Model"
    if url:
        return Export(to="ObjectStore", path=url, format=form, bytes=size, weights_hash=hashed)
    return Export(to="Volume", path=str(folder), format=form, bytes=size, weights_hash=hashed)


def _root(directory: str | None, export: ExportSpec | None, job_uid: str) -> Path | None:
    """Where the export is written; on the pod's own disk if it only passes through."""
    root = run_folder(directory)
    if root is None and export and export.to == "Hub":
        root = Path(tempfile.gettempdir()) / f"grpo-{job_uid}"
        root.mkdir(exist_ok=True)
    return root


def _remove_begun(temporary: Path) -> None:
    """Remove what tries of this attempt and of older ones have left: files that this try does not
    write, and whole models of attempts that were killed."""
    for attempt in range(1, number_in_name(temporary) + 1):
        begun = _temporary_folder(temporary.parent, attempt)
        for folder in (begun, _replaced_folder(begun)):
            shutil.rmtree(folder, ignore_errors=True)


def _temporary_folder(root: Path, attempt: int) -> Path:
    return root / f".{EXPORT_FOLDER}-{attempt_folder_name(attempt)}"


def _replaced_folder(temporary: Path) -> Path:
    """Where the earlier export goes when the one in `temporary` takes its name."""
    return temporary.with_name(f"{temporary.name}-replaced")


def _complete_model(
    plan: TrainingPlan, source: Source, complete: Describe, temporary: Path
) -> None:
    if plan.execution.method == "LoRA" and plan.adapter.merge_on_export:
        merge_adapter(source, temporary, remote_code=plan.model.trust_remote_code)
    elif plan.execution.method == "LoRA":
        _name_base(source, temporary)
    # a pickle with paths of this attempt's pods, useless to a user who loads the model
    (temporary / TRAINING_ARGS_NAME).unlink(missing_ok=True)
    complete(temporary)
    # Durable before it has its name: a power cut leaves no export that is complete only by its
    # name.
    sync_tree(temporary)


def _replace_export(temporary: Path, folder: Path) -> None:
    """Give the finished model its name."""
    replaced = _replaced_folder(temporary)
    # rename(2) replaces no folder that has files. An earlier export is moved before it is deleted:
    # a kill during the deletion would leave half a model by that name.
    with suppress(FileNotFoundError):
        folder.replace(replaced)
    temporary.replace(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _name_base(source: Source, folder: Path) -> None:
    """Name the base by what the plan calls it and its commit; PEFT names the folder of its files on
    this node."""
    config = PeftConfig.from_pretrained(folder)
    config.base_model_name_or_path, config.revision = source.name, source.revision or None
    config.save_pretrained(folder)


def merge_adapter(source: Source, folder: Path, *, remote_code: bool) -> None:
    """Replace the adapter in `folder` by its base model `source` with the adapter merged in.

    The base is loaded again, into host memory, because the live model may be partitioned.
    DeepSpeed's config is unset first: with one in force, transformers loads a model under ZeRO's
    zero.Init, partitioned.
    """
    unset_hf_deepspeed_config()
    base = load_causal(source, remote_code)
    merged = PeftModel.from_pretrained(base, folder).merge_and_unload()
    for name in (ADAPTER_CONFIG, ADAPTER):
        (folder / name).unlink()
    merged.save_pretrained(folder)
