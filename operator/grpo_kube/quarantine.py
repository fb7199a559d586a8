"""Sets objects aside that can't be read: counts them, logs each problem once and reports it to a
callback.

An unreadable object must affect nothing but itself. A label from a stranger, or a status from a
newer version of the operator, must not end a watch. Nor may it hide other objects or keep the
process from starting.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from .objects.resources import Object, ObjectKey, identity

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_PROBLEM = 1024


class Quarantine:
    """The objects that could not be parsed, by kind and name."""

    def __init__(self) -> None:
        """Start empty."""
        self._problems: dict[str, dict[ObjectKey, str]] = {}
        self.on_quarantined: Callable[[str, Object, str], None] = lambda *_: None
        """Called with plural name, object and problem whenever an object is set aside."""

    def parse_object(self, plural: str, parse: Callable[[Any], T], item: object) -> T | None:
        """Parse an object. Return None for one that can't be parsed, and quarantine it."""
        try:
            return parse(item)
        # whatever is wrong with it: the content is not ours, and must cost this object only
        except Exception as error:
            self._add(plural, item, error)
            return None

    def _add(self, plural: str, item: object, error: Exception) -> None:
        """Takes an object in; the same problem of the same object is logged and reported once."""
        key, problem = identity(item), " ".join(str(error).split())[:MAX_PROBLEM]
        problems = self._problems.setdefault(plural, {})
        if problems.get(key) != problem:
            problems[key] = problem
            log.warning("%s %s can't be read and is set aside: %s", plural, key, problem)
            if isinstance(item, dict):
                self.on_quarantined(plural, item, problem)

    def forget_problem(self, plural: str, key: ObjectKey) -> None:
        """Forget that a problem was reported, so that the next LIST or event reports it again."""
        if key in self._problems.get(plural, {}):
            self._problems[plural][key] = ""

    def forget(self, plural: str, key: ObjectKey) -> None:
        """The object can be read again, or is gone."""
        if self._problems.get(plural, {}).pop(key, None) is not None:
            log.info("%s %s is no longer set aside", plural, key)

    def forget_unlisted(
        self, plural: str, keys: Collection[ObjectKey], namespace: str | None
    ) -> None:
        """After a LIST of a namespace (None: of all), forget those that are not among the keys."""
        for key in [
            key for key in self._problems.get(plural, {}) if namespace in (None, key.namespace)
        ]:
            if key not in keys:
                self.forget(plural, key)

    def counts(self) -> Mapping[str, int]:
        """Return the number of quarantined objects by plural name of their kind."""
        return Counter({plural: len(problems) for plural, problems in self._problems.items()})
