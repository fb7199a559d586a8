"""The kit: what a bare GPU machine lacks for the acceptance run, as wheels in one small folder.

Such a machine has torch, transformers and what these need, of whatever versions, and often no network. So the kit holds
what is ours and what few others use, each alone (the machine's own stay), and a script that installs it beside them:

    gpu-kit/install FOLDER && PYTHONPATH=FOLDER python3 -m grpo_trainer.acceptance

DeepSpeed is built without its operators, none of which the trainer compiles, and bitsandbytes, which ships a library
for every CUDA since 11.8, keeps two.
"""

import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from ..images.wheels import CONSTRAINTS
from ..programs.processes import ClusterError, run
from ..release.python_package import copied

LACKED = (
    "annotated-types", "antlr4-python3-runtime", "bitsandbytes", "datasets", "dill", "hjson", "latex2sympy2-extended",
    "math-verify", "multiprocess", "peft", "pydantic", "pydantic-core", "trl", "typing-inspection",
)  # fmt: skip
"""Downloaded as wheels. peft is there on many machines, in versions that this TRL doesn't take."""
BUILT = "deepspeed"
"""There is no wheel of it."""
KEPT = ("cpu", "cuda130")
"""Libraries of bitsandbytes that stay."""
LIMIT_BYTES = 40_000_000
"""A kit must fit where little may be carried."""
PLATFORMS = [f"manylinux_{name}_x86_64" for name in ("2_28", "2_27", "2_24", "2_17")]
"""Of 64-bit Intel and AMD machines; pip takes each by its exact name."""
INSTALL = """\
#!/bin/sh
# Installs the kit into a folder of its own, for PYTHONPATH; what the machine has stays as it is.
# PYTHON: the interpreter that has torch; python3 unless it says otherwise.
exec "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \\
  --target "${1:?usage: install FOLDER}" "$(dirname "$0")"/*.whl
"""


def pack(folder: Path, python: str) -> int:
    """Fill the folder with the kit for a version of Python such as 3.12; returns its bytes.

    Raises:
        ClusterError: pip failed, or the kit is larger than LIMIT_BYTES.
    """
    versions = pinned()
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary)
        _pip("download", "-d", wheels, *_target(python), *(f"{name}=={versions[name]}" for name in LACKED))
        run("env", "DS_BUILD_OPS=0", *_command("wheel", "-w", wheels, f"{BUILT}=={versions[BUILT]}"))
        _pip("wheel", "-w", wheels, copied(wheels / "sources"))
        (large,) = wheels.glob("bitsandbytes-*.whl")
        slim(large)
        require_small(wheels.glob("*.whl"))
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for wheel in wheels.glob("*.whl"):
            shutil.copy(wheel, folder)
    script = folder / "install"
    script.write_text(INSTALL)
    script.chmod(0o755)
    return sum(path.stat().st_size for path in folder.iterdir())


def pinned() -> dict[str, str]:
    """The image's versions by package."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", CONSTRAINTS.read_text(), flags=re.MULTILINE))


def slim(wheel: Path) -> None:
    """Leave the libraries that aren't KEPT out of a wheel of bitsandbytes, and out of its list of files."""
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
        raise ClusterError(f"the kit has {total / 1e6:.1f} MB, more than {LIMIT_BYTES / 1e6:.0f}; the largest: {named}")


def _dropped(name: str) -> bool:
    """Whether a file of bitsandbytes is a library for another accelerator."""
    library = re.fullmatch(r"bitsandbytes/libbitsandbytes_(\w+)\.so", name)
    return bool(library) and library[1] not in KEPT  # type: ignore[index]  # there is one


def _target(python: str) -> list[str]:
    """pip's options for another machine's interpreter."""
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]


def _pip(verb: str, *arguments: object) -> None:
    run(*_command(verb, *arguments))


def _command(verb: str, *arguments: object) -> list[object]:
    return [sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", "--no-deps", *arguments]
