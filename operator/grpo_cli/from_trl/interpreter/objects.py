"""Objects of a script: their fields and items, and what the script changes of them."""

import ast
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..trl_run import LORA_POSITIONS, Note
from .heap import Heap
from .values import (
    ITEM,
    MISSING,
    Arguments,
    Class,
    Column,
    Computed,
    Entries,
    External,
    Function,
    Items,
    Known,
    Object,
    Part,
    Rest,
    Row,
    Store,
    Unknown,
    Use,
    Value,
    assume,
    constant,
    key_of,
    line_of,
    make_dict,
    make_object,
    make_value,
)

MAX_LETTERS = 1_000_000
MAX_BITS = 4096
POSITIONAL_FIELDS = {"GRPOConfig": ("output_dir",), "LoraConfig": LORA_POSITIONS}
ENVIRONMENT = ("environ", "os.environ")
_DEFAULT_MAKERS = ("field", "Field", "Argument", "Option")
"""Functions of dataclasses and typer that wrap a default."""


@dataclass(frozen=True)
class Change:
    """A field of an object that the script sets, or a method that changes it."""

    owner: Value
    attribute: str
    name: str
    """What changes, as the script writes it."""
    line: int
    use: Use | None
    """The new value; None where it is unknown."""
    call: ast.Call | None
    """Call of a method."""
    is_conditional: bool


