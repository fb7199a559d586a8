"""Reads the planner's tables, which are YAML files in its packages."""

from importlib.resources import files
from typing import Any

import yaml

# libyaml reads a table eight times as fast as PyYAML's own loader, half of `grpo plan`'s time.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_data(package: str | None, name: str) -> Any:
    """The content of a YAML file that is part of a package."""
    assert package is not None, "the caller is part of a package"
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=_Loader)
