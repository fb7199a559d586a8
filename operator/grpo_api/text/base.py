"""Defines the base classes of all types of the contract: strict camelCase models with rules.

The CRD, the plan and the report all use these models. The API server and Python evaluate the same
rules, so both accept the same objects.

The descriptions that `kubectl explain` prints are the docstrings below fields. Pydantic would read
them from the source of each class when it makes the class, which takes a third of a command's
start. Only schemas show descriptions, so they are read when a schema is made.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from textwrap import dedent
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from .cel import predicate

CREATING = "creating"
"""As the context of a validation: the object is new, and rules `at_creation` are judged, too."""


class Rule(NamedTuple):
    """A rule over several fields, for the API server and, by grpo_api.text.cel, for Python."""

    cel: str
    """The rule as the API server evaluates it; `self` is the model."""
    message: str
    """What a user reads who breaks it: what is allowed and how to fix it."""
    field_path: str = ""
    """The field that the API server blames, such as `.spec.model`. Empty: the model."""
    message_cel: str = ""
    """CEL that says the message with what it depends on; `message` stands in for it where it
    fails."""
    at_creation: bool = False
    """Whether only new objects are judged, so that those which are stored already stay valid."""

    @property
    def schema(self) -> dict[str, Any]:
        """The rule as an item of x-kubernetes-validations."""
        rule: dict[str, Any] = {"rule": self.cel, "message": self.message}
        if self.at_creation:
            rule |= {"rule": f"oldSelf.hasValue() || ({self.cel})", "optionalOldSelf": True}
        if self.message_cel:
            rule["messageExpression"] = self.message_cel
        if self.field_path:
            rule["fieldPath"] = self.field_path
        return rule


def _add_rules(schema: dict[str, Any], model: type["Model"]) -> None:
    """Put a model's sentences and rules into its JSON schema, where they become the CRD's."""
    describe(schema, model)
    if rules := (*model.RULES, *model.SERVER_RULES):
        schema["x-kubernetes-validations"] = [rule.schema for rule in rules]


class Model(BaseModel):
    """A strict record: camelCase outside, snake_case inside, unknown fields rejected, frozen once
    made."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules over several fields; checked after the fields' own types and limits."""
    SERVER_RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules over metadata and over the old object, which only the API server sees."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra=_add_rules,
    )

    _names: ClassVar[frozenset[str]] = frozenset()
    """Names and aliases of all fields."""
    _integers: ClassVar[frozenset[str]] = frozenset()
    """Those of the fields that are integers."""
    _maps: ClassVar[frozenset[str]] = frozenset()
    """Those of the fields whose keys are the user's."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Note which fields there are, and which are integers and maps, once per class."""
        cls._names = cls._spellings(lambda _: True)
        cls._integers = cls._spellings(lambda kind: kind is int)
        cls._maps = cls._spellings(lambda kind: get_origin(kind) is dict)

    @classmethod
    def _spellings(cls, is_wanted: Callable[[Any], bool]) -> frozenset[str]:
        """Names and aliases of the fields whose type, or the type beside None, is wanted."""
        spellings: set[str] = set()
        for name, field in cls.model_fields.items():
            if any(map(is_wanted, _kinds(field.annotation))):
                spellings |= {name, field.alias or name}
        return frozenset(spellings)

    @model_validator(mode="before")
    @classmethod
    def _read_as_the_server_does(cls, data: Any) -> Any:
        """A null is a field that is not set, in maps too, and 2.0 is the integer 2."""
        # most objects have nothing to read differently, and every status goes through here: first a
        # look in C
        if not isinstance(data, dict) or _SOFT.isdisjoint(map(type, data.values())):
            return data
        fields = {}
        for name, value in data.items():
            # A field that is not there is an error with a null, too; what is in a record is its own
            # to read.
            if value is not None or name not in cls._names:
                fields[name] = _set_values(value) if name in cls._maps else value
        for name in cls._integers & fields.keys():
            value = fields[name]
            if isinstance(value, float) and value.is_integer():
                fields[name] = int(value)
        return fields

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        """Reject a record that breaks a rule, with the messages of all rules that it breaks."""
        broken = []
        for rule in self.RULES:
            if rule.at_creation and info.context is not CREATING:
                continue
            if not predicate(rule.cel)(self):
                broken.append(rule.message)
        if broken:
            raise PydanticCustomError("rule", "{messages}", {"messages": "; ".join(broken)})
        return self


_SOFT = frozenset({NoneType, float, dict})
"""Types of values that the API server may read as something else, or as nothing."""


def _kinds(annotation: Any) -> Iterator[Any]:
    """A field's type, and those of a union or of what it holds."""
    for kind in (annotation, *get_args(annotation)):
        yield get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _set_values(value: Any) -> Any:
    """A map without its null values; any other value as it is."""
    if not isinstance(value, dict) or None not in value.values():
        return value
    return {key: item for key, item in value.items() if item is not None}


def exactly_one(*fields: str, message: str = "") -> Rule:
    """The rule that one of these optional fields, named as users write them, is set and no other of
    them."""
    cel = f"[{', '.join(f'has(self.{field})' for field in fields)}].filter(x, x).size() == 1"
    listed = f"{', '.join(fields[:-1])} and {fields[-1]}"
    return Rule(cel, message or f"set exactly one of {listed}")


class MapList(NamedTuple):
    """Marks a list as a map: no two items have the same key, and server-side apply merges it item
    by item."""

    key: str
    """Field of the items, as users write it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        marks = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}
        return handler(schema) | marks

    def _check(self, items: list[Any]) -> list[Any]:
        keys = [getattr(item, to_snake(self.key)) for item in items]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise PydanticCustomError(
                "duplicate", "more than one item with {keys}", {"keys": ", ".join(repeated)}
            )
        return items


def dotted_path(location: Sequence[int | str]) -> str:
    """A pydantic error location as users write it: `spec.rewards[1].format.pattern`."""
    path = ""
    for part in location:
        if part == "[key]":  # pydantic's mark behind a wrong key
            continue
        if isinstance(part, int):
            path += f"[{part}]"
        elif path:
            path += f".{part}"
        else:
            path = part
    return path


def describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Gives each property of a model's JSON schema the sentence below its field, a base class's
    where it has none."""
    sentences: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if kind is not BaseModel and issubclass(kind, BaseModel):
            sentences |= _sentences(kind)
    for name, field in model.model_fields.items():
        prop = schema.get("properties", {}).get(field.alias or name)
        if prop is not None and name in sentences:
            prop["description"] = sentences[name]


def _sentences(kind: type[BaseModel]) -> dict[str, str]:
    """Text below each field that the class itself declares; none where its source is not at
    hand."""
    try:
        (definition,) = ast.parse(dedent(inspect.getsource(kind))).body
    except OSError:
        return {}
    assert isinstance(definition, ast.ClassDef), "the source of a class is its definition"
    sentences = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            sentences[field.target.id] = inspect.cleandoc(below.value.value)
    return sentences
