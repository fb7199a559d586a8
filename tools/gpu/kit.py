"""The kit: what a bare GPU machine lacks for the acceptance run, as wheels in one small folder.

Such a machine has the packages of MACHINE, of any versions, and often no network. The kit holds as
wheels everything else that the import statements of the acceptance run lead to. Its script `run`
installs the wheels into a temporary folder and runs the acceptance; `install` only installs, into a
folder for PYTHONPATH.

DeepSpeed is built without its operators, none of which the trainer compiles. bitsandbytes ships a
library for every CUDA since 11.8; two of them stay.
"""

import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from harness.images.wheels import CONSTRAINTS
from harness.programs.processes import ClusterError, run

from ..release.python_package import copied
from . import engine_archive
from .import_closure import distributions_of, import_closure, modules_of, required_by

MACHINE = (
    "accelerate", "filelock", "fsspec", "huggingface-hub", "jinja2", "numpy", "packaging", "pandas",
    "psutil",
    "pyarrow", "pyyaml", "regex", "safetensors", "tokenizers", "torch", "tqdm", "transformers",
    "triton",
    "typing-extensions",
)  # fmt: skip
"""What the machine has: torch, transformers, accelerate, pandas, pyarrow, and what every version of
them requires."""
LOADED_BY_NAME = {"bitsandbytes": "transformers loads it for the optimizer AdamW8bit"}
"""Distributions that the checks use without an import statement of ours, and who loads them."""
LEFT_OUT = {
    "cryptography": "no check signs a model",
    "httpx2": "no check asks the hub",
    "obstore": "no check has an object store",
    "vllm": "too large; without engine_archive.py the engines' checks are not run",
}
"""Modules that are imported inside functions which no check calls, and why."""
BUILT = "deepspeed"
"""There is no wheel of it."""
BITSANDBYTES_LIBRARIES = ("cpu", "cuda130")
"""Libraries of bitsandbytes that stay."""
LIMIT_BYTES = 40_000_000
"""A kit must fit where little may be carried."""
PLATFORMS = [
    f"manylinux_{name}_x86_64"
    for name in ("2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
]
"""Of 64-bit Intel and AMD machines; pip takes each by its exact name."""
INSTALL = """\
#!/bin/sh
# Installs the kit into a folder of its own, for PYTHONPATH; what the machine has stays as it is.
# PYTHON: the interpreter that has torch (default: python3).
exec "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \\
  --target "${1:?usage: install FOLDER}" "$(dirname "$0")"/*.whl
"""  # noqa: E501
RUN = """\
#!/bin/sh
# Installs the kit into a temporary folder and runs the acceptance. Takes the options of grpo_acceptance.
# OUTPUT: folder for result.json, result.md and log.txt (default: gpu-output).
# PYTHON: the interpreter that has torch (default: python3).
set -eu
began=$(date +%s)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
echo "installing the kit into $site"
"$(dirname "$0")/install" "$site"
if [ -e "$(dirname "$0")/vllm.tar.xz" ]; then tar xJf "$(dirname "$0")/vllm.tar.xz" -C "$site"; fi
PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" -m grpo_acceptance \\
  --output "${OUTPUT:-gpu-output}" --used $(($(date +%s) - began)) "$@"
"""  # noqa: E501


def pack(folder: Path, python: str, engine: int | None = None) -> int:
    """Fill the folder with the kit for a version of Python such as 3.12; returns its bytes.

    With `engine`, a GPU architecture such as 90, vLLM for it lies beside the kit.

    Raises:
        ClusterError: pip failed, or the kit or the archive of vLLM is larger than its limit.
    """
    versions = pinned()
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary)
        _download(wheels, python, contents(python) - {BUILT})
        run(
            "env", "DS_BUILD_OPS=0", *_command("wheel", "-w", wheels, f"{BUILT}=={versions[BUILT]}")
        )
        _pip("wheel", "-w", wheels, copied(wheels / "sources"))
        (large,) = wheels.glob("bitsandbytes-*.whl")
        slim(large)
        require_small(wheels.glob("*.whl"))
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for wheel in wheels.glob("*.whl"):
            shutil.copy(wheel, folder)
    if engine:
        with tempfile.TemporaryDirectory() as temporary:
            _download(Path(temporary), python, {"vllm", *engine_archive.PACKAGES})
            engine_archive.pack(folder, Path(temporary), engine)
    for name, text in {"install": INSTALL, "run": RUN}.items():
        script = folder / name
        script.write_text(text)
        script.chmod(0o755)
    return sum(path.stat().st_size for path in folder.iterdir())


def _download(folder: Path, python: str, names: Iterable[str]) -> None:
    """The image's versions of these distributions, as wheels for another machine."""
    versions = pinned()
    wanted = [f"{name}=={versions[name]}" for name in sorted(names)]
    _pip("download", "-d", folder, *_target(python), *wanted)


def contents(python: str) -> set[str]:
    """Return the distributions that the acceptance run imports and MACHINE lacks, for a version of
    Python.

    Raises:
        ClusterError: a module that is imported belongs to nothing that is installed here.
    """
    programs = [
        *modules_of("grpo_acceptance"),
        "grpo_trainer.__main__",
        "grpo_trainer.training.training_run",
    ]
    modules = import_closure(programs, inside_functions=True).third_party.keys() - LEFT_OUT.keys()
    return required_by(distributions_of(modules) | LOADED_BY_NAME.keys(), python, stop_at=MACHINE)


def pinned() -> dict[str, str]:
    """The image's versions by package."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", CONSTRAINTS.read_text(), flags=re.MULTILINE))


def slim(wheel: Path) -> None:
    """Remove all but BITSANDBYTES_LIBRARIES from a wheel of bitsandbytes and from its list of
    files."""
    with zipfile.ZipFile(wheel) as whole:
        contents = {name: whole.read(name) for name in whole.namelist() if not _dropped(name)}
    (record,) = (name for name in contents if name.endswith(".dist-info/RECORD"))
    rows = contents[record].decode().splitlines(keepends=True)
    contents[record] = "".join(row for row in rows if not _dropped(row.partition(",")[0])).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as small:
        for name, content in contents.items():
            small.writestr(name, content)


def require_small(wheels: Iterable[Path]) -> None:
    """Hold the kit to its size.

    Raises:
        ClusterError: it is larger; the largest wheels are named.
    """
    sizes = {path.name: path.stat().st_size for path in wheels}
    total = sum(sizes.values())
    if total > LIMIT_BYTES:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
        named = ", ".join(f"{name} {sizes[name] / 1e6:.1f} MB" for name in largest)
        raise ClusterError(
            f"the kit has {total / 1e6:.1f} MB, more than {LIMIT_BYTES / 1e6:.0f}; the largest: "
            f"{named}"
        )


def _dropped(name: str) -> bool:
    """Whether a file of bitsandbytes is a library for another accelerator."""
    library = re.fullmatch(r"bitsandbytes/libbitsandbytes_(\w+)\.so", name)
    return bool(library) and library[1] not in BITSANDBYTES_LIBRARIES  # type: ignore[index]  # there is one


def _target(python: str) -> list[str]:
    """pip's options for another machine's interpreter."""
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]


def _pip(verb: str, *arguments: object) -> None:
    run(*_command(verb, *arguments))


def _command(verb: str, *arguments: object) -> list[object]:
    return [
        sys.executable,
        "-m",
        "pip",
        verb,
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        *arguments,
    ]
