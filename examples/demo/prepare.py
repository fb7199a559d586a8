"""Puts the demo's model and problems on the job's volume, a folder of this machine.

They are what `python -m grpo_trainer.quickstart` writes. They are made once and kept in the user's
cache folder, since pretraining the model takes longer than training it.
"""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from harness.programs.cache import REPOSITORY, cache_root, cached, content_key

PROBLEMS = 2048
TRAINER = REPOSITORY / "trainer_image"
MAKER = "grpo_trainer.quickstart"


def make_files() -> Path:
    """Return a folder with the model and the problems, made if it is not in the cache."""
    source = TRAINER / f"{MAKER.replace('.', '/')}.py"
    key = content_key(source, str(PROBLEMS), version("torch"))
    return cached(cache_root() / f"first-job-{key}", _make)


def _make(folder: Path) -> None:
    paths = os.pathsep.join([str(REPOSITORY / "operator"), str(TRAINER)])
    command = [sys.executable, "-m", MAKER, str(folder), "--problems", str(PROBLEMS)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, check=True)


def fill_volume(volume: Path) -> None:
    """Copy the model and the problems to the volume, readable for training pods of any uid."""
    files = make_files()
    shutil.copytree(files / "model", volume / "model", dirs_exist_ok=True)
    shutil.copyfile(files / "arithmetic.jsonl", volume / "arithmetic.jsonl")
    for file in (volume / "model").iterdir():
        file.chmod(0o644)  # weights are saved for their owner alone


if __name__ == "__main__":
    make_files()
