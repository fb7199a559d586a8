"""What calls of Python's own functions return, of methods of lists and dicts, and of parsers of the
command line."""

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from textwrap import dedent

from ..trl_run import Note
from .constant_folding import PLAIN_FUNCTIONS, call_plain
from .objects import Objects, computed_key, has_computed_key
from .values import (
    MISSING,
    Arguments,
    Class,
    Column,
    Entries,
    External,
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
    make_dict,
    make_list,
    make_object,
    owners,
)

PARSING = (
    "parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses",
)  # fmt: skip
_FILLING = ("HfArgumentParser", "TrlParser")
"""Parsers that fill dataclasses."""
_LAUNCHED = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
"""Variables that torchrun and `accelerate launch` set: a script's default is not what counts."""
_LIST_CHANGES = ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort")
_DICT_CHANGES = ("clear", "pop", "popitem", "setdefault", "update")
Call = Callable[[Objects, Arguments, ast.Call], Value | None]
"""Returns None for a call that is not known."""


def _plain(objects: Objects, given: Arguments, node: ast.Call, *, name: str) -> Value:
    if given.named or given.has_unknown:
        return Unknown(node)
    return objects.fold(partial(call_plain, name), given.values, node)


def _computed(_: Objects, __: Arguments, node: ast.Call) -> Value:
    return Unknown(node)


def _dict(_: Objects, given: Arguments, node: ast.Call) -> Value:
    cells = [use.value.cells for use in given.positional if isinstance(use.value, Entries)]
    if len(cells) < len(given.positional):
        return Unknown(node)
    return make_dict({**(cells[0] if cells else {}), **given.named}, node)


def _list(objects: Objects, given: Arguments, node: ast.Call) -> Value:
    items = objects.iterate(given.first) if given.first else []
    return Unknown(node) if items is None else make_list(items, node)


def _len(objects: Objects, given: Arguments, node: ast.Call) -> Value:
    items = objects.iterate(given.first) if given.first else None
    return Unknown(node) if items is None else Known(node, len(items))


def _asdict(_: Objects, given: Arguments, node: ast.Call) -> Value:
    """The fields of a dataclass, without a dict_factory, which may leave some out."""
    made = given.first if len(given.uses) == 1 else None
    if not isinstance(made, Object) or not isinstance(made.maker, Class):
        return Unknown(node)
    names = made.maker.dataclass_fields()
    cells = {name: use for name, use in made.fields.items() if name in names or "<" in name}
    return make_dict(cells, node)


def _copy(_: Objects, given: Arguments, __: ast.Call, *, is_deep: bool = False) -> Value | None:
    made = given.first if len(given.uses) == 1 else None
    if isinstance(made, Items | Entries) or (isinstance(made, Object) and not made.method):
        return _copied(made, is_deep=is_deep)
    return None


def _copied(value: Value, *, is_deep: bool) -> Value:
    """The same list, dict or object, in stores of its own."""

    def content(store: Store) -> Store:
        uses = dict(store)
        if is_deep:
            uses = {
                key: replace(use, value=_copied(use.value, is_deep=True))
                for key, use in uses.items()
            }
        return Store(store.kind, uses)

    match value:
        case Items() | Entries():
            return replace(value, cells=content(value.cells))
        case Object():
            return replace(value, fields=content(value.fields))
    return value


def _replace(objects: Objects, given: Arguments, node: ast.Call) -> Value | None:
    """A dataclass with other fields; that of the script is made again."""
    match given.positional:
        case [Use(value=Object(maker=Class() as definition) as made)]:
            named = Arguments([], {**made.fields, **given.named}, given.has_unknown)
            return replace(objects.instantiate(definition, named, node), is_parsed=made.is_parsed)
        case [Use(value=Object(method=None) as made)] if not given.has_unknown:
            return replace(made, fields=Store("fields", {**made.fields, **given.named}))
    return None


def _vars(_: Objects, given: Arguments, node: ast.Call) -> Value:
    made = given.first
    return Entries(node, made.fields) if isinstance(made, Object | Class) else Unknown(node)


def _getattr(objects: Objects, given: Arguments, node: ast.Call) -> Value:
    match given.values:
        case [owner, Known(value=str(name))]:
            return objects.attribute(owner, name, node)
    return Unknown(node)


def _setattr(objects: Objects, given: Arguments, node: ast.Call) -> Value | None:
    if len(given.positional) != 3:
        return None
    owner, name, use = given.positional
    if isinstance(name.value, Known):
        objects.set_attribute(owner.value, owner.node, str(name.value.value), use)
    else:
        if isinstance(owner.value, Object | Class):
            objects.set_any(owner.value.fields, name.node)
        key = computed_key(name.node)
        objects.note_change(owner.value, key, owner.node, use, f"{ast.unparse(owner.node)}.{key}")
    return Known(node, None)


