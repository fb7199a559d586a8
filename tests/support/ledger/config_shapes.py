"""Shapes of models by their config.json, for tests of the memory model."""

from collections.abc import Mapping
from typing import Any

from grpo_planner.model import config
from grpo_planner.model.architecture import from_architecture
from grpo_planner.model.shapes import Shape


def from_config(config_json: Mapping[str, Any]) -> Shape:
    """The shape in a Hugging Face config.json."""
    return from_architecture(config.architecture_of(config_json))
