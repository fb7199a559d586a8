"""What a script's parser of the command line learns: argparse's options with their defaults."""

import ast
from collections.abc import Callable
from typing import Any

from .syntax import (
    Computed,
    Names,
    called_name,
    function_result,
    has_field,
    set_fields,
)

PARSING = (
    "parse_args",
    "parse_known_args",
    "parse_args_and_config",
    "parse_args_into_dataclasses",
)


def parsing_call(module: ast.Module, call: ast.Call) -> ast.Call | None:
    """The call that parses: `parser.parse_args()`, or what a function of the script returns."""
    name = called_name(call)
    parsing = call if name in PARSING else function_result(module, name)
    is_parsing = isinstance(parsing, ast.Call) and called_name(parsing) in PARSING
    return parsing if isinstance(parsing, ast.Call) and is_parsing else None


def require_command_line(scope: Names, parsing: ast.Call) -> None:
    """Refuse a parser to which the script itself gives options.

    Raises:
        Computed: it does.
    """
    for argument in [*parsing.args, *(keyword.value for keyword in parsing.keywords)]:
        try:
            given = scope.resolve(argument)[0]
        except Computed:
            continue
        if isinstance(given, ast.List) and given.elts:
            raise Computed(parsing, f"line {parsing.lineno} gives the parser its options")


def parsed_classes(scope: Names, call: ast.Call) -> list[ast.expr] | None:
    """The dataclasses that a call of TrlParser or HfArgumentParser fills; None for others."""
    if called_name(call) not in PARSING or not isinstance(call.func, ast.Attribute):
        return None
    maker, made_in, _ = scope.resolve(call.func.value)
    if not isinstance(maker, ast.Call) or not called_name(maker).endswith("Parser"):
        return None
    arguments = [*maker.args, *(keyword.value for keyword in maker.keywords)]
    if not arguments or called_name(maker) == "ArgumentParser":
        return None
    require_command_line(scope, call)
    classes = made_in.resolve(arguments[0])[0]
    return list(classes.elts) if isinstance(classes, ast.Tuple | ast.List) else [arguments[0]]


def is_override(node: ast.AST, argument: ast.Attribute) -> bool:
    """True for what gives an argument of the command line another value, whatever is passed."""
    owner_name = ast.unparse(argument.value)
    match node:
        case ast.Attribute(ctx=ast.Store()):
            return ast.unparse(node) == ast.unparse(argument)
        case ast.Call() if called_name(node) == "set_defaults":
            return any(keyword.arg in (None, argument.attr) for keyword in node.keywords)
    fields = [field for field in set_fields(node) if ast.unparse(field.value) == owner_name]
    return has_field(fields, argument.attr)


def option_of(module: ast.Module, argument: ast.Attribute) -> ast.Call:
    """The `add_argument` of an argument.

    Raises:
        Computed: there is none, or several commands have one of this name.
    """
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    options = [
        call
        for call in calls
        if called_name(call) == "add_argument" and _option_name(call) == argument.attr
    ]
    if not options:
        raise Computed(argument)
    if len(options) > 1:
        lines = ", ".join(str(option.lineno) for option in options)
        raise Computed(argument, f"options of lines {lines} set it")
    return options[0]


def option_default(
    option: ast.Call, argument: ast.Attribute, evaluate: Callable[[ast.expr], Any]
) -> Any:
    """What an argument is where its option is not given.

    Raises:
        Computed: it has no default, or not as a constant.
    """
    arguments = {keyword.arg: keyword.value for keyword in option.keywords}
    if "default" in arguments:
        default = evaluate(arguments["default"])
        kind = ast.unparse(arguments["type"]) if "type" in arguments else "str"
        if not isinstance(default, str) or kind == "str":
            return default
        # argparse reads a default that is a text as it reads the command line.
        if kind not in ("int", "float"):
            raise Computed(argument, f"{option_flag(option)} is read by {kind}")
        return float(default) if kind == "float" else int(default)
    action = evaluate(arguments["action"]) if "action" in arguments else ""
    flags = {"store_true": False, "store_false": True}
    if action in flags:
        return flags[action]
    raise Computed(argument, f"{option_flag(option)} has no default")


def _option_name(option: ast.Call) -> str:
    """The name by which an option's value is read."""
    for keyword in option.keywords:
        if keyword.arg == "dest" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return option_flag(option).lstrip("-").replace("-", "_")


def option_flag(option: ast.Call) -> str:
    """An option as users write it, such as `--batch-size`."""
    names = [str(arg.value) for arg in option.args if isinstance(arg, ast.Constant)]
    long = [name for name in names if name.startswith("--")] or names
    return long[0] if long else ""