def _super(objects: Objects, _: Arguments, node: ast.Call) -> Value | None:
    """The object of a method, as one of the classes behind the method's own."""
    method = objects.current_function
    made = method.owner if method else None
    if method is None or method.home is None or not isinstance(made, Object):
        return None
    order = made.maker.order() if isinstance(made.maker, Class) else []
    after = order[order.index(method.home) + 1 :] if method.home in order else order
    view = Class(node, method.home.definition, list(after), Store("fields"))
    return Object(node, view, Arguments(), made.fields)


def _dedent(objects: Objects, given: Arguments, node: ast.Call) -> Value:
    return objects.fold(dedent, given.values, node)


def _environment(_: Objects, given: Arguments, node: ast.Call) -> Value:
    """The default that a script has for a variable of the environment."""
    match given.values:
        case [Known(value=str(name)), default]:
            if name in _LAUNCHED:
                return Unknown(node, f"what launches the script sets {name}")
            advice = "the script's default of this variable was taken"
            return assume(default, Note(node.lineno, name, ast.unparse(node.args[1]), advice))
    return Unknown(node)


FUNCTIONS: dict[str, Call] = {
    **{name: partial(_plain, name=name) for name in PLAIN_FUNCTIONS},
    **dict.fromkeys(("filter", "map", "reversed", "set", "sorted", "zip"), _computed),
    **dict.fromkeys(("environ.get", "getenv", "os.environ.get"), _environment),
    **dict.fromkeys(("object.__setattr__", "setattr"), _setattr),
    **dict.fromkeys(("list", "tuple"), _list),
    "asdict": _asdict,
    "copy": _copy,
    "dedent": _dedent,
    "deepcopy": partial(_copy, is_deep=True),
    "dict": _dict,
    "getattr": _getattr,
    "len": _len,
    "replace": _replace,
    "super": _super,
    "vars": _vars,
}
LIBRARY_FUNCTIONS = ("asdict", "copy", "dedent", "deepcopy", "getenv", "replace")
"""Those that scripts import, and may call by the name of their module."""


def call_method(objects: Objects, callee: Part, given: Arguments, node: ast.Call) -> Value | None:
    """What a method of a list or a dict returns; None for other methods."""
    name = callee.name
    match callee.owner:
        case Items() as items:
            _call_list(objects, items, name, given, node)
        case Entries() as entries:
            return _call_dict(objects, entries, name, given, node)
        case Part(owner=owner, name=field) if name in (*_LIST_CHANGES, *_DICT_CHANGES):
            objects.change_part(owner, field, node)
        case Known() | Column():
            pass
        case _:
            return None
    return Unknown(node)


def _call_list(objects: Objects, items: Items, name: str, given: Arguments, node: ast.Call) -> None:
    uses = items.uses
    is_open = objects.iterate(items) is None
    match name, given.values:
        case "append", [_]:
            uses.append(given.positional[0])
        case "extend", [_]:
            objects.extend(items, given.positional[0])
            return
        case "insert", [Known(value=int(place)), _] if not is_open:
            uses.insert(place, given.positional[1])
        case _ if name in _LIST_CHANGES:
            uses = [Use(Rest(node), node)]
    objects.replace_items(items, uses)


def _call_dict(
    objects: Objects, entries: Entries, name: str, given: Arguments, node: ast.Call
) -> Value:
    cells = entries.cells
    is_closed = _is_closed(entries)
    key = given.first.value if isinstance(given.first, Known) else MISSING
    if name in ("get", "pop", "setdefault") and key is not MISSING and (is_closed or key in cells):
        return _call_entry(objects, cells, name, given)
    if name == "copy" and not isinstance(entries, Row):
        return make_dict(dict(cells), node)
    if name == "items" and is_closed:
        pairs = [[Use(Known(node, key), node), use] for key, use in cells.items()]
        return make_list([Use(make_list(pair, node), node) for pair in pairs], node)
    if name == "values" and is_closed:
        return make_list(list(cells.values()), node)
    _change_dict(objects, cells, name, given, node)
    return Unknown(node)


def _change_dict(
    objects: Objects, cells: Store, name: str, given: Arguments, node: ast.Call
) -> None:
    if name == "update":
        for use in given.positional:
            objects.update(cells, use)
        for word, use in given.named.items():
            objects.write(cells, word, use)
    elif name in _DICT_CHANGES:
        objects.set_any(cells, node.args[0] if node.args else node)


