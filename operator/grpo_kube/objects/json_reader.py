"""Reads API objects field by field, reports a field of a wrong type by its path, and truncates long
texts.

Objects come from other programs: anybody sets labels, and kubelets and other versions of this
operator write statuses. A wrong type must be found here, where it costs one object, and not later
in a decision. Texts of other programs are truncated to a length that fits into a status.
"""

import re
from collections.abc import Iterator
from typing import Any

from .times import Reported, seconds

_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_MOST = 2**63
MAX_NAME = 253
"""Characters of an object's name, and of nearly every other word of an API object."""
MAX_OBJECT = 2**20
"""Characters of the longest text of an object: the API server takes no larger request."""
MAX_SENTENCE = 2048
"""Characters that are kept of what another program says to people."""


class Unreadable(ValueError):
    """An object has a field of a wrong type; the message begins with the field's path."""


class JsonObject:
    """A JSON object inside an API object. What is absent or null reads as empty."""

    __slots__ = ("_fields", "_name", "_parent")

    def __init__(self, value: object, parent: "JsonObject | None" = None, name: str = "") -> None:
        """Takes the value at that place of the parent; the path is built only for an error.

        Raises:
            Unreadable: it is not a JSON object.
        """
        self._parent, self._name = parent, name
        if value is not None and not isinstance(value, dict):
            raise Unreadable(
                f"{self._path() or 'the object'}: {_short_repr(value)} is not an object"
            )
        self._fields: dict[str, Any] = value or {}

    def __contains__(self, name: str) -> bool:
        """True if the field is there and not null."""
        return self._fields.get(name) is not None

    def part(self, name: str) -> "JsonObject":
        """An object below."""
        return JsonObject(self._fields.get(name), self, name)

    def parts(self, name: str) -> "Iterator[JsonObject]":
        """The objects of a list below."""
        items = self._fields.get(name)
        if items is not None and not isinstance(items, list):
            raise self._type_error(name, "a list")
        for position, item in enumerate(items or ()):
            yield JsonObject(item, self, f"{name}[{position}]")

    def text(self, name: str, most: int = MAX_NAME) -> str:
        """Return a string of at most `most` characters; empty if the field is absent."""
        value = self._fields.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > most:
            raise self._type_error(name, f"a string of at most {most} characters")
        return value

    def required_text(self, name: str) -> str:
        """A string that must not be empty."""
        text = self.text(name)
        if not text:
            raise self._type_error(name, "set")
        return text

    def integer(self, name: str) -> int:
        """An integer of 64 bits; 0 when absent."""
        value = self._fields.get(name)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or not -_MOST <= value < _MOST:
            raise self._type_error(name, "an integer of 64 bits")
        return value

    def digits(self, name: str) -> int:
        """A number written as a string, such as a resourceVersion; 0 when absent or empty."""
        text = self.text(name)
        if text and not _NUMBER.fullmatch(text):
            raise self._type_error(name, "a number")
        return int(text or 0)

    def is_true(self, name: str) -> bool:
        """A boolean; false when absent."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._type_error(name, "true or false")
        return bool(value)

    def time(self, name: str) -> float | None:
        """Unix time of a timestamp; None when absent."""
        try:
            return seconds(self.text(name))
        except (ValueError, OverflowError) as error:
            raise self._type_error(name, "an RFC 3339 time") from error

    def string_map(self, name: str) -> dict[str, str]:
        """A map of strings, such as labels."""
        below = self.part(name)
        return {key: below.text(key, MAX_OBJECT) for key in below._fields}

    def strings(self, name: str) -> list[str]:
        """A list of strings."""
        items = self._fields.get(name)
        if items is not None and not (
            isinstance(items, list) and all(isinstance(item, str) for item in items)
        ):
            raise self._type_error(name, "a list of strings")
        return list(items or ())

    def items(self) -> Iterator[tuple[str, Any]]:
        """All fields as they are."""
        return iter(self._fields.items())

    def raw(self, name: str) -> dict[str, Any]:
        """An object below as it is, for a parser of its own."""
        return dict(self.part(name)._fields)

    def reason_and_message(self) -> str:
        """`reason: message`, as far as they are there, cut to what a status takes."""
        texts = (self.text("reason", MAX_OBJECT), self.text("message", MAX_OBJECT))
        return truncate(": ".join(text for text in texts if text), MAX_SENTENCE)

    def condition(self, kind: str) -> "JsonObject":
        """The condition of this type from the list `conditions`; an empty object if absent."""
        conditions = (
            condition for condition in self.parts("conditions") if condition.text("type") == kind
        )
        return next(conditions, JsonObject(None, self, "conditions"))

    def _path(self, name: str = "") -> str:
        """The path of this object, or of a field in it: `metadata.labels[example.com/key]`."""
        above = self._parent._path(self._name) if self._parent else self._name
        if not name or not above:
            return name or above
        if "/" in name or "." in name:
            return f"{above}[{truncate(name, 80)}]"
        return f"{above}.{name}"

    def _type_error(self, name: str, wanted: str) -> Unreadable:
        return Unreadable(
            f"{self._path(name)}: {_short_repr(self._fields.get(name))} is not {wanted}"
        )


def reported_time(part: JsonObject, name: str) -> Reported | None:
    """A timestamp of another's clock, for durations only; None if absent or unreadable."""
    try:
        time = part.time(name)
    except Unreadable:
        return None
    return None if time is None else Reported(time)


def _short_repr(value: object) -> str:
    return truncate(repr(value), 80)


def truncate(text: str, most: int) -> str:
    """The text, its end replaced by an ellipsis when it has more characters than that."""
    return text if len(text) <= most else text[: most - 1] + "…"
