"""What an expression of a script is, as far as reading it can say.

Constants are `Known`; lists, dicts, functions, classes and objects have parts of their own. What a
library makes is an `Object` that remembers its call. Everything else is `Unknown`, and says why.
Whatever a script can change lies in a `Store`, which remembers the statements that wrote to it.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from grpo_api.spec.trl_places import FIELDS

from ..trl_run import Note

DTYPES = ("bfloat16", "float16", "float32")
MAX_ITEMS = 1000
COMPUTED = "it is computed when the script runs"
MISSING: Final = object()
ITEM = "__getitem__"
"""Method by which an item of a library's object is read."""
Place = tuple[int, int]
"""Line and column where a statement begins."""


class Computed(Exception):
    """The value is known only when the script runs; the text says why."""


class Store(dict[Any, "Use"]):
    """Names of a scope, items of a list, entries of a dict, or fields of an object."""

    def __init__(self, kind: str, content: dict[Any, "Use"] | None = None) -> None:
        super().__init__(content or {})
        self.kind = kind
        self.writers: dict[Any, set[Place]] = {}
        """Statements that wrote each."""

    def put(self, key: Any, use: object) -> None:
        """Set or, by MISSING, remove one."""
        if isinstance(use, Use):
            self[key] = use
        else:
            self.pop(key, None)

    def add_writer(self, key: Any, statement: ast.AST) -> None:
        """Remember a statement that writes one, or changes it."""
        place = line_of(statement), getattr(statement, "col_offset", 0)
        self.writers.setdefault(key, set()).add(place)

    def with_values(self, change: "Callable[[Value], Value]") -> "Store":
        """The same with other values."""
        content = {key: replace(use, value=change(use.value)) for key, use in self.items()}
        return Store(self.kind, content)


@dataclass(eq=False)
class Frame:
    """Names of the module, a class or a function call, and of what is around it."""

    body: list[ast.stmt]
    outer: "Frame | None" = None
    is_class: bool = False
    names: Store = field(default_factory=lambda: Store("names"))
    foreign: set[str] = field(default_factory=set)
    """Names that `global` and `nonlocal` leave to what is around."""

    def around(self) -> "Iterator[Frame]":
        """The frame and those around it."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.outer

    def owner(self, name: str) -> "Frame | None":
        """The frame that binds a name, as seen from this one; None if nothing does."""
        for frame in self.around():
            if name in frame.names and (frame is self or not frame.is_class):
                return frame
        return None

    def binder(self, name: str) -> "Frame":
        """The frame in which an assignment binds a name."""
        if name not in self.foreign or self.outer is None:
            return self
        *_, root = self.around()
        return self.outer.owner(name) or root


@dataclass(eq=False)
class Value:
    """What an expression is; `node` made it."""

    node: ast.AST

    @property
    def line(self) -> int:
        """Line of what made it."""
        return line_of(self.node)


@dataclass(eq=False)
class Use:
    """A value where the script uses it; settings and notes have the line of the use."""

    value: Value
    node: Any
    """The expression or the statement."""
    frame: Frame | None = None
    """Where its names are read."""

    @property
    def line(self) -> int:
        """Line of the use."""
        return line_of(self.node)


@dataclass(eq=False)
class Known(Value):
    """A constant."""

    value: Any
    assumptions: tuple[Note, ...] = ()
    """Defaults in it that the command line or the environment can replace."""


@dataclass(eq=False)
class Unknown(Value):
    """What only running the script can say."""

    why: str = COMPUTED


@dataclass(eq=False)
class Rest(Unknown):
    """Any number of further items of a list."""


@dataclass(eq=False)
class External(Value):
    """A name that the script imports, or does not bind: `trl.GRPOConfig`."""

    path: str
    is_imported: bool = False

    @property
    def name(self) -> str:
        """Its last name."""
        return self.path.rpartition(".")[2]


@dataclass(eq=False)
class Part(Value):
    """An attribute or a method of what a library makes, or of a constant."""

    owner: Value
    name: str


@dataclass(eq=False)
class Items(Value):
    """A list or a tuple, by position."""

    cells: Store

    @property
    def uses(self) -> list[Use]:
        """The items in their order."""
        return [self.cells[position] for position in sorted(self.cells)]


@dataclass(eq=False)
class Entries(Value):
    """A dict, by key; that of `vars(object)` is the object's own fields. Entries that nobody knows
    go by their source, `<key>` or `**mapping`."""

    cells: Store


@dataclass(eq=False)
class Column(Value):
    """A column of a dataset's row."""

    name: str


