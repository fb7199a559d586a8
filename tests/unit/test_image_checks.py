"""The pure parts of the checks of the trainer's image."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.images.image_checks import DRIVER, import_failures, is_library, missing_libraries

NAMES = st.from_regex(r"lib[a-z0-9_+-]{1,12}\.so(\.[0-9]{1,2}){0,2}", fullmatch=True)


@given(missing=st.sets(NAMES), found=st.sets(NAMES), driver=st.sets(st.sampled_from(DRIVER)))
def test_what_ldd_did_not_find_is_named_but_for_the_drivers(
    missing: set[str], found: set[str], driver: set[str]
) -> None:
    lines = ["\tlinux-vdso.so.1 (0x00007ffd)", "\t/lib64/ld-linux-x86-64.so.2 (0x00007f)"]
    lines += [f"\t{name} => /usr/lib/{name} (0x00007f)" for name in sorted(found - missing)]
    lines += [f"\t{name} => not found" for name in sorted(missing | driver)]
    assert missing_libraries("\n".join(lines)) == sorted(missing - set(DRIVER))


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("libtorch.so", True),
        ("_C.abi3.so", True),
        ("libnccl.so.2", True),
        ("libx.so.1.2.3", True),
        ("notes.so.txt", False),
        ("so.py", False),
    ],
)
def test_libraries_are_known_by_their_names(name: str, library: bool) -> None:
    assert is_library(Path("lib") / name) is library


def test_a_module_that_can_not_be_imported_is_named_with_its_error() -> None:
    assert import_failures(["json", "no_such_module"]) == {
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'"
    }
