"""`kubectl grpo` for krew: an archive per platform with the command line and all that it needs but
Python itself.

The command line is Python, and pydantic's core is native. So an archive carries the native parts
for each version of Python (their names differ, and Python loads the one of its own) beside the pure
ones, which they share.
"""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.images.wheels import CONSTRAINTS
from harness.programs.cache import REPOSITORY
from harness.programs.processes import ClusterError, flags
from harness.programs.python_packages import install_packages

from .archives import EXECUTABLE, pack, sha256
from .source import Release

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NAME = "kubectl-grpo"
LAUNCHER = Path(__file__).with_name(NAME)
MAIN = "import sys\n\nfrom grpo_cli.__main__ import main\n\nsys.exit(main())\n"
UNWANTED = (
    "bin",
    "*.dist-info/RECORD",
    "*.dist-info/direct_url.json",
    "*.dist-info/uv_cache.json",
    ".lock",
)
"""What an installer leaves of its machine."""
DESCRIPTION = """\
Plans distributed GRPO training before a GPU is taken (strategy, memory per phase, time), renders what the operator
would create, and shows jobs of the cluster: status, logs, what became of the GPUs' time.
"""  # noqa: E501
CAVEATS = f"""\
It needs Python {PYTHONS[0]} to {PYTHONS[-1]} as python3 on the PATH.
`status`, `logs` and `usage` need the operator in the cluster.
"""


@dataclass(frozen=True)
class Platform:
    """A platform by krew's names and by uv's.

    Linux: of glibc, not of musl.
    """

    os: str
    arch: str
    target: str

    @property
    def name(self) -> str:
        """As in a file's name."""
        return f"{self.os}-{self.arch}"


PLATFORMS = (
    Platform("linux", "amd64", "x86_64-manylinux2014"),
    Platform("linux", "arm64", "aarch64-manylinux2014"),
    Platform("darwin", "amd64", "x86_64-apple-darwin"),
    Platform("darwin", "arm64", "aarch64-apple-darwin"),
)


def build(release: Release, wheel: Path, target: Path) -> dict[Platform, Path]:
    """Write an archive per platform into the folder."""
    return {platform: archive(release, wheel, target, platform, PYTHONS) for platform in PLATFORMS}


def archive(
    release: Release, wheel: Path, target: Path, platform: Platform, pythons: tuple[str, ...]
) -> Path:
    """Write the archive of one platform for these versions of Python into the folder."""
    packed = target / f"{NAME}-{release.version}-{platform.name}.tar.gz"
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "root"
        for python in pythons:
            tree = Path(temporary) / python
            _install(wheel, tree, platform, python)
            merge(tree, root / "lib")
        (root / "lib" / "__main__.py").write_text(MAIN)
        shutil.copy(REPOSITORY / "LICENSE", root)
        (root / NAME).write_text(launcher(platform, pythons))
        (root / NAME).chmod(EXECUTABLE)
        pack(root, packed, release.epoch)
    return packed


def launcher(platform: Platform, pythons: tuple[str, ...]) -> str:
    """The script that finds a Python."""
    named = " ".join(f"python{version}" for version in reversed(pythons))
    words = {
        "PYTHONS": named,
        "OLDEST": pythons[0],
        "NEWEST": pythons[-1],
        "PLATFORM": platform.name,
    }
    return re.sub("|".join(words), lambda found: words[found[0]], LAUNCHER.read_text())


def merge(tree: Path, into: Path) -> None:
    """Add one Python's packages to those of the others; of metadata, the first one's stay.

    Raises:
        ClusterError: a file has another content there.
    """
    for path in sorted(tree.rglob("*")):
        there = into / path.relative_to(tree)
        if path.is_dir():
            there.mkdir(parents=True, exist_ok=True)
        elif not there.exists():
            shutil.copy(path, there)
        elif ".dist-info" not in str(there) and there.read_bytes() != path.read_bytes():
            raise ClusterError(
                f"{path.relative_to(tree)} differs between versions of Python: they can't share a "
                "folder"
            )


def manifest(release: Release, archives: dict[Platform, Path]) -> dict[str, Any]:
    """krew's manifest of the plugin (krew.googlecontainertools.github.com/v1alpha2)."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": NAME.removeprefix("kubectl-")},
        "spec": {
            "version": f"v{release.version}",
            "homepage": "https://grpo.dev",
            "shortDescription": "Plan and watch GRPO training jobs",
            "description": DESCRIPTION,
            "caveats": CAVEATS,
            "platforms": [
                _platform(release, platform, packed) for platform, packed in archives.items()
            ],
        },
    }


def _platform(release: Release, platform: Platform, packed: Path) -> dict[str, Any]:
    return {
        "selector": {"matchLabels": {"os": platform.os, "arch": platform.arch}},
        "uri": f"{release.downloads}/{packed.name}",
        "sha256": sha256(packed),
        "bin": NAME,
    }


def _install(wheel: Path, tree: Path, platform: Platform, python: str) -> None:
    chosen = {
        "--python-platform": platform.target,
        "--python-version": python,
        "--only-binary": ":all:",
        "-c": CONSTRAINTS,
    }
    install_packages(tree, *flags(chosen), wheel)
    for pattern in UNWANTED:
        for path in tree.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
