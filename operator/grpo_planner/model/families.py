"""The model types whose memory is known exactly, and what sets each apart from a plain Llama layer.

The data is families.yaml, which the tests hold to transformers' own classes. All other types are only estimated.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

ENCODERS = frozenset({
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert", "modernbert",
    "mpnet", "nomic_bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip
"""Types of encoders, whose config.json reads like a decoder's, for files that don't name their `architectures`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type."""

    traits: dict[str, Any] = field(default_factory=dict)
    """What the layers have beyond a plain Llama layer, as fields of Shape."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What transformers takes where a config.json leaves a key out."""
    biases: tuple[str, ...] = ()
    """Which of attention_bias and mlp_bias it heeds: `attention`, `mlp`."""
    expert_width: str = ""
    """Key of the width of an expert, where layers are mixtures of experts."""
    window: Literal["none", "all", "every", "switched", "late"] = "none"
    """Which layers have the sliding window where layer_types doesn't say."""
    period: int = 0
    """For window `every`: one layer in `period` attends to everything."""


@cache
def families() -> dict[str, Family]:
    """All model types that are known exactly, in the order of families.yaml."""
    listed = yaml.safe_load(files(__package__).joinpath("families.yaml").read_text(encoding="utf-8"))
    known = {}
    for kind, about in listed.items():
        biases = tuple(about.get("biases", ()))
        known[kind] = Family(**about | {"biases": biases})
    return known


def traits(model_type: str | None) -> dict[str, Any]:
    """The traits of a type; none for one that is not known, which is taken for a Llama."""
    known = families().get(model_type or "")
    return known.traits if known else {}
