"""Install Python packages into a folder of their own, which is not the environment that runs us.

uv does it, as for `make venv`: it links from its cache, so gigabytes take seconds. Used for the
trainer's dependencies and, on machines without Go, for the Go that the package index has.
"""

import os
import shutil
import sys
from pathlib import Path

from .processes import ClusterError, run


def install_packages(target: Path, *arguments: object) -> None:
    """Install the packages and options into the folder; raise ClusterError with uv's words when
    that fails."""
    run(uv(), "pip", "install", "--quiet", "--target", target, *arguments)


def uv() -> str:
    """Return the path of uv: this environment's, else the machine's; raise ClusterError without
    one."""
    program = shutil.which(
        "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if program is None:
        raise ClusterError("uv is missing: pip install uv, or make venv")
    return program
