"""Looks for what a run on a GPU would miss in an environment of the trainer: libraries, modules and
compilers. Prints what it found as JSON.

Each of these would otherwise show on a GPU alone, and some only with one kind of job. The file
imports nothing of ours at its top, so that its text runs in a container of the image as well as
here. What it can't do without a GPU is to run a kernel.
"""

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("grpo_trainer", "grpo_acceptance")
NATIVE = ("torch", "nvidia/nccl", "vllm", "deepspeed")
"""Folders of site-packages whose libraries must find all that they name."""
FINDS_BY_ITSELF = ("torch", "nvidia/nccl")
"""Those of NATIVE that are loaded before torch has loaded CUDA's libraries."""
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the GPU driver, which come from the node."""
RDMA = ("libibverbs.so.1", "libmlx5.so.1", "librdmacm.so.1")
"""What NCCL opens by name to use RDMA."""
NOT_FOUND = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)


def missing_libraries(ldd: str) -> list[str]:
    """Names of the libraries that `ldd` did not find, the driver's left out."""
    return sorted(set(NOT_FOUND.findall(ldd)) - set(DRIVER))


def is_library(path: Path) -> bool:
    """Return True for `libx.so` and `libx.so.1`, and for nothing else."""
    return re.search(r"\.so(\.\d+)*$", path.name) is not None


def libraries(site_packages: Path) -> dict[str, list[Path]]:
    """The libraries of each folder of NATIVE."""
    return {
        folder: sorted(filter(is_library, (site_packages / folder).rglob("*.so*")))
        for folder in NATIVE
    }


def unresolved(site_packages: Path) -> dict[str, list[str]]:
    """Missing libraries by the path of the library that names them."""
    found = {}
    torch_folders = [site_packages / "torch/lib", *site_packages.glob("nvidia/*/lib")]
    for folder, paths in libraries(site_packages).items():
        variables = dict(os.environ)
        if folder not in FINDS_BY_ITSELF:
            variables["LD_LIBRARY_PATH"] = ":".join(map(str, torch_folders))
        for path in paths:
            done = subprocess.run(
                ["ldd", str(path)], env=variables, capture_output=True, text=True, check=False
            )
            if missing := missing_libraries(done.stdout):
                found[str(path.relative_to(site_packages))] = missing
    return found


def modules(package: str) -> list[str]:
    """Names of all modules of a package."""
    folders = importlib.import_module(package).__path__
    return [module.name for module in pkgutil.walk_packages(folders, f"{package}.")]


def import_failures(names: Iterable[str]) -> dict[str, str]:
    """The error of each module that can't be imported."""
    failures = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module raises is what we look for
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


def is_compiled_by_inductor() -> bool:
    """Return True if what Inductor makes of a function for the CPU, in C++, computes the same."""
    import torch

    def function(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(values) * values.sum()

    values = torch.arange(1024, dtype=torch.float32) / 1024
    return bool(torch.allclose(torch.compile(function)(values), function(values)))


def kernel_bytes(capability: int) -> Mapping[str, int]:
    """Bytes of machine code of our kernel for a compute capability such as 90, by the type of its
    values."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from grpo_trainer.engine_pod.hash_check import BLOCK
    from grpo_trainer.engine_pod.hash_kernel import _TILE, block_sums_kernel

    sizes = {}
    for kind in ("i8", "i16", "i32"):
        types = {"values": f"*{kind}", "sums": "*i64", "BLOCK": "constexpr", "TILE": "constexpr"}
        types |= dict.fromkeys(("count", "begin_low", "begin_high"), "i64")
        source = ASTSource(block_sums_kernel, types, {"BLOCK": BLOCK, "TILE": _TILE})
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        sizes[kind] = len(built.asm["cubin"])
    return sizes


def loadable(names: Iterable[str]) -> list[str]:
    """Those of the libraries that the loader finds."""
    found = []
    for name in names:
        try:
            CDLL(name)
        except OSError:
            continue
        found.append(name)
    return found


def main(capabilities: list[str]) -> None:
    """Print all of it, the kernels for these compute capabilities."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    site_packages = Path(torch.origin).parents[1]
    counts = {folder: len(paths) for folder, paths in libraries(site_packages).items()}
    found = {
        "libraries": counts,
        "unresolved": unresolved(site_packages),
        "failures": import_failures(name for package in PACKAGES for name in modules(package)),
        "inductor": is_compiled_by_inductor(),
        "kernels": {each: kernel_bytes(int(each)) for each in capabilities},
        "rdma": loadable(RDMA),
        "nvcc": shutil.which("nvcc"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
