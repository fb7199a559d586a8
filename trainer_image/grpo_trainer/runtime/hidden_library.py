"""Hides an installed library from imports. A preflight hides torch, which would take most of its
memory and time.

A preflight computes nothing, but transformers and datasets import torch wherever they find it. None
in sys.modules, which hides others, does not do here: datasets imports whatever it finds a key for
there.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class FinderWithout:
    """Python's finder of modules on sys.path, which does not find one library."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What an import asks."""
        if name.partition(".")[0] == self._library:
            return None
        return PathFinder.find_spec(name, path, target)

    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)


def hide_library(library: str) -> None:
    """Hide a library that is not imported yet from this process."""
    sys.meta_path = [
        FinderWithout(library) if finder is PathFinder else finder for finder in sys.meta_path
    ]
