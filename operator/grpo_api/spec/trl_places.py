"""Says where a GRPOJob sets each field of the pinned TRL's GRPOConfig, and each other setting of
`trl grpo`. There is one decision per field, and TRL is not imported.

trl_places.yaml has the decisions. trl_fields.json is generated from the installed sources of TRL
and transformers by `make codegen`.
A field whose value changes memory or time is a field of the spec that the planner reads, or it is
refused. What is left may be overridden, and its entry says why the plan stays right.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import yaml
from pydantic.alias_generators import to_camel


class TrlField(NamedTuple):
    """One field of GRPOConfig."""

    name: str
    type: str
    """Its annotation in TRL's source, such as `list[float] | None`."""
    default: Any
    """Its default, as JSON has it."""
    is_own: bool
    """Whether GRPOConfig declares it; it inherits the others, most from TrainingArguments."""


_ROWS = json.loads(files(__package__).joinpath("trl_fields.json").read_text(encoding="utf-8"))
FIELDS: Mapping[str, TrlField] = {
    row["name"]: TrlField(row["name"], row["type"], row["default"], row["isOwn"]) for row in _ROWS
}
"""Every field of GRPOConfig by its name, in GRPOConfig's order."""


class Place(NamedTuple):
    """The decision about one field of GRPOConfig."""

    kind: Literal["Spec", "Override", "Refused"]
    """Spec: a field of the spec says it. Override: `training.overrides` passes it on. Refused:
    neither does."""
    path: str
    """Where it is set, without `spec.`; of a refused one what to use instead, or nothing."""
    reason: str
    """Of an override why the plan stays right, of a refused field why it can't be set."""


_TABLES: dict[str, Any] = yaml.load(
    files(__package__).joinpath("trl_places.yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
SAME_NAME: tuple[str, ...] = tuple(_TABLES["same_name"])
"""Fields of GRPOConfig that spec.training has under the same name and with the same meaning."""


def _place(decision: str | dict[str, str]) -> Place:
    """A path of the spec, or the reason for having no path."""
    if isinstance(decision, str):
        return Place("Spec", decision, "")
    return Place("Refused", decision.get("path", ""), decision["reason"])


PLACES: Mapping[str, Place] = (
    {name: Place("Spec", f"training.{to_camel(name)}", "") for name in SAME_NAME}
    | {name: _place(path) for name, path in _TABLES["spec"].items()}
    | {
        name: Place("Override", f"training.overrides.{name}", reason)
        for name, reason in _TABLES["overrides"].items()
    }
    | {name: _place(decision) for decision in _TABLES["refused"] for name in decision["fields"]}
)
"""Every field of GRPOConfig with its place."""
FORMER: Mapping[str, Place] = {name: _place(path) for name, path in _TABLES["former"].items()}
"""Fields of earlier TRL versions that a job has."""
RENAMED: Mapping[str, str] = _TABLES["renamed"]
"""Fields by the names that they had in earlier versions of TRL and transformers."""
MODEL_PLACES: Mapping[str, Place] = {
    name: _place(decision) for name, decision in _TABLES["model"].items()
}
"""Every field of trl.ModelConfig with its place."""
SCRIPT_PLACES: Mapping[str, Place] = {
    name: _place(decision) for name, decision in _TABLES["script"].items()
}
"""Every field of GRPOScriptArguments and DatasetMixtureConfig with its place."""
CLI_PLACES: Mapping[str, Place] = {**MODEL_PLACES, **SCRIPT_PLACES}
"""Every setting of `trl grpo` that GRPOConfig lacks."""
_PLACES: Mapping[str, Place] = {**CLI_PLACES, **FORMER, **PLACES}
SETTING_NAMES = (*_PLACES, *RENAMED)
"""Every setting of `trl grpo`, by each name that it has or had."""


def place_of(name: str) -> Place | None:
    """The place of a setting of `trl grpo`, by its name in this TRL or in an earlier one; None of
    what is no setting."""
    return _PLACES.get(RENAMED.get(name, name))
