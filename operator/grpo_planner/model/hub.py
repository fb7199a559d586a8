"""Names of the hub that are known: the sequences that these models were made for, and what a slip
of the hand in a name may have meant.

The data is hub.yaml. A name that isn't in it may be a private model's, so a likely slip is asked
back and never refused by the operator.
"""

import re
from difflib import SequenceMatcher
from functools import cache
from typing import NamedTuple

from ..tables import read_data

_LIKENESS = 0.9
"""Least likeness of a slip to the name that was meant: `Qwen2.5-7B-Instrct` has 0.97."""


class Positions(NamedTuple):
    """The longest sequence that a model was made for."""

    tokens: int = 0
    """0: not known."""
    is_certain: bool = False
    """False where the model is only named like one that was made for so many."""


UNKNOWN = Positions()


def lookup_positions(model: str) -> Positions:
    """The positions of a hub id, or of the known model whose name a fine-tune's begins with."""
    known = _positions()
    name = base_name(model)
    if name in known and not model.startswith("/"):
        return Positions(known[name], is_certain=True)
    beginnings = [key for key in known if is_named_after(name, key)]
    nearest = max(beginnings, key=len, default="")
    return Positions(known.get(nearest, 0))


def meant_name(model: str) -> str:
    """The known hub id that a name is a likely slip of, such as `Qwen/Qwen2.5-7B-Instruct` for
    `Qwen/Qwen2.5-7B-Instrct`; empty where it may be right.

    A fine-tune is named after its base, and another number is another model.
    """
    organisation, _, _ = model.rpartition("/")
    ids = hub_ids()
    name = base_name(model)
    if model.startswith("/"):
        return ""
    if name in ids:
        known_organisation, _, _ = ids[name].rpartition("/")
        is_same = organisation.lower() == known_organisation.lower()
        is_alike = _likeness(organisation.lower(), known_organisation.lower()) >= _ALIKE_OWNERS
        return ids[name] if is_alike and not is_same else ""
    numbers = re.findall(r"\d+", name)
    candidates = {
        known: _likeness(name, known) for known in ids if re.findall(r"\d+", known) == numbers
    }
    nearest = max(candidates, key=lambda known: (candidates[known], known), default="")
    if not nearest or candidates[nearest] < _LIKENESS or is_named_after(name, nearest):
        return ""
    return ids[nearest]


_ALIKE_OWNERS = 0.75
"""Least likeness of a slip in an organisation's name, which is short: `Qwn` has 0.86."""


def base_name(model: str) -> str:
    """The last part of a hub id or of a folder's path, in lower case; some of Llama's have `Meta-`
    before it."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")


def is_named_after(name: str, base: str) -> bool:
    """True for the base's own name, and for that of a model whose maker added to it."""
    return name == base or name.startswith((f"{base}-", f"{base}_"))


def _likeness(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


@cache
def _positions() -> dict[str, int]:
    return {
        base_name(model): count for count, models in read_data(__package__, "hub.yaml").items()
        for model in models
    }  # fmt: skip


@cache
def hub_ids() -> dict[str, str]:
    """Hub ids by the last part of their name."""
    models = (model for models in read_data(__package__, "hub.yaml").values() for model in models)
    return {base_name(model): model for model in models}
