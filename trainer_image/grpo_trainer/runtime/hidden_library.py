"""Hides installed libraries from imports.

A preflight hides torch, which would take most of its memory and time. Every process hides what its
plan does not need.

transformers and datasets import torch wherever they find it. None in sys.modules does not do here:
datasets imports whatever it finds a key for there.
"""

import sys
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class FinderWithout:
    """Python's finder of modules on sys.path, which does not find some libraries."""

    def __init__(self, libraries: Collection[str]) -> None:
        self._libraries = frozenset(libraries)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What an import asks, and importlib.util.find_spec."""
        if name.partition(".")[0] in self._libraries:
            return None
        return PathFinder.find_spec(name, path, target)

    def without(self, libraries: Collection[str]) -> "FinderWithout":
        """A finder that does not find these either."""
        return FinderWithout(self._libraries.union(libraries))

    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)


def hide_libraries(*libraries: str) -> None:
    """From here on this process takes the libraries for not installed; those already imported
    stay."""
    plain = FinderWithout(())
    finders = [plain if finder is PathFinder else finder for finder in sys.meta_path]
    sys.meta_path = [
        finder.without(libraries) if isinstance(finder, FinderWithout) else finder
        for finder in finders
    ]
