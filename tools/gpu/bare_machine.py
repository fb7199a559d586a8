"""A GPU machine without a GPU: a virtual environment with the packages of such a machine and
nothing else.

It shows that the kit holds all that is missing there. torch comes without CUDA's libraries, which
nothing here can use.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness.images.wheels import CONSTRAINTS, SLIM_SCRIPT, SUFFIX, slim_torch
from harness.programs.cache import cache_root, cached, content_key
from harness.programs.processes import run
from harness.programs.progress import progress
from harness.programs.python_packages import install_packages

from . import kit
from .import_closure import SOURCE_FOLDERS

TORCH = "2.11.0"
PACKAGES = (
    "transformers==5.17.0",
    "accelerate==1.15.0",
    "huggingface-hub==1.33.0",
    "triton==3.6.0",
    "typer<0.25",  # a later one brings pydantic, which such a machine lacks
    "pandas",
    "pyarrow",
)
"""What was read on such a machine; pandas and pyarrow are of any version."""
PREFERRED_PYTHON = "3.12"


def find_python() -> str:
    """Return an interpreter of PREFERRED_PYTHON that can make virtual environments, or else the one
    that runs us."""
    name = f"python{PREFERRED_PYTHON}"
    on_path = shutil.which(name)
    candidates = [on_path] if on_path else []
    candidates += sorted(
        map(str, Path.home().glob(f".pyenv/versions/{PREFERRED_PYTHON}.*/bin/{name}"))
    )
    for candidate in candidates:
        # pyenv puts a program on the path that ends with an error unless the version is selected
        if (
            subprocess.run(
                [candidate, "-c", "import ensurepip, venv"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return candidate
    return sys.executable


def version_of(python: str) -> str:
    """Return an interpreter's version as major.minor."""
    return run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()


def packed_kit(python: str) -> Path:
    """Return the folder of the kit for a version of Python; it is downloaded and built once for
    each content."""
    key = content_key(
        python, *sorted(kit.contents(python)), CONSTRAINTS, Path(kit.__file__), *SOURCE_FOLDERS
    )

    def pack(folder: Path) -> None:
        kit.pack(folder, python)

    return cached(cache_root() / f"gpu-kit-{python}-{key}", pack)


def site_packages(python: str) -> Path:
    """Return a folder with the packages of a bare GPU machine for a version of Python, installed
    once."""
    key = content_key(TORCH, *PACKAGES, python, SLIM_SCRIPT)
    target = cache_root() / f"bare-gpu-machine-{key}"
    return (
        cached(target, lambda folder: _install(python, folder / "site-packages")) / "site-packages"
    )


def prepare() -> tuple[Path, Path]:
    """Return the folders of the machine's packages and of the kit; download and build what the
    cache lacks."""
    python = version_of(find_python())
    return site_packages(python), packed_kit(python)


def create(folder: Path, python: str) -> Path:
    """Make the machine's virtual environment; return its interpreter.

    Its packages lie elsewhere and are found by a .pth file, so that a machine costs no gigabyte.
    """
    run(python, "-m", "venv", folder)
    (folder / "lib" / f"python{version_of(python)}" / "site-packages" / "machine.pth").write_text(
        f"{site_packages(version_of(python))}\n"
    )
    return folder / "bin" / "python"


def run_kit(
    machine: Path, kit_folder: Path, output: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the kit on a machine as a person would, without this process's environment."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(machine),
        "OUTPUT": str(output),
        "OMP_NUM_THREADS": "1",
    }
    command = [str(kit_folder / "run"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _install(python: str, target: Path) -> None:
    target.mkdir(parents=True)
    with progress(f"the packages of a bare GPU machine with Python {python}"):
        for_python = ("--python-version", python)
        slim_torch(TORCH, target, *for_python)
        install_packages(
            target, *for_python, "--compile-bytecode", f"torch=={TORCH}{SUFFIX}", *PACKAGES
        )