@dataclass(eq=False)
class Row(Entries):
    """A row of a dataset, with the columns that a function has replaced so far."""


@dataclass(eq=False)
class Arguments:
    """What a call is given."""

    positional: list[Use] = field(default_factory=list)
    named: dict[str, Use] = field(default_factory=dict)
    has_unknown: bool = False
    """It unpacks what nobody knows."""

    def by_name(self, positions: tuple[str, ...]) -> dict[str, Use]:
        """The arguments by their parameters; one that has none here goes by its source."""
        extra = {f"*{ast.unparse(use.node)}": use for use in self.positional[len(positions) :]}
        return dict(zip(positions, self.positional, strict=False)) | extra | self.named

    @property
    def first(self) -> Value | None:
        """The first one by position."""
        return self.positional[0].value if self.positional else None

    @property
    def uses(self) -> list[Use]:
        """The arguments in their order."""
        return [*self.positional, *self.named.values()]

    @property
    def values(self) -> list[Value]:
        """What they are."""
        return [use.value for use in self.uses]


@dataclass(eq=False)
class Function(Value):
    """A function of the script, or a lambda."""

    frame: Frame
    """Where it is defined."""
    defaults: dict[str, Use]
    owner: Value | None = None
    """The object or class whose method it is."""
    home: "Class | None" = None
    """The class that defines it."""
    fields: Store = field(default_factory=lambda: Store("fields"))
    wrapper: Value | None = None
    """What its decorators call in its place."""

    @property
    def name(self) -> str:
        """Its name; empty for a lambda."""
        return str(getattr(self.node, "name", ""))


@dataclass(eq=False)
class Class(Value):
    """A class of the script."""

    definition: ast.ClassDef
    bases: list[Value]
    fields: Store
    defaults: dict[str, Use | None] | None = None
    """Fields of a dataclass by its own lines, with their defaults; None for other classes."""

    def order(self) -> "list[Class | External]":
        """The class and its bases in the order in which Python looks for a field."""
        order: list[Class | External] = [self]
        for base in self.bases:
            if isinstance(base, Class):
                order += base.order()
            else:
                order.append(base if isinstance(base, External) else External(base.node, "?"))
        # What several classes derive from comes behind all of them.
        last = {
            id(part) if isinstance(part, Class) else part.path: place
            for place, part in enumerate(order)
        }
        return [order[place] for place in sorted(last.values())]

    def dataclass_fields(self) -> dict[str, Use | None]:
        """Fields of a dataclass, with those of its bases, and their defaults."""
        fields: dict[str, Use | None] = {}
        for base in reversed(self.order()[1:]):
            # Each dataclass brings the fields of its own bases again, TRL's defaults among them.
            inherited: dict[str, Use | None] = {}
            is_config = isinstance(base, External) and base.name == "GRPOConfig"
            if isinstance(base, Class) and base.defaults is not None:
                inherited, is_config = base.dataclass_fields(), base.has_base("GRPOConfig")
            if is_config:
                fields = {name: use for name, use in fields.items() if name not in FIELDS}
            fields |= inherited
        return fields | (self.defaults or {})

    def has_method(self, *names: str) -> bool:
        """True if the script defines a method or a property of one of these names."""
        classes = [base for base in self.order() if isinstance(base, Class)]
        members = [
            base.fields[name].value for base in classes for name in names if name in base.fields
        ]
        return any(isinstance(member, Function) for member in members)

    def has_base(self, name: str) -> bool:
        """True for a class that a library's class of this name is a base of."""
        return any(isinstance(base, External) and base.name == name for base in self.order())


