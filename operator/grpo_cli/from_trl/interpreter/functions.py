"""What calls of Python's own functions return, of methods of lists and dicts, and of parsers of the
command line."""

import ast
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..trl_run import Note
from .constant_folding import PLAIN_FUNCTIONS, call_plain
from .objects import ENVIRONMENT, Objects, computed_key, has_computed_key, merge_cells
from .values import (
    MISSING,
    Arguments,
    Class,
    Column,
    Entries,
    External,
    Function,
    Items,
    Known,
    Object,
    Part,
    Store,
    Unknown,
    Use,
    Value,
    assume,
    key_of,
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
_CHANGES = (
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault",
    "sort", "update",
)  # fmt: skip
"""Methods that change a list or a dict."""
_WITH_KEY = ("get", "insert", "pop", "setdefault")
_WITH_ALL = ("items", "keys", "popitem", "reverse", "values")
"""Methods whose result is known where all items are."""
_COMPUTED = ("filter", "functools.reduce", "map", "reversed", "set", "sorted", "zip")
Call = Callable[[Objects, Arguments, ast.Call], Value | None]
"""Returns None for a call that is not known."""


def _plain(objects: Objects, given: Arguments, node: ast.Call, *, name: str) -> Value:
    if given.named or given.has_unknown:
        return _computed(objects, given, node)
    return objects.fold(partial(call_plain, name), given.values, node)


def _computed(objects: Objects, given: Arguments, node: ast.Call) -> Value:
    """What is not computed here; the functions that it is given may change something."""
    for value in given.values:
        if isinstance(value, Function):
            objects.repeat(partial(objects.follow_any, value))
    return Unknown(node)


def _dict(_: Objects, given: Arguments, node: ast.Call) -> Value:
    cells = [use.value.cells for use in given.positional if isinstance(use.value, Entries)]
    if len(cells) < len(given.positional):
        return Unknown(node)
    return make_dict(merge_cells(cells[0] if cells else {}, given.named), node)


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

    def part(value: Value) -> Value:
        return _copied(value, is_deep=True) if is_deep else value

    match value:
        case Items() | Entries():
            return replace(value, cells=value.cells.with_values(part))
        case Object():
            return replace(value, fields=value.fields.with_values(part))
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
        case [owner, Known(value=str(name), assumptions=notes)]:
            return objects.assume_choice(objects.attribute(owner, name, node), notes)
    return Unknown(node)


def _initialize(objects: Objects, given: Arguments, node: ast.Call) -> Value | None:
    """Set the fields that a library's class is made with."""
    made = given.first
    if not isinstance(made, Object):
        return None
    for name, use in given.named.items():
        objects.write(made.fields, name, use)
    return Known(node, None)


def _setitem(objects: Objects, given: Arguments, node: ast.Call) -> Value | None:
    if len(given.positional) != 3:
        return None
    owner, key, use = given.positional
    objects.set_item(owner.value, owner.node, key, use)
    return Known(node, None)


def _setattr(objects: Objects, given: Arguments, node: ast.Call) -> Value | None:
    if len(given.positional) != 3:
        return None
    owner, name, use = given.positional
    attribute = key_of(name.value)
    if isinstance(attribute, str):
        objects.set_attribute(owner.value, owner.node, attribute, use)
    else:
        if isinstance(owner.value, Object | Class):
            objects.set_any(owner.value.fields, name.node)
        key = computed_key(name.node)
        objects.note_change(owner.value, key, owner.node, use, f"{ast.unparse(owner.node)}.{key}")
    return Known(node, None)


def _super(objects: Objects, _: Arguments, node: ast.Call) -> Value | None:
    """The object of a method, as one of the classes behind the method's own."""
    method = objects.calling[-1] if objects.calling else None
    made = method.owner if method else None
    if method is None or method.home is None or not isinstance(made, Object):
        return None
    order = made.maker.order() if isinstance(made.maker, Class) else []
    after = order[order.index(method.home) + 1 :] if method.home in order else order
    view = Class(node, method.home.definition, list(after), Store("fields"))
    return Object(node, view, Arguments(), made.fields)


def _type(objects: Objects, given: Arguments, node: ast.Call) -> Value | None:
    made = given.first if len(given.uses) == 1 else None
    return objects.attribute(made, "__class__", node) if isinstance(made, Object) else None


def _environment(objects: Objects, given: Arguments, node: ast.Call) -> Value:
    """A variable of the environment: as the script sets it, or the script's default of it."""
    variables = objects.environment.cells
    match given.values:
        case [Known(value=str(name)), *_] if name in variables:
            return variables[name].value
        case _ if has_computed_key(variables):
            return Unknown(node)
        case [Known(value=str(name)), default]:
            if name in _LAUNCHED:
                return Unknown(node, f"what launches the script sets {name}")
            advice = "the script's default of this variable was taken"
            return assume(default, Note(node.lineno, name, ast.unparse(node.args[1]), advice))
    return Unknown(node)


def _set_environment(objects: Objects, given: Arguments, node: ast.Call, *, name: str) -> Value:
    return _call_container(objects, objects.environment, name, given, node)


SPECIAL_METHODS: dict[str, Call] = {
    "__init__": _initialize,
    "__setattr__": _setattr,
    "__setitem__": _setitem,
}
"""Methods of Python's own object and dict, which set something."""
FUNCTIONS: dict[str, Call] = {
    **{
        f"{environment}.{name}": partial(_set_environment, name=name)
        for environment in ENVIRONMENT
        for name in ("pop", "setdefault", "update")
    },
    **{name: partial(_plain, name=name) for name in PLAIN_FUNCTIONS},
    **dict.fromkeys(_COMPUTED, _computed),
    **dict.fromkeys(("environ.get", "getenv", "os.environ.get"), _environment),
    **dict.fromkeys(("list", "tuple"), _list),
    "asdict": _asdict,
    "copy": _copy,
    "deepcopy": partial(_copy, is_deep=True),
    "dict": _dict,
    "getattr": _getattr,
    "len": _len,
    "operator.setitem": _setitem,
    "replace": _replace,
    "setattr": _setattr,
    "super": _super,
    "type": _type,
    "vars": _vars,
}
LIBRARY_FUNCTIONS = ("asdict", "copy", "dedent", "deepcopy", "getenv", "replace")
"""Those that scripts import, and may call by the name of their module."""


def call_special_method(
    objects: Objects, callee: Part | External, given: Arguments, node: ast.Call
) -> Value | None:
    """Call one of SPECIAL_METHODS: of an object, or of a class, which is given the object."""
    if isinstance(callee, Part) and not isinstance(callee.owner, Class):
        first = Use(callee.owner, getattr(node.func, "value", node))
        given = replace(given, positional=[first, *given.positional])
    return SPECIAL_METHODS[callee.name](objects, given, node)


def call_method(objects: Objects, callee: Part, given: Arguments, node: ast.Call) -> Value | None:
    """What a method of a list or a dict returns; None for other methods."""
    name = callee.name
    match callee.owner:
        case Items() | Entries() as owner:
            return _call_container(objects, owner, name, given, node)
        case Part(owner=owner, name=field) if name in _CHANGES:
            objects.change_part(owner, field, node)
        case Known() | Column():
            pass
        case _:
            return None
    return Unknown(node)


def _call_container(
    objects: Objects, owner: Items | Entries, name: str, given: Arguments, node: ast.Call
) -> Value:
    """Call the method of Python's own list or dict on what the script's holds."""
    if name == "copy":
        return _copied(owner, is_deep=False)
    if name == "get" and isinstance(given.first, Known) and given.first.assumptions:
        key = Use(replace(given.first, assumptions=()), node)
        plain = replace(given, positional=[key, *given.positional[1:]])
        item = _call_container(objects, owner, name, plain, node)
        return objects.assume_choice(item, given.first.assumptions)
    if name in ("extend", "update"):
        for use in given.positional:
            objects.extend(owner, use)
        for word, use in given.named.items():
            objects.write(owner.cells, word, use)
        return Known(node, None)
    arguments = _known_arguments(objects, owner, name, given.positional)
    content: Any = owner.uses if isinstance(owner, Items) else dict(owner.cells)
    if arguments is not None:
        with suppress(AttributeError, LookupError, TypeError):
            result = getattr(content, name)(*arguments)
            objects.refill(owner.cells, content)
            return _value_of(result, node)
    if name in _CHANGES:
        objects.forget(owner, node.args[0] if node.args else node)
    return Unknown(node)


def _known_arguments(
    objects: Objects, owner: Items | Entries, name: str, given: list[Use]
) -> list[Any] | None:
    """What the method of Python's own list or dict is called with; None where only the run knows
    what it does."""
    if name in ("append", "clear"):
        return list(given)
    is_known = objects.iterate(owner) is not None
    if name in _WITH_KEY and given:
        key = key_of(given[0].value)
        is_there = isinstance(owner, Entries) and key in owner.cells
        missing = [Use(Known(given[0].node, None), given[0].node)]
        default = missing if name in ("get", "setdefault") and len(given) == 1 else given[1:]
        return [key, *default] if is_there or (is_known and key is not MISSING) else None
    return list(given) if is_known and name in (*_WITH_KEY, *_WITH_ALL) else None


def _value_of(part: Any, node: ast.AST) -> Value:
    """What a method of Python's own list or dict has returned."""
    if isinstance(part, Use):
        return part.value
    if part is None or isinstance(part, str | int | float):
        return Known(node, part)
    uses = (each if isinstance(each, Use) else Use(_value_of(each, node), node) for each in part)
    return make_list(list(uses), node)


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
    by_name: dict[str, list[Value]] = {}
    for call in objects.calls:
        if call.name == "add_argument" and (option := _read_option(objects, call)):
            by_name.setdefault(option[0], []).append(option[1])
    for name, defaults in by_name.items():
        value = defaults[0]
        if len(defaults) > 1:
            lines = ", ".join(str(default.line) for default in defaults)
            value = Unknown(value.node, f"options of lines {lines} set it")
        for call in objects.calls:
            given = call.arguments
            if call.name == "set_defaults" and (name in given.named or given.has_unknown):
                value = Unknown(call.node, f"line {call.line} sets it, too")
        options.fields[name] = Use(value, value.node)


def _read_option(objects: Objects, call: Object) -> tuple[str, Value] | None:
    """The name of an argument, and what it is where its option is not given; None where only the
    run knows the name."""
    given, node = call.arguments.named, call.node
    settings = {name: key_of(given[name].value) for name in ("dest", "action") if name in given}
    if settings.get("action") not in ("store_true", "store_false"):
        settings.pop("action", None)
    try:
        flags = [key_of(use.value) for use in call.arguments.positional]
        action = ArgumentParser(add_help=False).add_argument(*flags, **settings)
    except (TypeError, ValueError):
        return None
    flag = next((flag for flag in flags if flag.startswith("--")), action.dest)
    kind = ast.unparse(given["type"].node) if "type" in given else "str"
    default: Value = Known(node, action.default)
    if "default" in given:
        default = given["default"].value
    elif action.default is None:
        return action.dest, Unknown(node, f"{flag} has no default")
    # argparse reads a default that is a text as it reads the command line.
    if isinstance(default, Known) and isinstance(default.value, str) and kind != "str":
        if kind not in ("int", "float"):
            return action.dest, Unknown(node, f"{flag} is read by {kind}")
        default = objects.fold(float if kind == "float" else int, [default], node)
    advice = "the option's default was taken; change the job if you pass another value"
    text = repr(default.value) if isinstance(default, Known) else ast.unparse(default.node)
    return action.dest, assume(default, Note(call.line, flag, text, advice))
