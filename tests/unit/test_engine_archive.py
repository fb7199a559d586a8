"""vLLM for a machine where little may be carried: which GPU code of a library stays.

The libraries here are made of the parts that the archive reads; that vLLM's own have them is seen
when `make gpu-kit KIT_ENGINE=90` finds code to keep.
"""

import struct
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_codegen.acceptance import ROOT
from tools.gpu import kit
from tools.gpu.engine_archive import PACKAGES, UNUSED, containers, erase_other_code

PTX, MACHINE_CODE = 1, 2
HEADER = 64
"""Bytes before an entry's content."""


class Code(NamedTuple):
    """One entry."""

    kind: int
    architecture: int
    content: bytes


CODES = st.lists(
    st.builds(
        Code,
        st.sampled_from((PTX, MACHINE_CODE)),
        st.sampled_from((75, 80, 89, 90, 100, 120)),
        st.binary(min_size=7, max_size=7).map(lambda content: b"\1" + content),
    ),
    max_size=5,
)


def entry(code: Code) -> bytes:
    """An entry as it lies in a library."""
    begin = struct.pack("<HHIQ", code.kind, 0x101, HEADER, len(code.content))
    begin = begin.ljust(28, b"\0") + struct.pack("<I", code.architecture)
    return begin.ljust(HEADER, b"\0") + code.content


def section(packed: list[list[Code]]) -> bytes:
    """The content of .nv_fatbin."""
    bodies = [b"".join(map(entry, codes)) for codes in packed]
    return b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body for body in bodies)


def library(fatbin: bytes | None) -> bytes:
    """A 64-bit ELF file with a table of sections, .nv_fatbin among them if it has one."""
    names = b"\0.shstrtab\0.nv_fatbin\0".ljust(24, b"\0")
    content = b"\x7fELF".ljust(64, b"\0")
    begin_names, content = len(content), content + names
    begin_code, content = len(content), content + (fatbin or b"")
    table = len(content)
    rows = [(0, 0, 0), (1, begin_names, len(names))]
    if fatbin is not None:
        rows.append((11, begin_code, len(fatbin)))
    for name, offset, size in rows:
        content += struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size).ljust(64, b"\0")
    whole = bytearray(content)
    struct.pack_into("<Q", whole, 0x28, table)
    struct.pack_into("<HHH", whole, 0x3A, 64, len(rows), 1)
    return bytes(whole)


@given(packed=st.lists(CODES, max_size=4), architecture=st.sampled_from((80, 90, 100)))
def test_only_code_that_the_gpu_runs_stays_and_nothing_else_changes(
    packed: list[list[Code]], architecture: int
) -> None:
    before = library(section(packed))
    after = bytearray(before)
    erase_other_code(after, architecture, lambda *_: True)
    assert len(after) == len(before)
    erased = bytearray(before)
    for codes, entries in zip(packed, containers(before), strict=True):
        has_own = any(code[:2] == (MACHINE_CODE, architecture) for code in codes)
        newest = max(
            (code.architecture for code in codes if runs_by_compiling(code, architecture)),
            default=0,
        )
        kept_ptx = 0
        for code, place in zip(codes, entries, strict=True):
            is_own = code[:2] == (MACHINE_CODE, architecture)
            is_newest = not has_own and code[:2] == (PTX, newest)
            content = bytes(after[place.start : place.start + place.size])
            if is_own:
                assert content == code.content
            elif is_newest and content == code.content:
                kept_ptx += 1
            else:
                assert content == bytes(place.size)
            erased[place.start : place.start + place.size] = content
        assert kept_ptx == (1 if newest and not has_own else 0)
    assert erased == after


def runs_by_compiling(code: Code, architecture: int) -> bool:
    """Whether a driver for this architecture compiles the code."""
    return code.kind == PTX and code.architecture <= architecture


def test_code_that_is_not_wanted_goes_and_a_library_without_gpu_code_stays_as_it_is() -> None:
    own = library(section([[Code(MACHINE_CODE, 90, b"a kernel")]]))
    without = library(None)
    for content in (own, without):
        changed = bytearray(content)
        erase_other_code(changed, 90, lambda *_: False)
        assert b"a kernel" not in changed
        assert (changed == content) is (content is without)


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("vllm/vllm-rs", False),
        ("vllm/third_party/pynvml.py", True),
        ("vllm/third_party/deep_gemm/include/a.hpp", False),
    ],
)
def test_files_that_no_engine_opens_are_left_out(name: str, stays: bool) -> None:
    assert (UNUSED.match(name) is None) is stays


def test_packages_of_an_engine_are_the_image_s_and_not_in_the_kit_twice() -> None:
    assert {*PACKAGES, "vllm"} <= kit.pinned().keys()
    assert not {*PACKAGES} & (kit.contents("3.12") | {*kit.MACHINE})
    assert "KIT_ENGINE" in (ROOT / "Makefile").read_text()
