"""vLLM for one GPU generation as an archive of 40 MB, for machines where little may be carried.

vLLM's wheel has 315 MB, nearly all of it machine code for many GPU generations. The code that the
machine's GPU cannot run is overwritten with zeros, which compress to nothing. Libraries keep their
layout, so that the driver finds the rest as before. With the kit and torch 2.11 this archive of
vLLM 0.30 trained on an H100.

The layout of `.nv_fatbin` is not documented by NVIDIA. It was read from vLLM's libraries:
containers, each with a header and entries; an entry is PTX or machine code for one generation.
"""

import re
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from harness.programs.processes import ClusterError

PACKAGES = (
    "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2", "compressed-tensors", "depyf",
    "fastapi", "httpx2", "ijson", "jmespath", "lark", "llguidance", "loguru",
    "model-hosting-container-standards", "msgspec", "openai", "openai-harmony",
    "partial-json-parser", "pybase64", "python-json-logger", "pyzmq", "setproctitle", "sniffio",
    "starlette", "uvicorn", "watchfiles", "xgrammar",
)  # fmt: skip
"""What vLLM imports for an engine in a training process and neither the kit nor the machine has.
Found by importing its GPU modules until none was missing."""
MACHINE = ("cloudpickle", "pillow", "requests", "urllib3", "uvloop")
"""What the machine must have beside the kit's MACHINE."""
UNUSED = re.compile(
    r"vllm/(third_party/(deep_gemm|fmha_sm100)/|vllm-rs$|entrypoints/serve/instrumentator/static/)"
    r"|.*_vllm_fa2_C.*"
)
"""Files that no engine of the checks opens; FlashAttention 2 is for generations before Hopper."""
HEAD_WIDTHS = (64, 128)
"""Widths of attention heads whose FlashAttention 3 kernels stay, in bfloat16."""
WHOLE_LIBRARY = "_C_stable_libtorch"
"""The library that an engine of a dense model calls. Others, such as that for experts, keep machine
code of the generation and lose their PTX."""
LIMIT_BYTES = 45_000_000

_CONTAINER = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2


class Entry(NamedTuple):
    """PTX or machine code in a library."""

    start: int
    """Of its content, in bytes from the begin of the file."""
    size: int
    kind: int
    architecture: int
    """As in sm_90."""


def pack(folder: Path, wheels: Path, architecture: int) -> Path:
    """Write vllm.tar.xz with the wheels of a folder, vLLM's among them, for one architecture.

    Raises:
        ClusterError: it is larger than LIMIT_BYTES.
    """
    target = folder / "vllm.tar.xz"
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(target, "w:xz") as archive:
        root = Path(temporary)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                wanted = [name for name in packed.namelist() if not UNUSED.match(name)]
                packed.extractall(root, wanted)
        for library in sorted(root.glob("vllm/**/*.so")):
            code = bytearray(library.read_bytes())
            erase_other_code(code, architecture, _is_wanted_in(library.name))
            library.write_bytes(code)
        for path in sorted(root.iterdir()):
            archive.add(path, path.name)
    size = target.stat().st_size
    if size > LIMIT_BYTES:
        raise ClusterError(
            f"{target} has {size / 1e6:.1f} MB, more than {LIMIT_BYTES / 1e6:.0f}: look which "
            "libraries of vLLM have grown"
        )
    return target


def erase_other_code(
    library: bytearray, architecture: int, is_wanted: Callable[[Entry, bytes], bool]
) -> None:
    """Overwrite with zeros what a GPU of this architecture does not run, or is not wanted.

    Of a container with machine code for the architecture only that stays; of any other the newest
    PTX that its driver can compile.
    """
    for container in containers(library):
        own = [
            entry
            for entry in container
            if (entry.kind, entry.architecture) == (_MACHINE_CODE, architecture)
        ]
        compilable = [
            entry
            for entry in container
            if entry.kind == _PTX and entry.architecture <= architecture
        ]
        newest = sorted(compilable, key=lambda entry: entry.architecture)[-1:]
        kept = own or newest
        for entry in container:
            end = entry.start + entry.size
            if entry not in kept or not is_wanted(entry, bytes(library[entry.start : end])):
                library[entry.start : end] = bytes(entry.size)


def containers(library: bytes | bytearray) -> Iterator[list[Entry]]:
    """Entries of each container in a library for 64-bit machines; none without GPU code."""
    position, end = _fatbin_section(library)
    while position + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, position)
        if magic != _CONTAINER:
            position += 8  # containers are aligned
            continue
        position += header
        yield list(_entries(library, position, position + size))
        position += size


def _entries(library: bytes | bytearray, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, position)
        (architecture,) = struct.unpack_from("<I", library, position + 28)
        yield Entry(position + header, size, kind, architecture)
        position += header + size


def _fatbin_section(library: bytes | bytearray) -> tuple[int, int]:
    """Begin and end of the section .nv_fatbin in the file (ELF-64, System V ABI, chapter 4)."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", library, table + number * entry_size)
        for number in range(count)
    ]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        begin = names + name
        if library[begin : library.index(0, begin)] == b".nv_fatbin":
            return offset, offset + size
    return 0, 0


def _is_wanted_in(library: str) -> Callable[[Entry, bytes], bool]:
    """Which code of a library of vLLM stays."""
    name = library.partition(".")[0]
    if name == "_vllm_fa3_C":
        return _is_wanted_attention
    if name == WHOLE_LIBRARY:
        return lambda *_: True
    return lambda entry, _: entry.kind == _MACHINE_CODE


def _is_wanted_attention(_: Entry, code: bytes) -> bool:
    """Whether an entry of FlashAttention 3 is the scheduler, or in bfloat16 for HEAD_WIDTHS. Its
    entries are not compressed, so that they hold the kernels' mangled names."""
    kernel = max(re.findall(rb"_ZN\w{40,}", code), key=len, default=b"")
    if not re.search(rb"bfloat16_t|half_t|float_e4m3_t", kernel):
        return True
    if b"Combine" in kernel:
        return b"bfloat16_t" in kernel
    widths = "|".join(map(str, HEAD_WIDTHS)).encode()
    return re.search(rb"ELi(" + widths + rb")ENS_10bfloat16_t", kernel) is not None
