"""The files of the version before (tests/previous): what is upgraded from, and rolled back to."""

import tarfile
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "previous"
CHART = next(FOLDER.glob("*.tgz"))
"""The chart's package."""
CODE = next(FOLDER.glob("*.zip"))
"""The operator's packages, to import from."""


def definition() -> dict[str, Any]:
    """Its definition of GRPOJob."""
    with tarfile.open(CHART) as package:
        file = package.extractfile("grpo-operator/files/grpojob.yaml")
        assert file, "the chart has a definition"
        found: dict[str, Any] = yaml.load(file, yaml.CSafeLoader)
    return found