@dataclass(eq=False)
class Object(Value):
    """What a call of a library, or of a class of the script, returns."""

    maker: Value
    arguments: Arguments
    fields: Store
    is_parsed: bool = False
    """A parser of the command line fills it."""

    @property
    def path(self) -> str:
        """Name of the library's function or class; empty for others."""
        return self.maker.path if isinstance(self.maker, External) else ""

    @property
    def name(self) -> str:
        """Last name of what is called: `from_pretrained` of `AutoModel.from_pretrained(…)`."""
        if isinstance(self.maker, Class):
            return self.maker.definition.name
        return self.maker.name if isinstance(self.maker, External | Part) else ""

    def is_made_by(self, name: str) -> bool:
        """True for an object of a library's class of this name, or of a subclass in the script."""
        is_own = isinstance(self.maker, Class) and self.maker.has_base(name)
        return is_own or self.name == name

    @property
    def method(self) -> tuple[Value, str] | None:
        """The object whose method made this one, and the method; None for others."""
        return (self.maker.owner, self.maker.name) if isinstance(self.maker, Part) else None


def make_object(
    maker: Value, arguments: Arguments, fields: dict[str, Use], node: ast.AST
) -> Object:
    """A new object with fields."""
    return Object(node, maker, arguments, Store("fields", fields))


def make_dict(cells: dict[Any, Use], node: ast.AST) -> Entries:
    """A new dict."""
    return Entries(node, Store("entries", cells))


def make_list(uses: list[Use], node: ast.AST) -> Items:
    """A new list."""
    if len(uses) > MAX_ITEMS:
        uses = [Use(Rest(node), node)]
    return Items(node, Store("items", dict(enumerate(uses))))


def make_value(value: Any, node: ast.AST) -> Value:
    """The value of a constant, with lists and dicts that the script can change."""
    if isinstance(value, list):
        return make_list([Use(make_value(item, node), node) for item in value], node)
    if isinstance(value, dict):
        return make_dict(
            {key: Use(make_value(item, node), node) for key, item in value.items()}, node
        )
    return Known(node, value)


def assume(value: Value, note: Note) -> Value:
    """The same constant as a default that a note names wherever it is taken."""
    match value:
        case Known(assumptions=assumptions):
            return replace(value, assumptions=(*assumptions, note))
        case Items(cells=cells) | Entries(cells=cells):
            return replace(value, cells=cells.with_values(lambda part: assume(part, note)))
    return value


def line_of(node: ast.AST) -> int:
    """Line of a node; 0 for one that is made here."""
    return getattr(node, "lineno", 0)


def key_of(value: Value) -> Any:
    """The constant that is the key of a dict or the place of an item; MISSING for all that only the
    run decides."""
    match value:
        case Known(value=str() | int() | float() | None as plain, assumptions=()):
            return plain
    return MISSING


def constant(value: Value) -> tuple[Any, list[Note]]:
    """A constant, and the defaults that it assumes.

    Raises:
        Computed: only running the script can say it.
    """
    assumptions: list[Note] = []

    def convert(part: Value) -> Any:
        match part:
            case Known():
                assumptions.extend(part.assumptions)
                return part.value
            case Items():
                return [convert(use.value) for use in part.uses]
            case Entries() if not isinstance(part, Row):
                return {key: convert(use.value) for key, use in part.cells.items()}
            case External(path=path) if path.startswith("torch.") and part.name in DTYPES:
                return part.name
        raise Computed(part.why if isinstance(part, Unknown) else COMPUTED)

    return convert(value), assumptions


def truth(value: Value) -> bool | None:
    """Whether a condition holds; None where the run decides, as by a default that it assumes."""
    match value:
        case Known(assumptions=()):
            return bool(value.value)
        case Items() | Entries() if not isinstance(value, Row):
            is_open = any(isinstance(use.value, Unknown) for use in value.cells.values())
            return None if is_open else bool(value.cells)
    return None


def is_none(value: Value | None) -> bool:
    """True for None."""
    return value is None or (isinstance(value, Known) and value.value is None)


def owners(value: Value) -> Iterator[Value]:
    """A value, and the objects that it is a part or an item of."""
    current: Value | None = value
    while current is not None:
        yield current
        if isinstance(current, Object):
            current = current.maker if current.method and current.name == ITEM else None
        else:
            current = current.owner if isinstance(current, Part) else None


def written_places(value: Value) -> Iterator[Place]:
    """Statements that change a value, or what is in it."""
    pending, visited = [value], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        store = getattr(current, "cells", None)
        store = getattr(current, "fields", None) if store is None else store
        if isinstance(store, Store):
            for places in store.writers.values():
                yield from places
            pending += [use.value for use in store.values()]
        if isinstance(current, Object | Part):
            pending.append(current.maker if isinstance(current, Object) else current.owner)
