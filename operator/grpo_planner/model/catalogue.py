"""Knows models by their names: the built-in catalogue of shapes, and the longest sequence of each.

It also finds the nearest dense shape of a declared size, and the model that a misspelt name may
mean.

With it the usual models are planned from their name alone, without a hub or a config.json. The data
is catalogue.yaml and hub.yaml. A name that isn't in them may be a private model's, so a likely slip
is asked back and never refused by the operator.
"""

import re
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from math import log
from typing import Any, NamedTuple

from ..tables import read_data
from .shapes import Shape, traits

_LIKENESS = 0.9
"""Least likeness of a slip to the name that was meant: `Qwen2.5-7B-Instrct` has 0.97."""


class Positions(NamedTuple):
    """The longest sequence that a model was made for."""

    tokens: int = 0
    """0: not known."""
    is_certain: bool = False
    """False where only the model's name suggests this length."""


UNKNOWN = Positions()


def lookup_positions(model: str) -> Positions:
    """The positions of a hub id, or of the known model whose name a fine-tune's begins with."""
    positions_by_name = _positions()
    name = base_name(model)
    if name in positions_by_name and not model.startswith("/"):
        return Positions(positions_by_name[name], is_certain=True)
    beginnings = [key for key in positions_by_name if is_named_after(name, key)]
    nearest = max(beginnings, key=len, default="")
    return Positions(positions_by_name.get(nearest, 0))


def meant_name(model: str) -> str:
    """The known hub id that a name is a likely slip of, such as `Qwen/Qwen2.5-7B-Instruct` for
    `Qwen/Qwen2.5-7B-Instrct`; empty where it may be right.

    A fine-tune is named after its base, and another number or word is another model.
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
        candidate: _likeness(name, candidate)
        for candidate in ids
        if re.findall(r"\d+", candidate) == numbers
    }
    nearest = max(candidates, key=lambda candidate: (candidates[candidate], candidate), default="")
    if not nearest or candidates[nearest] < _LIKENESS or is_named_after(name, nearest):
        return ""
    return ids[nearest] if _is_slip(name, nearest) else ""


_ALIKE_OWNERS = 0.75
"""Least likeness of a slip in an organisation's name, which is short: `Qwn` has 0.86."""


_ALIKE_WORDS = 0.7
"""Least likeness of a slip in one word: "itt" has 0.8 to "it", and "pt", another model, 0.5."""


def _is_slip(name: str, known: str) -> bool:
    """True if each word of a name is like the known one's. `Qwen2.5-VL-7B` has one more, and only a
    hyphen may be too many."""
    words, known_words = (re.split(r"[-_]", text) for text in (name, known))
    if len(words) != len(known_words):
        return "".join(words) == "".join(known_words)
    return all(_likeness(*pair) >= _ALIKE_WORDS for pair in zip(words, known_words, strict=True))


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


QUANTISED = frozenset({
    "4bit", "8bit", "awq", "bnb", "exl2", "fp4", "fp8", "gguf", "gptq", "int4", "int8", "mlx",
    "mxfp4", "nf4", "nvfp4",
    "w4a16", "w8a8", "w8a16",
})  # fmt: skip
"""Words of a model's name that say that its weights are quantised."""
STORED_NARROW = {
    "openai/gpt-oss-20b": "unsloth/gpt-oss-20b-BF16",
    "openai/gpt-oss-120b": "unsloth/gpt-oss-120b-BF16",
    "deepseek-ai/deepseek-r1-distill": None,
    "deepseek-ai/deepseek-r1-0528-qwen3": None,
    "deepseek-ai/deepseek-r1": "",
    "deepseek-ai/deepseek-v3": "",
    "moonshotai/kimi-k2": "",
}
"""Beginnings of hub ids whose weights are quantised though the name doesn't say so, in lower case,
each with a copy in bfloat16 where one is usual. The first that fits counts; None: not quantised."""
SMALL_MODEL = 60_000_000
"""Below this no catalogued model is near enough to borrow a shape from."""
_LIKENESS_OF_UNKNOWN = 0.7
"""Least likeness of a name to one that may have been meant."""
COLUMNS = (
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "vocab",
    "tied",
    "declared",
)
"""Of a row; the last is left out where the shape has all parameters."""