class Objects(Heap):
    """Objects of one script."""

    def __init__(self, on_call: Callable[[Object], None]) -> None:
        super().__init__()
        self.calls: list[Object] = []
        """Calls of libraries and classes, in order."""
        self.changes: list[Change] = []
        """Changes of objects, in order."""
        self.assumed_choices: list[Note] = []
        """Defaults by which a function or an object was chosen of several."""
        self.environment = make_dict({}, ast.Pass())
        """Variables of the environment that the script sets."""
        self.calling: list[Function] = []
        """Functions of the script that are followed, each called by the one before."""
        self._on_call = on_call

    @abstractmethod
    def follow(self, function: Function, arguments: Arguments | None) -> Value:
        """What a call of a script's function returns."""

    def follow_any(self, function: Function) -> None:
        """Follow a call of which only the run knows the arguments."""
        self.follow(function, Arguments(has_unknown=True))

    @abstractmethod
    def apply(self, callee: Value, arguments: Arguments, node: ast.Call) -> Value:
        """What a call returns."""

    def record(self, made: Object) -> Object:
        """Keep a call of a library, or of a class of the script."""
        if not self.is_rehearsal:
            self.calls.append(made)
            self._on_call(made)
        return made

    def fold(self, function: Callable[..., Any], values: Sequence[Value], node: ast.AST) -> Value:
        """What a function makes of constants, with the defaults that these assume."""
        plain: list[Any] = []
        assumptions: list[Note] = []
        try:
            for value in values:
                part, assumed = constant(value)
                plain.append(part)
                assumptions += assumed
            result = function(*plain)
        except Computed as error:
            return Unknown(node, str(error))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return Unknown(node)
        if isinstance(result, list | dict):
            return Unknown(node) if assumptions else make_value(result, node)
        is_large = isinstance(result, str) and len(result) > MAX_LETTERS
        if is_large or (isinstance(result, int) and result.bit_length() > MAX_BITS):
            return Unknown(node)  # a few lines that double a value would take all memory
        return Known(node, result, tuple(dict.fromkeys(assumptions)))

    def iterate(self, value: Value) -> list[Use] | None:
        """The items of a list, or the keys of a dict; None where they are not all known."""
        if isinstance(value, Items):
            uses = value.uses
            return None if any(isinstance(use.value, Rest) for use in uses) else uses
        if (
            not isinstance(value, Entries)
            or isinstance(value, Row)
            or has_computed_key(value.cells)
        ):
            return None
        return [Use(Known(use.node, key), use.node) for key, use in value.cells.items()]

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        """An attribute of a value."""
        match value:
            case External(path=path):
                return External(node, f"{path}.{name}", value.is_imported)
            case Unknown() | Column():
                return Unknown(node, getattr(value, "why", Unknown.why))
            case Object() | Class():
                return self._field(value, name, node)
            case Known() if name == "value":  # of an Enum's member
                return value
            case Function() if name == "__name__" and name not in value.fields:
                return Known(node, value.name)
        return Part(node, value, name)

    def _field(self, value: Object | Class, name: str, node: ast.AST) -> Value:
        if name == "__dict__":
            return Entries(node, value.fields)
        if name == "__class__" and isinstance(value, Object) and value.name[:1].isupper():
            return value.maker
        if name in value.fields and isinstance(value, Object):
            return value.fields[name].value
        if isinstance(value, Object) and has_computed_key(value.fields):
            return Unknown(node)
        definition = value.maker if isinstance(value, Object) else value
        if not isinstance(definition, Class):
            return Part(node, value, name)
        for base in definition.order():
            if isinstance(base, External):
                return Part(node, value, name)
            if name in base.fields:
                return self._bound(base.fields[name].value, value, base)
        return Unknown(node) if isinstance(value, Class) else Part(node, value, name)

    def _bound(self, member: Value, owner: Object | Class, definition: Class) -> Value:
        if not isinstance(member, Function):
            return member
        marks = [ast.unparse(mark) for mark in getattr(member.node, "decorator_list", [])]
        if "staticmethod" in marks:
            return member
        if isinstance(owner, Class):
            return replace(member, owner=owner) if "classmethod" in marks else member
        bound = replace(member, owner=definition if "classmethod" in marks else owner)
        is_property = any(mark.endswith("property") for mark in marks)
        return self.follow(bound, Arguments()) if is_property else bound

    def item(self, value: Value, key: Use, node: ast.AST) -> Value:
        """What `value[key]` is."""
        if isinstance(key.value, Known) and key.value.assumptions:
            item = self.item(value, Use(Known(key.node, key.value.value), key.node), node)
            return self.assume_choice(item, key.value.assumptions)
        plain = key_of(key.value)
        match value:
            case Items() if isinstance(plain, int):
                uses = self.iterate(value) or []
                is_there = -len(uses) <= plain < len(uses)
                return uses[plain].value if is_there else Unknown(node)
            case Entries() if plain is not MISSING:
                if plain in value.cells:
                    return value.cells[plain].value
                is_column = isinstance(value, Row) and not has_computed_key(value.cells)
                return Column(node, str(plain)) if is_column else Unknown(node)
            case Items() | Entries() | Known() | Column():
                return Unknown(node)
            case Unknown():
                return Unknown(node, value.why)
            case External(path=path) if path in ENVIRONMENT:
                return self.item(self.environment, key, node)
        return make_object(Part(node, value, ITEM), Arguments([key]), {}, node)

    def assume_choice(self, item: Value, notes: tuple[Note, ...]) -> Value:
        """The item that a default chooses, with the notes on it."""
        if isinstance(item, Known):
            return replace(item, assumptions=(*item.assumptions, *notes))
        if not isinstance(item, Unknown):
            self.assumed_choices += notes
        return item

    def instantiate(
        self, made_of: Class, arguments: Arguments, node: ast.AST, *, is_parsed: bool = False
    ) -> Object:
        """An object of a class of the script, after its `__init__`."""
        made = Object(node, made_of, arguments, Store("fields"), is_parsed=is_parsed)
        if made_of.has_base("GRPOTrainer"):
            return self.record(made)
        for base in made_of.order():
            if isinstance(base, External):
                break
            initializer = base.fields.get("__init__")
            if initializer is not None and isinstance(initializer.value, Function):
                self.follow(replace(initializer.value, owner=made), arguments)
                return self.record(made)
            if base.defaults is not None:
                self._fill(made, base, arguments, is_parsed=is_parsed)
                return self.record(made)
        self._fill_by_library(made, made_of, arguments)
        return self.record(made)

    def _fill_by_library(self, made: Object, made_of: Class, arguments: Arguments) -> None:
        """Give an object the fields that a library's base or decorator sets."""
        library = next((base.name for base in made_of.order() if isinstance(base, External)), "")
        positions = POSITIONAL_FIELDS.get(library)
        why = "its class takes it by position" if arguments.positional and not positions else ""
        if library.endswith("Settings"):  # pydantic's
            why = f"{library} reads variables of the environment, too"
        for part in made_of.order() if why else ():
            for name, use in getattr(part, "fields", {}).items():
                if not isinstance(use.value, Function):
                    made.fields[name] = Use(Unknown(made.node, why), made.node)
        made.fields.update(arguments.by_name(positions) if positions else arguments.named)
        if positions:  # a dataclass
            self._follow_post_init(made)

    def _fill(
        self, made: Object, definition: Class, arguments: Arguments, *, is_parsed: bool
    ) -> None:
        """Give an object of a dataclass its fields."""
        defaults = definition.dataclass_fields()
        for name, default in defaults.items():
            plain = self.plain_default(default) if default else None
            if plain is not None and is_parsed:
                advice = "the default was taken; change the job if you pass another value"
                note = Note(plain.line, f"--{name}", ast.unparse(plain.node), advice)
                plain = replace(plain, value=assume(plain.value, note))
            if plain is None or arguments.has_unknown:
                plain = Use(Unknown(made.node), made.node)
            made.fields[name] = plain
        names = POSITIONAL_FIELDS["GRPOConfig"] if definition.has_base("GRPOConfig") else defaults
        made.fields.update(arguments.by_name(tuple(names)))
        self._follow_post_init(made)

    def _follow_post_init(self, made: Object) -> None:
        """Follow what a dataclass calls once its fields are there."""
        after = self._field(made, "__post_init__", made.node)
        if isinstance(after, Function):
            self.follow(after, Arguments())

    def plain_default(self, use: Use) -> Use | None:
        """A default, out of `field(default=…)` and typer's `Option(…)`; None where the user must
        give it."""
        value = use.value
        if not isinstance(value, Object) or value.name not in _DEFAULT_MAKERS:
            return use
        factory = value.arguments.named.get("default_factory")
        if factory is not None:
            made = self.apply(factory.value, Arguments(), ast.Call(ast.Name("factory"), [], []))
            return Use(made, factory.node, factory.frame)
        given = [] if value.name == "field" else value.arguments.positional[:1]
        default = value.arguments.named.get("default") or (given[0] if given else None)
        is_given = default is not None and not (
            isinstance(default.value, Known) and default.value.value is ...
        )
        return default if is_given else None

    def set_attribute(self, owner: Value, node: ast.AST, name: str, use: object) -> None:
        """Set an attribute, or delete it by MISSING."""
        definition = owner.maker if isinstance(owner, Object) else None
        if isinstance(definition, Class) and definition.has_method(name, "__setattr__"):
            use = Use(Unknown(node, "a method of its class sets it"), node)
        fields = use.value if isinstance(use, Use) else None
        if name == "__dict__" and isinstance(owner, Object) and isinstance(fields, Entries):
            self.refill(owner.fields, fields.cells)
        elif isinstance(owner, Object | Class | Function):
            self.write(owner.fields, name, use)
        shown = f"{ast.unparse(node)}.{name}"
        self.note_change(owner, name, node, use if isinstance(use, Use) else None, shown)

    def note_change(
        self, owner: Value, name: str, node: ast.AST, use: Use | None = None, shown: str = ""
    ) -> None:
        """Keep a change of an object's attribute, by a statement that shows it as `shown`, or as
        its own source."""
        line = line_of(node)
        call = node if isinstance(node, ast.Call) else None
        shown = shown or ast.unparse(call.func if call else node)
        if not self.is_rehearsal:
            is_conditional = self.num_branches > 0
            self.changes.append(Change(owner, name, shown, line, use, call, is_conditional))

    def set_item(self, owner: Value, node: ast.AST, key: Use, use: object) -> None:
        """Set an item or an entry, or delete it by MISSING."""
        plain = key_of(key.value)
        match owner:
            case Entries() if plain is not MISSING:
                self.write(owner.cells, plain, use)
            case Items() if plain in owner.cells and use is not MISSING:
                self.write(owner.cells, plain, use)
            case Items() | Entries():
                self.forget(owner, key.node)
            case Part(owner=container, name=name):
                self.change_part(container, name, node)
            case External(path=path) if path in ENVIRONMENT:
                self.set_item(self.environment, node, key, use)
            case Object(maker=Class()) if isinstance(use, Use):
                method = self._field(owner, "__setitem__", node)
                if isinstance(method, Function):
                    self.follow(method, Arguments([key, use]))
            case Object() if owner.method and owner.name == ITEM:
                self.set_item(owner.method[0], getattr(node, "value", node), key, use)

    def change_part(self, owner: Value, name: str, node: ast.AST) -> None:
        """Make a list or a dict in a field of a library's object unknown, of which an item
        changes."""
        if isinstance(owner, Object):
            use = Use(Unknown(node, "it changes here"), node)
            self.write(owner.fields, name, use)
        self.note_change(owner, name, node)

    def set_any(self, store: Store, node: ast.AST) -> None:
        """Make all entries unknown after one of them changed, nobody knows which."""
        value = Unknown(node, f"line {line_of(node)} sets it")
        for key in list(store):
            self.write(store, key, Use(value, node))
        self.write(store, computed_key(node), Use(value, node))

    def refill(self, store: Store, content: dict[Any, Use] | list[Use]) -> None:
        """Give a list or a dict other items."""
        cells = content if isinstance(content, dict) else dict(enumerate(content))
        for key in {**store, **cells}:
            if store.get(key) is not cells.get(key):
                self.write(store, key, cells.get(key, MISSING))

    def forget(self, owner: Items | Entries, node: ast.AST) -> None:
        """Make all items unknown after one of them changed, nobody knows which."""
        if isinstance(owner, Items):
            self.refill(owner.cells, [Use(Rest(node), node)])
        else:
            self.set_any(owner.cells, node)

    def extend(self, owner: Items | Entries, use: Use) -> None:
        """Add the items of a list to a list, or the entries of a dict to a dict."""
        if isinstance(owner, Items):
            added = self.iterate(use.value)
            if added is None:
                added = [Use(Rest(use.node, "the list changes here"), use.node, use.frame)]
            self.refill(owner.cells, [*owner.uses, *added])
        elif isinstance(use.value, Entries) and not isinstance(use.value, Row):
            self.refill(owner.cells, merge_cells(owner.cells, use.value.cells))
        else:
            self.set_any(owner.cells, use.node)


def unpack(use: Use) -> dict[Any, Use]:
    """Entries that `**` unpacks."""
    if isinstance(use.value, Entries):
        return dict(use.value.cells)
    return {f"**{ast.unparse(use.node)}": Use(Unknown(use.node), use.node, use.frame)}


def computed_key(node: ast.AST) -> str:
    """The key of an entry whose own key nobody knows."""
    return f"<{ast.unparse(node)}>"


def has_computed_key(store: Mapping[Any, Use]) -> bool:
    """True for a store with an entry whose own key nobody knows."""
    return any(isinstance(key, str) and key.startswith(("<", "*")) for key in store)


def merge_cells(cells: Mapping[Any, Use], added: Mapping[Any, Use]) -> dict[Any, Use]:
    """The entries of two dicts. One whose key nobody knows may replace any of the first."""
    if has_computed_key(added):
        why = "an entry with a computed key may replace it"
        cells = {key: Use(Unknown(use.node, why), use.node) for key, use in cells.items()}
    return {**cells, **added}
