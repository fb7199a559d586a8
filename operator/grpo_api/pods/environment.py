"""Defines what a spec may set of the environment variables of containers.

Names and shapes are those of core/v1. `spec.env` and `spec.envFrom` must not set the variables that
the trainer depends on, nor values that can't work.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from ..text.base import MapList, Model, Rule, exactly_one
from ..text.contract import (
    ALLOCATOR_ENV,
    ENV_PREFIX,
    EXPANDABLE_SEGMENTS,
    EXPANDABLE_SEGMENTS_PATTERN,
    RANK_ENV,
)
from ..text.names import (
    ConfigMapKeySelector,
    ObjectFieldSelector,
    OptionalReference,
    ResourceFieldSelector,
    SecretKeySelector,
    VariableName,
)

SOURCES = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef")
_RESERVED = f"{ENV_PREFIX}* and {', '.join(RANK_ENV)} are set by the operator and the trainer"


class EnvVarSource(Model):
    """Where the value of a variable comes from."""

    RULES = (exactly_one(*SOURCES),)

    secret_key_ref: SecretKeySelector | None = None
    """A key of a Secret. Unset: another source."""
    config_map_key_ref: ConfigMapKeySelector | None = None
    """A key of a ConfigMap. Unset: another source."""
    field_ref: ObjectFieldSelector | None = None
    """A field of the pod. Unset: another source."""
    resource_field_ref: ResourceFieldSelector | None = None
    """A request or limit of the container. Unset: another source."""


class EnvVar(Model):
    """An environment variable of a container."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule("!has(self.value) || !has(self.valueFrom)", "set at most one of value and valueFrom"),
        Rule(
            f"!(self.name.startsWith('{ENV_PREFIX}') || self.name in {list(RANK_ENV)})",
            f"{_RESERVED}: remove it",
        ),
    )

    name: VariableName
    """Name of the variable. Of the operator's own, HOME, HF_HOME and the like may be replaced."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value; `$(NAME)` of an earlier variable is filled in. Unset: from `valueFrom`, or
    empty."""
    value_from: EnvVarSource | None = None
    """Take the value from elsewhere. Unset: `value`."""


class TrainerEnvVar(EnvVar):
    """An environment variable of the training container."""

    RULES = (
        *EnvVar.RULES,
        Rule(
            f"!(self.name in {list(ALLOCATOR_ENV)}) || !has(self.value) || "
            f"!self.value.matches(r'{EXPANDABLE_SEGMENTS_PATTERN}') || "
            f"(self.name == '{ALLOCATOR_ENV[0]}' && self.value.contains('{EXPANDABLE_SEGMENTS}'))",
            f"vLLM sees expandable segments only in {ALLOCATOR_ENV[0]}, spelt "
            f"{EXPANDABLE_SEGMENTS}, and an engine that sleeps fails with those that it does not "
            f"see: write them so, or remove {ALLOCATOR_ENV[1]}, since the operator sets them on "
            "GPUs",
            at_creation=True,
        ),
    )


class EnvFromSource(Model):
    """A Secret or a ConfigMap, each of whose keys becomes a variable. Variables that are named
    singly win."""

    RULES = (
        exactly_one("configMapRef", "secretRef"),
        Rule(
            f"!has(self.prefix) || !self.prefix.startsWith('{ENV_PREFIX}')",
            f"{_RESERVED}: use another prefix",
        ),
    )

    prefix: Annotated[str, Field(max_length=128, pattern=r"^[-._a-zA-Z0-9]*$")] | None = None
    """Put in front of every key. Unset: the keys as they are."""
    config_map_ref: OptionalReference | None = None
    """The ConfigMap. Unset: `secretRef` must be set."""
    secret_ref: OptionalReference | None = None
    """The Secret. Unset: `configMapRef` must be set."""


Environment = Annotated[list[EnvVar], Field(max_length=64), MapList("name")]
TrainerEnvironment = Annotated[list[TrainerEnvVar], Field(max_length=64), MapList("name")]
EnvironmentSources = Annotated[list[EnvFromSource], Field(max_length=16)]