@cache
def _families() -> list[dict[str, Any]]:
    """The catalogue's file."""
    families: list[dict[str, Any]] = read_data(__package__, "catalogue.yaml")
    return families


@cache
def _types() -> dict[str, str]:
    """The model type of each catalogued name."""
    return {name: family["type"] for family in _families() for name in family["models"]}


@cache
def shapes() -> dict[str, Shape]:
    """All catalogued shapes by their lower-case name."""
    by_name: dict[str, Shape] = {}
    for family in _families():
        for name, row in family["models"].items():
            by_name[name] = _shape(row, family)
    return by_name


def _shape(row: list[Any], family: dict[str, Any]) -> Shape:
    """One row of the catalogue with the traits of its type and what its family has in common."""
    widths: dict[str, Any] = dict(zip(COLUMNS, row, strict=False))
    type_traits = traits(family["type"])
    common = type_traits | family.get("common", {})
    period = common.pop("window_period", 0)
    full_layers = widths["layers"] // period if period else 0
    return Shape(**widths, full_attention_layers=full_layers, **common)


def quantisation_in_name(model: str) -> str:
    """What a model's name says of quantised weights, such as `gptq`; empty when it says nothing."""
    name_parts = re.split(r"[-_.]", base_name(model))
    return next((part for part in name_parts if part in QUANTISED), "")


def quantised_original(model: str) -> str | None:
    """For a model whose weights are quantised though its name doesn't say so: its usual copy in
    bfloat16, empty if it has no such copy. None for all other models."""
    name = model.rstrip("/").lower()
    if "bf16" in name:
        return None
    return next((copy for start, copy in STORED_NARROW.items() if name.startswith(start)), None)


def lookup_shape(model: str) -> Shape | None:
    """The catalogued shape of a hub id or folder name such as `meta-llama/Llama-3.2-1B-Instruct`;
    None if unknown."""
    key = _catalogue_key(model)
    return shapes()[key] if key else None


def model_type(model: str) -> str:
    """A model's type, as its config.json names it; empty if unknown."""
    key = _catalogue_key(model)
    return _types().get(key, "")


def _catalogue_key(model: str) -> str:
    """The longest catalogued name that a model's begins with; empty if no name fits."""
    name = base_name(model)
    keys = [key for key in shapes() if is_named_after(name, key)]
    return max(keys, key=len, default="")


def similar_names(model: str) -> list[str]:
    """Catalogued names like that of an unknown model, the most alike first."""
    return get_close_matches(base_name(model), shapes(), n=3, cutoff=_LIKENESS_OF_UNKNOWN)


def nearest_dense(parameters: int) -> tuple[str, Shape]:
    """The catalogued shape nearest to a size by ratio, with the declared size put in its place.

    Only dense ones with a fused attention kernel: what else there is, is known by its name.

    Below SMALL_MODEL a Llama-like shape is made up whose count is near: one eighth of the
    parameters in the embedding.
    """
    if parameters < SMALL_MODEL:
        small = _toy_shape(parameters)
        return "a small Llama", replace(small, declared=parameters)
    plain = {name: shape for name, shape in shapes().items() if _is_plain(shape)}
    distances: dict[str, float] = {}
    for name, shape in plain.items():
        # By ratio, so half a size and twice a size are equally far.
        ratio = shape.counted_parameters / parameters
        distances[name] = abs(log(ratio))
    # Of equals the first name, as plans must not vary.
    nearest = min(distances, key=lambda name: (distances[name], name))
    of_size = replace(plain[nearest], declared=parameters)
    return nearest, of_size


def _is_plain(shape: Shape) -> bool:
    return not (shape.experts or shape.declared or shape.eager)


def _toy_shape(parameters: int) -> Shape:
    """A Llama-like shape for toy models: width from 12 * layers * hidden**2 = parameters with
    hidden = 32 * layers."""
    cubed_layers = parameters / (12 * 32**2)
    layers = max(1, round(cubed_layers ** (1 / 3)))
    hidden = 32 * layers
    heads = max(1, hidden // 32)
    kv_heads = max(1, hidden // 64)
    rows_of_an_eighth = parameters // (8 * hidden)
    vocab = min(32_768, max(32, rows_of_an_eighth))
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=32,
        intermediate=4 * hidden,
        vocab=vocab,
        tied=True,
    )