def _is_closed(entries: Entries) -> bool:
    """True for a dict of which all entries are known by their keys."""
    return not isinstance(entries, Row) and not has_computed_key(entries.cells)


def _call_entry(objects: Objects, cells: Store, name: str, given: Arguments) -> Value:
    """What `get`, `pop` or `setdefault` of a key returns."""
    key, *default = given.positional
    assert isinstance(key.value, Known), "the key is known"
    use = cells.get(key.value.value) or (default or [Use(Known(key.node, None), key.node)])[0]
    if name == "setdefault":
        objects.write(cells, key.value.value, use)
    elif name == "pop":
        objects.write(cells, key.value.value, MISSING)
    return use.value


# Parsers of the command line


def find_parser(callee: Value) -> Value | None:
    """The parser whose method parses the command line; None for other calls."""
    if isinstance(callee, Part) and callee.name in PARSING:
        return callee.owner
    return callee if isinstance(callee, External) and callee.name in PARSING else None


def parse_options(objects: Objects, parser: Value, given: Arguments, node: ast.Call) -> Value:
    """What a parser makes of a command line without options: argparse's, or one that fills
    dataclasses."""
    if any(isinstance(value, Items) and value.cells for value in given.values):
        return Unknown(node, f"line {node.lineno} gives the parser its options")
    *_, maker = owners(parser)
    if not isinstance(maker, Object) or maker.name not in _FILLING:
        options = make_object(External(node, "argparse.Namespace"), Arguments(), {}, node)
        _fill_options(objects, options)
        is_pair = ast.unparse(node.func).endswith("parse_known_args")
        rest = Use(Unknown(node), node)
        return make_list([Use(options, node), rest], node) if is_pair else options
    classes = maker.arguments.uses[:1]
    if classes and isinstance(classes[0].value, Items):
        classes = classes[0].value.uses
    made: list[Value] = []
    for definition in (use.value for use in classes):
        if isinstance(definition, Class):
            made.append(objects.instantiate(definition, Arguments(), node, is_parsed=True))
        else:
            made.append(replace(make_object(definition, Arguments(), {}, node), is_parsed=True))
    return make_list([Use(value, node) for value in made], node)


def _fill_options(objects: Objects, options: Object) -> None:
    """Give argparse's object the defaults of its options."""
    by_name: dict[str, list[Object]] = {}
    for call in objects.calls:
        if call.name == "add_argument":
            dest = call.arguments.named.get("dest")
            name = dest.value.value if dest and isinstance(dest.value, Known) else _flag(call)
            by_name.setdefault(str(name).lstrip("-").replace("-", "_"), []).append(call)
    for name, calls in by_name.items():
        value = _option_default(objects, calls[0])
        if len(calls) > 1:
            lines = ", ".join(str(call.line) for call in calls)
            value = Unknown(calls[0].node, f"options of lines {lines} set it")
        for call in objects.calls:
            given = call.arguments
            if call.name == "set_defaults" and (name in given.named or given.has_unknown):
                value = Unknown(call.node, f"line {call.line} sets it, too")
        options.fields[name] = Use(value, calls[0].node)


def _option_default(objects: Objects, option: Object) -> Value:
    """What an argument is where its option is not given."""
    given, node, flag = option.arguments.named, option.node, _flag(option)
    kind = ast.unparse(given["type"].node) if "type" in given else "str"
    default, action = (
        given[name].value if name in given else None for name in ("default", "action")
    )
    if default is None:
        flags = {"store_true": False, "store_false": True}
        if not isinstance(action, Known) or action.value not in flags:
            return Unknown(node, f"{flag} has no default")
        default = Known(node, flags[action.value])
    # argparse reads a default that is a text as it reads the command line.
    if isinstance(default, Known) and isinstance(default.value, str) and kind != "str":
        if kind not in ("int", "float"):
            return Unknown(node, f"{flag} is read by {kind}")
        default = objects.fold(float if kind == "float" else int, [default], node)
    advice = "the option's default was taken; change the job if you pass another value"
    text = repr(default.value) if isinstance(default, Known) else ast.unparse(default.node)
    return assume(default, Note(option.line, flag, text, advice))


def _flag(option: Object) -> str:
    """An option as users write it, such as `--batch-size`."""
    names = [str(value.value) for value in option.arguments.values if isinstance(value, Known)]
    names = names[: len(option.arguments.positional)]
    long = [name for name in names if name.startswith("--")] or names
    return long[0] if long else ""
