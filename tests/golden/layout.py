"""The text of a recorded file: JSON with sorted keys, in which whatever fits into a line is one
line."""

import json
from typing import Any

WIDTH = 130
DIGITS = 9
"""Significant digits of a number. The C library of another machine may differ in the last ones."""


class InOrder(dict[str, Any]):
    """An object whose keys keep their order, since it travels as text."""


def text(value: Any) -> str:
    """Return the file for a value."""
    return _laid_out(_settled(value), "") + "\n"


def unlike(value: Any, base: Any) -> Any:
    """Return what of a value differs from a base, and under `-` the keys that only the base has.

    Lists of named things are compared by name, with `names` where these or their order differ;
    others as a whole.
    """
    if isinstance(value, list) and isinstance(base, list):
        named, named_base = _by_name(value), _by_name(base)
        if named is None or named_base is None:
            return value
        names = {} if list(named) == list(named_base) else {"names": list(named)}
        return names | _unlike(named, named_base)
    if isinstance(value, dict) and isinstance(base, dict):
        missing = sorted(base.keys() - value.keys())
        return _unlike(value, base) | ({"-": missing} if missing else {})
    return value


def _unlike(value: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the items that differ."""
    return {
        key: unlike(item, base.get(key))
        for key, item in value.items()
        if key not in base or item != base[key]
    }


def _by_name(items: list[Any]) -> dict[str, Any] | None:
    """Return a list of named things by name; None for any other list."""
    if not all(isinstance(item, dict) for item in items):
        return None
    names = [item.get("mountPath") or item.get("name") for item in items]
    if not names or None in names or len(set(names)) < len(names):
        return None
    return dict(zip(names, items, strict=True))


def _settled(value: Any, keeps_order: bool = False) -> Any:
    """Return the value with sorted keys and rounded numbers."""
    if isinstance(value, dict):
        keeps_order = keeps_order or isinstance(value, InOrder)
        keys = value if keeps_order else sorted(value)
        return {key: _settled(value[key], keeps_order) for key in keys}
    if isinstance(value, list | tuple):
        return [_settled(item, keeps_order) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _laid_out(value: Any, indent: str) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {_laid_out(item, deeper)}"
            for key, item in value.items()
        ]
        opening, closing = "{", "}"
    else:
        parts = [_laid_out(item, deeper) for item in value]
        opening, closing = "[", "]"
    inside = ",\n".join(f"{deeper}{part}" for part in parts)
    return f"{opening}\n{inside}\n{indent}{closing}"
