"""Where a run's files are on its checkpoint volume, and, with an object store, on each pod's own
disk.

    owner.json                   who may write (volume_checkpoints.py)
    attempt-N/
      outcome-rank-R.json        how the attempt's processes ended
      stacks-rank-R.txt          what its threads did when it stood still
      metrics.jsonl              rows of the run's steps, of the newest attempt
      samples.jsonl              completions of its steps, the same
      checkpoint-S/manifest.json written last: the checkpoint is complete
    export                       the finished model

Every part that writes there knows its folder from here, and none of them knows another.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from grpo_api.text.contract import ATTEMPT_PREFIX, CHECKPOINT_PREFIX

ATTEMPTS = f"{ATTEMPT_PREFIX}*"
"""Matches the folders of all attempts."""
CHECKPOINTS = f"{CHECKPOINT_PREFIX}*"
"""Matches the checkpoints of an attempt."""
MANIFEST = "manifest.json"
"""Names the files of a checkpoint that is complete."""
_COPY = re.compile(rf"(?:{ATTEMPT_PREFIX}|{CHECKPOINT_PREFIX})(?![0-9]+\Z)")
"""Begins the name of a folder that a user made beside ours, such as `checkpoint-5.bak`."""


def glob_run(folder: Path, pattern: str) -> Iterator[Path]:
    """Paths below a run's or an attempt's folder that match; users' copies are left out.

    Raises:
        OSError: a folder is there and can't be listed.
    """
    # Path.glob skips such a folder, and a run whose checkpoints are not seen begins at step 0.
    first, _, rest = pattern.partition("/")
    try:
        paths = [path for path in folder.iterdir() if path.match(first)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        if _COPY.match(path.name):
            continue
        if rest:
            yield from glob_run(path, rest)
        else:
            yield path


def run_folder(checkpoint_directory: str | None) -> Path | None:
    """Folder of all attempts; None without a shared volume."""
    return Path(checkpoint_directory) if checkpoint_directory is not None else None


def attempt_folder(checkpoint_directory: str | None, attempt: int) -> Path | None:
    """Folder of an attempt's checkpoints, samples and outcomes; None without a shared volume."""
    folder = run_folder(checkpoint_directory)
    return folder and folder / attempt_folder_name(attempt)


def attempt_folder_name(attempt: int) -> str:
    """Name of an attempt's folder."""
    return f"{ATTEMPT_PREFIX}{attempt}"


def checkpoint_folder(attempt: Path, step: int) -> Path:
    """Folder into which transformers writes the checkpoint of a step."""
    return attempt / f"{CHECKPOINT_PREFIX}{step}"


def number_in_name(folder: Path) -> int:
    """The attempt's number or the checkpoint's step that a folder's name ends with."""
    return int(folder.name.rpartition("-")[2])
