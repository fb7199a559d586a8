"""The trainer's dependencies for CPU tests: torch without CUDA's own libraries, as a wheel and as a
mounted folder.

The shipped trainer image is 9 GB, most of it CUDA and vLLM. A repacked torch wheel of the same
version with a local version suffix satisfies the same constraints and is preferred by installers,
so the shipped Dockerfile builds a small image unchanged. The folder is for test nodes that show it
to every container, so that the image needs none of it.
"""

import tomllib
import zipfile
from pathlib import Path

from ..programs.cache import REPOSITORY, cache_root, cached, content_key, remove
from ..programs.processes import ClusterError, run
from ..programs.progress import progress
from ..programs.python_packages import install_packages

PYTHON = ("--python-version", "3.11")  # of the Debian base image
SUFFIX = "+nocuda"
SLIM_SCRIPT = Path(__file__).with_name("slim_torch.sh")
CONSTRAINTS = REPOSITORY / "constraints.txt"
CUDA_REQUIREMENTS = ("cuda-", "nvidia-", "triton")


def torch_wheels() -> Path:
    """Return a folder that holds the repacked torch wheel, for an installer's `find-links`."""
    version = pinned("torch")
    key = content_key(version, SUFFIX, *CUDA_REQUIREMENTS, SLIM_SCRIPT)
    return cached(cache_root() / f"torch-wheel-{key}", lambda folder: _repack(version, folder))


def site_packages() -> Path:
    """Return a folder `site-packages` with all that the trainer imports but our own packages.

    The folder's name matters: dill decides by it what counts as installed.
    """
    requirements = [*_trainer_requirements(), "triton"]  # the repacked torch doesn't ask for it
    key = content_key(*requirements, CONSTRAINTS, SLIM_SCRIPT)
    target = cache_root() / f"trainer-{key}"
    return (
        cached(target, lambda folder: _install(requirements, folder / "site-packages"))
        / "site-packages"
    )


def pinned(package: str) -> str:
    """Return the version that constraints.txt gives a package.

    Raises:
        ClusterError: it gives none.
    """
    for line in CONSTRAINTS.read_text().splitlines():
        name, _, version = line.partition("==")
        if name.strip() == package:
            return version.split(";")[0].strip()
    raise ClusterError(f"constraints.txt does not pin {package}: add {package}==<version>")


def _trainer_requirements() -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return sorted([*project["dependencies"], *project["optional-dependencies"]["trainer"]])


def _install(requirements: list[str], target: Path) -> None:
    links = torch_wheels()
    target.mkdir(parents=True)
    with progress("the test nodes' folder of the trainer's dependencies"):
        options = (*PYTHON, "-c", CONSTRAINTS, "--find-links", links, "--compile-bytecode")
        install_packages(target, *options, *requirements)


def _repack(version: str, folder: Path) -> None:
    tree = folder / "tree"
    tree.mkdir(parents=True)
    with progress(f"torch {version} without CUDA's libraries"):
        info = slim_torch(version, tree, *PYTHON)
        tag = next(
            line for line in (info / "WHEEL").read_text().splitlines() if line.startswith("Tag: ")
        )
        _zip(tree, info, folder / f"torch-{version}{SUFFIX}-{tag.removeprefix('Tag: ')}.whl")
    remove(tree)


def slim_torch(version: str, tree: Path, *options: str) -> Path:
    """Install torch without CUDA's libraries into a folder; return its dist-info folder, whose
    version has SUFFIX."""
    # copies, not links into uv's cache: the metadata is edited below
    install_packages(tree, *options, "--no-deps", "--link-mode", "copy", f"torch=={version}")
    run("sh", SLIM_SCRIPT, tree)
    info = (tree / f"torch-{version}.dist-info").rename(tree / f"torch-{version}{SUFFIX}.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(slim_metadata(metadata.read_text(), version))
    return info


def slim_metadata(text: str, version: str) -> str:
    """Return a wheel's METADATA with our version and without its requirements on CUDA's wheels and
    triton."""
    kept = [
        line
        for line in text.splitlines()
        if not line.startswith(tuple(f"Requires-Dist: {name}" for name in CUDA_REQUIREMENTS))
    ]
    return (
        "\n".join(kept).replace(f"\nVersion: {version}\n", f"\nVersion: {version}{SUFFIX}\n", 1)
        + "\n"
    )


def _zip(tree: Path, info: Path, wheel: Path) -> None:
    """Write the wheel uncompressed: it is unpacked at once and thrown away with the cache."""
    files = [file for file in sorted(tree.rglob("*")) if file.is_file() and file.name != "RECORD"]
    names = [str(file.relative_to(tree)) for file in files]
    record = info / "RECORD"
    record.write_text(
        "".join(f"{_quoted(name)},,\n" for name in [*names, str(record.relative_to(tree))])
    )
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name in [*names, str(record.relative_to(tree))]:
            archive.write(tree / name, name)


def _quoted(name: str) -> str:
    return f'"{name}"' if "," in name else name
