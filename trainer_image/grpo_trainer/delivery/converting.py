"""Converts an export for who wants it otherwise: the adapter merged into its base, or weights of another dtype.

In the pod, since the base is there, and so that no laptop needs torch or room for both.
"""

import shutil
from pathlib import Path
from typing import Any, cast

from grpo_api.artifacts import SUMS, WEIGHTS, sums_text
from grpo_api.plan import TrainingPlan

from ..checkpoints.export import merge_adapter
from ..checkpoints.hashing import read_sums, sha256_sums
from ..checkpoints.volume import list_files
from ..errors import BadInput
from ..hub.repositories import Hub, Repository
from ..weights.files import ADAPTER_CONFIG
from ..weights.models import Dtype, Source, load_causal, locate

_INDEX = ".safetensors.index.json"


def convert(plan: TrainingPlan, export: Path, folder: Path, dtype: str | None, *, merge: bool) -> Path:
    """Write the converted model, with hashes of its own, to `folder`, which must not exist; returns it.

    What belongs to the exported weights only, such as a signature, stays behind.

    Raises:
        BadInput: there is no adapter to merge, or one that isn't asked to be, or its base can't be had.
        OSError: the disk fails, or is full.
    """
    adapter = (export / ADAPTER_CONFIG).is_file()
    if adapter != merge:
        raise BadInput("the export is a whole model: leave --merge out" if merge else "--dtype needs --merge here")
    target = cast(Dtype, dtype or plan.execution.dtype)
    _copy(export, folder, weights=adapter)
    if adapter:
        base = Repository("model", plan.model.name, plan.model.revision, "model")
        source = locate(base, target, Hub(plan.revisions))
        merge_adapter(source, folder, remote_code=plan.model.trust_remote_code)
    else:
        source = Source(plan.model.name, export, "", target)
        model: Any = load_causal(source, plan.model.trust_remote_code)
        model.save_pretrained(folder)
    (folder / SUMS).write_text(sums_text(sha256_sums(folder, list_files(folder))), encoding="utf-8")
    return folder


def _copy(export: Path, folder: Path, *, weights: bool) -> None:
    """Copy the model's files, with its weights or without."""
    folder.mkdir()
    for name in read_sums(export) or list_files(export):
        if weights or not name.endswith((WEIGHTS, _INDEX)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(export / name, folder / name)
