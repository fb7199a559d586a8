"""The wheel and the source distribution: built from a copy of the sources, and the same bytes every
time."""

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from harness.programs.cache import REPOSITORY
from harness.programs.processes import ClusterError, run

from .archives import settle_package

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "operator", "trainer_image")
GENERATED = ("*.egg-info", "__pycache__")


def build(target: Path, epoch: int) -> tuple[Path, Path]:
    """Write wheel and source distribution into the folder; returns both.

    Raises:
        ClusterError: a build failed, or the source distribution does not build this very wheel.
    """
    with tempfile.TemporaryDirectory() as temporary:
        source = copied(Path(temporary) / "source")
        _build("--sdist", source, target, epoch)
        (sdist,) = target.glob("grpo_operator-*.tar.gz")
        settle_package(sdist, epoch)
        wheel = build_wheel(source, target, epoch)
        with tarfile.open(sdist) as packed:
            packed.extractall(temporary, filter="data")
        again = build_wheel(
            Path(temporary) / sdist.name.removesuffix(".tar.gz"), Path(temporary), epoch
        )
        if again.read_bytes() != wheel.read_bytes():
            raise ClusterError(
                f"{sdist.name} builds another wheel than the checkout: compare {wheel.name}'s "
                "contents"
            )
    return wheel, sdist


def build_wheel(source: Path, target: Path, epoch: int) -> Path:
    """The wheel of a folder of sources."""
    _build("--wheel", source, target, epoch)
    (wheel,) = target.glob("grpo_operator-*.whl")
    return wheel


def copied(folder: Path) -> Path:
    """The checkout's sources elsewhere: a build leaves folders of its own beside them, and finds
    old ones."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(
                REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns(*GENERATED)
            )
        else:
            shutil.copy(REPOSITORY / name, folder)
    return folder


def _build(kind: str, source: Path, target: Path, epoch: int) -> None:
    command = [sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", target, source]
    run("env", f"SOURCE_DATE_EPOCH={epoch}", *command)
