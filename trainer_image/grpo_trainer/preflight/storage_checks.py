"""Checks the places that a run writes to, and that the image has the libraries that the plan needs.

The places are the checkpoint volume or object store, and the hub repository of the export.
Libraries are looked for without importing them.
"""

import errno
import math
import os
import shutil
import uuid
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.checkpoint import CheckpointSpec, ExportSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.contract import (
    CHECKPOINT_STORE_ENV,
    EXPORT_TOKEN_ENV,
    SIGNING_KEY,
    SIGNING_KEY_ENV,
)
from grpo_api.text.units import GIB

from ..checkpoints.signing_key import FIELD, require_key
from ..checkpoints.volume_checkpoints import REFUSALS, refusal_message
from ..hub.push import require_target
from ..hub.retry import bytes_in
from ..runtime.durable_files import write_atomically
from ..runtime.errors import BadInput, DiskFailed
from ..runtime.paths import attempt_folder_name
from ..stores.run_store import require_conditions, run_store
from .findings import Preflight

FULL = (errno.ENOSPC, errno.EDQUOT)


def check_places(preflight: Preflight) -> None:
    """Check where checkpoints and the export go, and the key that signs them."""
    plan, findings = preflight.plan, preflight.findings
    wait_seconds = preflight.scope.wait_seconds
    if plan.checkpoint.store:
        with findings.check("spec.checkpoint.store"):
            has_settings = any(name.startswith(CHECKPOINT_STORE_ENV) for name in os.environ)
            preflight.require_input("the pods' access to the store", is_there=has_settings)
            run = run_store(plan)
            if run is not None:
                store = run.store.within(wait_seconds)
                require_conditions(store, attempt_folder_name(plan.job.attempt))
                # An attempt asks for both first; the right to list is one of its own.
                replace(run, store=store).head()
                store.object_sizes(may_be_empty=True)
    elif plan.checkpoint_directory is not None:
        with findings.check("spec.checkpoint"):
            run_folder = Path(plan.checkpoint_directory)
            # The attempt makes the folders that are missing.
            folder = next(place for place in (run_folder, *run_folder.parents) if place.is_dir())
            preflight.require_input("the checkpoint volume", is_there=folder != Path("/"))
            needed = bytes_needed(plan.checkpoint, plan.training, plan.export, plan.execution)
            # Later checkpoints replace those of earlier attempts.
            require_writable(folder, needed - bytes_in(run_folder))
    export = plan.export
    if export and export.hub:
        with findings.check("spec.export.hub.repository"):
            findings.require_hub()
            has_token = bool(os.environ.get(EXPORT_TOKEN_ENV))
            preflight.require_input("the Secret of hub.tokenSecretRef", is_there=has_token)
            require_target(export.hub, lambda _: None, longest_wait=wait_seconds)
    if export and export.signing_key_secret_ref:
        with findings.check(FIELD):
            key = Path(os.environ.get(SIGNING_KEY_ENV, SIGNING_KEY))
            preflight.require_input("the Secret of signingKeySecretRef", is_there=key.exists())
            require_key()


def bytes_needed(
    checkpoint: CheckpointSpec,
    training: TrainingSpec,
    export: ExportSpec | None,
    execution: ExecutionPlan,
) -> int:
    """Disk that the run is predicted to fill: the checkpoints that it keeps, one more while it is
    written, and the export; 0 where the plan predicts none."""
    checkpoints = checkpoint.keep + 1
    if training.max_steps:
        save_count = math.ceil(training.max_steps / execution.save_every_steps)
        checkpoints = min(checkpoints, save_count)
    memory = execution.memory
    checkpoint_bytes = memory.checkpoint_bytes if memory else 0
    export_bytes = 0
    if export and export.is_model_kept:
        export_bytes = execution.export_bytes
    return checkpoints * checkpoint_bytes + export_bytes


def require_writable(folder: Path, needed: int) -> None:
    """Write a small file and remove it, and compare the free space with what the run needs.

    Raises:
        BadInput: the folder can't be written.
        DiskFailed: it is full, or has too little room for the run.
    """
    probe = folder / f".preflight-{uuid.uuid4().hex}"
    try:
        write_atomically(probe, "a preflight wrote this file")
        probe.unlink()
    except OSError as error:
        if error.errno == errno.EROFS:
            raise BadInput(
                f"the volume at {folder} is read-only; use a claim that can be mounted read-write, "
                "and no snapshot or readOnly volume"
            ) from error
        if error.errno in REFUSALS:
            raise BadInput(refusal_message(folder, error)) from error
        if error.errno in FULL:
            raise DiskFailed(
                f"the volume at {folder} is full: {error.strerror}; remove something there, or "
                "use a larger one"
            ) from error
        raise DiskFailed(f"the volume at {folder} can't be written: {error.strerror}") from error
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFailed(
            f"the volume at {folder} has {free / GIB:.1f} GiB free, and the run is predicted to "
            f"write {needed / GIB:.1f} GiB; use a larger volume, or lower checkpoint.keep"
        )


def check_image(preflight: Preflight) -> None:
    """Look for vLLM and for libraries of which the plan has a use."""
    plan, findings = preflight.plan, preflight.findings
    findings.has_vllm = find_spec("vllm") is not None
    if plan.generation.engine == "Colocated" and not findings.has_vllm:
        with findings.check("spec.generation.engine"):
            raise BadInput(
                "the image has no vLLM, which Colocated needs; set spec.image to one that has it, "
                "or engine to Transformers"
            )
    needed = {
        "deepspeed": plan.execution.zero_stage > 0,
        "bitsandbytes": plan.execution.optimizer == "AdamW8bit",
        "math_verify": any(
            reward.accuracy and reward.accuracy.compare == "Math" for reward in plan.rewards
        ),
    }
    missing = [name for name, is_used in needed.items() if is_used and find_spec(name) is None]
    if missing:
        with findings.check("spec.image"):
            raise BadInput(
                f"the image has no {', '.join(missing)}, which this plan needs; use an image with "
                "the trainer's packages"
            )
