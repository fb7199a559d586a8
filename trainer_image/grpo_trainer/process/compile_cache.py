"""Keeps what the start of an engine compiles: for this pod in /tmp, and for later pods on the
volume of spec.model.cache.

vLLM, Inductor and Triton compile for minutes when an engine starts for the first time. Each has a
cache, and finds out by hashes which of its entries are still good.

Pods do not write into one folder of the volume together. One reason is that vLLM rewrites files of
its cache in place (compilation/backends.py, save_to_file), so a reader can find half of one.
Inductor needs flock, which not every network file system has. So every pod has its own folder, and
what pods share is an archive. A pod reads it before the engine starts and replaces it afterwards by
a rename. So every reader finds the whole archive of one writer. Where two pods replace it at the
same time, the second one wins, and what only the first one had is compiled again.

A cache saves time and nothing else. A volume that is read-only, full or another user's, or a
damaged archive, costs a line in the log and never the start.
"""

import logging
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self
from zipfile import ZIP_DEFLATED, ZipFile

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.model import ModelSpec
from grpo_api.text.contract import CACHE_MOUNT, IMAGE_ENV, SCRATCH
from grpo_api.text.units import GIB

log = logging.getLogger(__name__)

_FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
COMPILED = "compiled"
"""Folder in /tmp, and on the volume."""
MAX_BYTES = 4 * GIB
"""Largest content of an archive. An archive grows when the settings of a job change, because the
entries of the earlier ones stay."""


@dataclass(frozen=True, slots=True)
class CompileCache:
    """What the engines of one pod compile."""

    folder: Path
    """This pod's own. Its path is the same in all pods, because Triton stores absolute paths."""
    archive: Path | None
    """What pods share; None without a volume, or without an engine."""

    @classmethod
    def of_pod(cls, model: ModelSpec, execution: ExecutionPlan, node: int | None = None) -> Self:
        """The cache of this pod; arguments as those of archive_path."""
        archive = archive_path(model, execution, node, os.environ.get(IMAGE_ENV, ""))
        return cls(Path(SCRATCH, COMPILED), archive)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which the libraries find their folders."""
        return {name: str(self.folder / folder) for name, folder in _FOLDERS.items()}

    def restore(self) -> None:
        """Fill the pod's folder from the archive, with all of it or with nothing. A container that
        starts again finds what its pod has."""
        if self.archive is None or self.folder.exists():
            return
        # Beside the folder: half of an entry there would end the engine's start.
        temporary = self.folder.with_name(f"{self.folder.name}.part")
        try:
            with ZipFile(self.archive) as archive:
                archive.extractall(temporary)
            temporary.rename(self.folder)
        except FileNotFoundError:
            return  # this is the first pod
        except Exception as error:  # zipfile raises nearly every kind at a damaged archive
            _log(f"{self.archive} is not used: {error}")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def publish(self) -> None:
        """Replace the archive by the content of the pod's folder, if that has anything new."""
        if self.archive is None:
            return
        try:
            sizes = {
                str(path.relative_to(self.folder)): path.stat().st_size
                for path in sorted(self.folder.rglob("*"))
                if path.is_file()
            }
            if not sizes.items() <= self._archived_sizes().items():
                self._write(self.archive, sizes)
        except OSError as error:
            _log(f"{self.archive} is not written: {error}")

    def _write(self, path: Path, sizes: dict[str, int]) -> None:
        total = sum(sizes.values())
        if total > MAX_BYTES:
            _log(f"{path} is not written: {total} bytes are more than {MAX_BYTES}")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            # Level 1: machine code shrinks to a third, and a start waits for this.
            with ZipFile(
                temporary, "w", ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
            ) as archive:
                for name in sizes:
                    archive.write(self.folder / name, name)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _archived_sizes(self) -> dict[str, int]:
        """Size of each file in the archive; nothing where it can't be read."""
        assert self.archive is not None
        try:
            with ZipFile(self.archive) as archive:
                return {entry.filename: entry.file_size for entry in archive.infolist()}
        except Exception:  # as in restore, where the log has a line about it
            return {}


def archive_path(
    model: ModelSpec,
    execution: ExecutionPlan,
    node: int | None,
    image: str,
    volume: Path = Path(CACHE_MOUNT),
) -> Path | None:
    """Where pods of this image on this GPU product share what they compile; None where they don't.

    The libraries' hashes guard against a wrong entry. The key keeps archives small, and those of
    different images and products apart. `node` is the node rank of a training pod, since entries of
    vLLM belong to a rank; None for the pod of an engine, all of which have the same ranks. `volume`
    is where that of spec.model.cache is mounted."""
    engine = execution.engine
    if engine is None or model.cache is None:
        return None
    product = engine.gpu_product or execution.gpu_product or execution.accelerator
    compiled_for = (
        model.name, model.revision, execution.dtype, execution.autocast, engine.kind,
        engine.tensor_parallel,
    )  # fmt: skip
    folder = volume / COMPILED / _digest(image) / re.sub(r"[^-A-Za-z0-9_]", "_", product)
    pod = "engine" if node is None else f"node-{node}"
    return folder / f"{pod}-{_digest(repr(compiled_for))}.zip"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def _log(text: str) -> None:
    log.info(f"compile cache: {text}")
