"""The built-in catalogue of model shapes: lookup by name, and the nearest dense shape of a declared size.

With it the usual models are planned from their name alone, without a hub or a config.json. The data is catalogue.yaml.
"""

from dataclasses import replace
from functools import cache
from importlib.resources import files
from math import log
from typing import Any

import yaml

from .shapes import Shape

SMALL_MODEL = 60_000_000
"""Below this no catalogued model is near enough to borrow a shape from."""
COLUMNS = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "tied", "declared")
"""Of a row; the last is left out where the shape has all parameters."""


@cache
def shapes() -> dict[str, Shape]:
    """All catalogued shapes by their lower-case name."""
    families = yaml.safe_load(files(__package__).joinpath("catalogue.yaml").read_text(encoding="utf-8"))
    return {
        name: _shape(row, family.get("traits", {})) for family in families for name, row in family["models"].items()
    }


def _shape(row: list[Any], traits: dict[str, Any]) -> Shape:
    """One row of the catalogue with its family's traits."""
    widths: dict[str, Any] = dict(zip(COLUMNS, row, strict=False))
    traits = dict(traits)
    period = traits.pop("window_period", 0)
    full = widths["layers"] // period if period else 0
    return Shape(**widths, full_attention_layers=full, **traits)


def lookup(model: str) -> Shape | None:
    """The catalogued shape of a hub id or folder name such as `meta-llama/Llama-3.2-1B-Instruct`; None if unknown."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    known = [key for key in shapes() if name == key or name.startswith((key + "-", key + "_"))]
    return shapes()[max(known, key=len)] if known else None


def nearest_dense(parameters: int) -> tuple[str, Shape]:
    """The catalogued dense shape nearest to a size by ratio, with the declared size put in its place.

    Below SMALL_MODEL a Llama-like shape is made up whose count is near: one eighth of the parameters in the embedding.
    """
    if parameters < SMALL_MODEL:
        return "a small Llama", replace(_small(parameters), declared=parameters)
    dense = {name: shape for name, shape in shapes().items() if not shape.experts and not shape.declared}
    name = min(dense, key=lambda key: (abs(log(dense[key].counted / parameters)), key))
    return name, replace(dense[name], declared=parameters)


def _small(parameters: int) -> Shape:
    """A Llama-like shape for toy models: width from 12 * layers * hidden**2 = parameters with hidden = 32 * layers."""
    layers = max(1, round((parameters / (12 * 32**2)) ** (1 / 3)))
    hidden = 32 * layers
    vocab = min(32_768, max(32, parameters // (8 * hidden)))
    return Shape(
        hidden=hidden, layers=layers, heads=max(1, hidden // 32), kv_heads=max(1, hidden // 64), head_dim=32,
        intermediate=4 * hidden, vocab=vocab, tied=True,
    )  # fmt: skip
