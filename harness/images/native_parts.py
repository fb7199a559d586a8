"""Loads once whatever native code a GPU run loads or compiles late, on a machine without a GPU;
prints what it found.

A missing compiler or library would else show in the first step on a GPU. It stands alone, so that
it runs in a pod of the trainer's image as well as here. What it can't do without a driver: run a
kernel, or open a device.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource
from trl.kernels import chunked_logprob

SCRATCH = Path(os.environ.get("HOME", "/tmp"))
POINTERS = {"mm": "*bf16", "targets": "*i64"}
"""Types of the kernels' pointers that aren't float32."""
INTEGERS = ("mm_stride", "vocab_start", "n_cols")


def triton_driver() -> list[str]:
    """What Triton's driver offers once it is compiled against a libcuda with nothing behind its
    functions."""
    source = Path(driver.__file__).with_name("driver.c").read_text(encoding="utf-8")
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", source)))
    library = SCRATCH / "stub" / "libcuda.so.1"
    library.parent.mkdir(parents=True, exist_ok=True)
    stub = "".join(f"int {name}(void) {{ return 100; }}\n" for name in functions)
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-x",
        "c",
        "-",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(library),
    ]
    subprocess.run(command, input=stub, text=True, check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    return sorted(vars(driver.CudaUtils()))


def scoring_kernels(architecture: int) -> dict[str, int]:
    """Bytes of machine code of TRL's two scoring kernels for an architecture such as 90."""
    target = GPUTarget("cuda", architecture, 32)
    kernels = (chunked_logprob._forward_kernel, chunked_logprob._backward_kernel)
    return {
        kernel.__name__: len(triton.compile(_source(kernel), target=target).asm["cubin"])
        for kernel in kernels
    }


def _source(kernel: Any) -> ASTSource:
    """A kernel with the types that bfloat16 training calls it with, and every optional output."""
    constants = {
        (at,): 1024 if name == "BLOCK_SIZE" else True for at, name in _named(kernel, constant=True)
    }
    types = {name: _type(name) for _, name in _named(kernel, constant=False)}
    return ASTSource(
        kernel, types | {kernel.arg_names[at]: "constexpr" for (at,) in constants}, constants
    )


def _named(kernel: Any, *, constant: bool) -> list[tuple[int, str]]:
    """Places and names of the arguments that are constants, or of the others."""
    return [(at, name) for at, name in enumerate(kernel.arg_names) if name.isupper() is constant]


def _type(name: str) -> str:
    if name.endswith("_ptr"):
        return POINTERS.get(name.removesuffix("_ptr"), "*fp32")
    return "i32" if name in INTEGERS else "fp32"


def bitsandbytes_libraries() -> list[str]:
    """bitsandbytes' libraries for the CPU and for torch's CUDA, by name; torch has loaded the CUDA
    libraries."""
    import bitsandbytes

    names = [
        "libbitsandbytes_cpu.so",
        f"libbitsandbytes_cuda{(torch.version.cuda or '').replace('.', '')}.so",
    ]
    for name in names:
        ctypes.CDLL(str(Path(bitsandbytes.__file__).with_name(name)))
    return names


def deepspeed_accelerator() -> str:
    """The device that DeepSpeed runs on when it is imported as on a GPU node, where it finds no
    CUDA compiler."""
    os.environ["DS_ACCELERATOR"] = "cuda"
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def nccl_version() -> str:
    """Version that NCCL's library gives itself; a stub gives none."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def main(architectures: list[str]) -> None:
    """Print all of it as JSON, the kernels for these architectures or for all that torch is built
    for."""
    built = (torch._C._cuda_getArchFlags() or "").replace("sm_", "").split()
    found = {
        "user": os.getuid(),
        "driver": triton_driver(),
        "kernels": {each: scoring_kernels(int(each)) for each in architectures or built},
        "bitsandbytes": bitsandbytes_libraries(),
        "deepspeed": deepspeed_accelerator(),
        "nccl": nccl_version(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
