"""Compares the versions on this machine with those of the image.

Imports only Python's standard library: a missing or different version must be reported before an import fails on it.
"""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PINS = Path(__file__).with_name("pins.json")
"""Versions of the image by package, generated from constraints.txt."""
MISSING = "missing"


def pins() -> dict[str, str]:
    """The image's versions."""
    found: dict[str, str] = json.loads(PINS.read_text(encoding="utf-8"))
    return found


def installed(names: Any) -> dict[str, str]:
    """This machine's versions of the packages; MISSING for those that aren't there."""
    return {name: _version(name) for name in names}


def differing(here: dict[str, str], image: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Packages whose version differs: this machine's and the image's. A local part such as +cu130 is no difference."""
    return {name: (here[name], wanted) for name, wanted in image.items() if here[name].partition("+")[0] != wanted}


def sentence(different: dict[str, tuple[str, str]]) -> str:
    """What differs, in words."""
    if not different:
        return "every version is the image's"
    return "other than the image: " + ", ".join(
        f"{name} {here} (image {wanted})" for name, (here, wanted) in sorted(different.items())
    )


def machine() -> str:
    """Python and system, in words."""
    return f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return MISSING
