"""Columns whose names mean something to TRL: which a dataset must not have, and which TRL is not shown.

All columns are the reward functions' arguments. TRL hands them over under their names, beside arguments of its own, and
takes two of them for pictures that belong to the prompt; only text prompts are trained on here, so to TRL these go by
another name.
"""

from collections.abc import Mapping
from typing import Any

import datasets

RESERVED = (
    "completion",
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
"""Names by which TRL hands reward functions something else, or nothing."""
PICTURES = ("image", "images")
_HIDDEN = "column "

_MEDIA = (datasets.Image, datasets.Audio, datasets.Video)


def hidden(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows as TRL gets them."""
    new_names: dict[str, str] = {}
    for name in rows.column_names:
        if name in PICTURES or name.startswith(_HIDDEN):
            new_names[name] = _HIDDEN + name
    return rows.rename_columns(new_names)


def restored(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row that TRL got, as the reward functions get it."""
    return {name.removeprefix(_HIDDEN): value for name, value in row.items()}


def undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows with pictures, sounds and films as they are stored: `{bytes, path}`.

    Decoding needs libraries that the image lacks, and makes objects that are different in every process.
    """
    features = datasets.Features({name: _undecoded(feature) for name, feature in rows.features.items()})
    return rows if features == rows.features else rows.cast(features)


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, _MEDIA):
        return type(feature)(decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded(part) for name, part in feature.items()}
    return feature
