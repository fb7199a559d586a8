"""Facts of Python's syntax tree: which names a statement binds, what is called, what a class
defines."""

import ast
import re
import symtable
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
MUTATORS = frozenset({
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "set_transform",
    "setdefault", "sort", "update",
})  # fmt: skip
"""Methods by which a list, a dict or a dataset becomes another value than the one that is bound."""
_CHANGING_METHOD = re.compile(
    r"(add|bfloat16|double|eval|fit|float|half|load|register|requires_grad|set|to|update)(_\w*)?|cuda"
)
"""Methods that change their object, such as set_optimizer of transformers' arguments."""


_COMPUTED = "it is computed when the script runs"


class Computed(Exception):
    """The expression is known only when the script runs."""

    def __init__(self, node: ast.AST, why: str = _COMPUTED) -> None:
        super().__init__(why)
        self.line: int = getattr(node, "lineno", 0)


def statements(
    body: Sequence[ast.stmt], *, is_conditional: bool = False
) -> Iterator[tuple[ast.stmt, bool]]:
    """Each statement that runs with a body, and whether a condition or a loop decides on it.
    `if __name__ == "__main__"` does not count."""
    for statement in body:
        yield statement, is_conditional
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, [])
            is_guarded = name == "body" and is_main_guard(statement)
            plain = isinstance(statement, ast.With) or is_guarded
            yield from statements(inner, is_conditional=is_conditional or not plain)
        for branch in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from statements(branch.body, is_conditional=True)


def is_main_guard(statement: ast.stmt) -> bool:
    """True for `if __name__ == "__main__":`."""
    match statement:
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()])):
            return True
    return False


def dotted_name(node: ast.expr) -> str:
    """`a.b.c` of an expression of names; empty for others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def parse(text: str) -> ast.Module:
    """The syntax tree of a script.

    Raises:
        SyntaxError, ValueError: it is no Python.
        RecursionError, MemoryError: its expressions are nested too deeply.
    """
    with warnings.catch_warnings():
        # Of strings such as "\d", which are the script's affair.
        warnings.simplefilter("ignore")
        return ast.parse(text)


def is_trl_import(node: ast.AST) -> bool:
    """True for a statement that imports TRL, or a part of it."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    return any(module.partition(".")[0] == "trl" for module in modules)


def called_name(call: ast.Call) -> str:
    """Last name of what is called: `from_pretrained` of `AutoModel.from_pretrained(…)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def function_named(module: ast.Module, name: str) -> Function | None:
    """The script's own function of a name; None if it defines several."""
    functions = [
        statement
        for statement in module.body
        if isinstance(statement, ast.FunctionDef) and statement.name == name
    ]
    return functions[0] if len(functions) == 1 else None


def function_result(module: ast.Module, name: str) -> ast.expr | None:
    """What the only `return` of a script's function returns."""
    function = function_named(module, name)
    if function is None:
        return None
    returns = [node for node, _ in statements(function.body) if isinstance(node, ast.Return)]
    return returns[0].value if len(returns) == 1 else None


def global_names(node: ast.stmt | ast.expr) -> list[str]:
    """Names that a statement or an expression takes from what is around it."""
    pending = [symtable.symtable(ast.unparse(node), "script", "exec")]
    names: dict[str, None] = {}
    while pending:
        table = pending.pop()
        pending += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table.get_type() == "module":
                names[symbol.get_name()] = None
    return list(names)


def last_position(statement: ast.stmt) -> tuple[int, int]:
    """Line and column of a simple statement's end; of the begin of what contains others."""
    if hasattr(statement, "body"):
        return statement.lineno, statement.col_offset
    return statement.end_lineno or 0, statement.end_col_offset or 0


Bound = tuple[str, ast.expr | ast.stmt | None, int | None]
"""A name, its value (None where that is computed), and its position in a tuple."""


def bound_names(statement: ast.stmt) -> Iterator[Bound]:
    """What a statement binds, or changes."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name, statement, None
        case ast.Import() | ast.ImportFrom():
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0], statement, None
        case ast.For() | ast.AsyncFor():
            yield from _targets(statement.target, None)
        case ast.With() | ast.AsyncWith():
            for item in statement.items:
                yield from _targets(item.optional_vars, None)
        case _:
            yield from _assigned_names(statement)


def _assigned_names(statement: ast.stmt) -> Iterator[Bound]:
    match statement:
        case ast.Assign():
            for target in statement.targets:
                yield from _targets(target, statement.value)
        case ast.AnnAssign(target=ast.Name(id=name)) if statement.value is not None:
            yield name, statement.value, None
        case ast.AugAssign(target=target):
            yield from _targets(target, None)
        case ast.Delete(targets=targets):
            for target in targets:
                yield from _targets(target, None)
    for node in own_expressions(statement):
        match node:
            case ast.NamedExpr(target=ast.Name(id=name)):
                yield name, None, None
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in MUTATORS:
                yield from _changed_entry(owner)


def changed_containers(statement: ast.stmt) -> set[str]:
    """Names of the lists and dicts of which a statement changes an entry."""
    names: set[str] = set()
    for node in own_expressions(statement):
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                names |= {name for name, _, _ in _changed_entry(node)}
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in MUTATORS:
                names |= {name for name, _, _ in _changed_entry(owner)}
    return names


def foreign_containers(function: Function) -> set[str]:
    """Names of the lists and dicts that a function changes without making them."""
    own = {name for name, value, _ in _bound_in(function) if value is not None}
    own -= {name for name, _, _ in parameters_of(function, None)}
    changed = (changed_containers(statement) for statement, _ in statements(function.body))
    return set().union(*changed) - own


def global_changes(node: ast.AST) -> set[str]:
    """Names of the module that a function binds or changes, whenever it is called."""
    if isinstance(node, ast.Global):
        return set(node.names)
    if isinstance(node, ast.FunctionDef):
        return foreign_containers(node) - {name for name, _, _ in parameters_of(node, None)}
    return set()


def _bound_in(function: Function) -> Iterator[Bound]:
    for statement, _ in statements(function.body):
        yield from bound_names(statement)


def added_list(statement: ast.stmt, list_name: str) -> ast.expr | None:
    """The list that a statement adds to another: by `append`, `extend` or `+=`, or by adding it to
    itself; None for other statements."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append"), args=[item])):
            return ast.List([item])
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="extend"), args=[added])):
            return added
        case ast.AugAssign(op=ast.Add(), target=ast.Name(), value=added):
            return added
        case ast.Assign(targets=[ast.Name()], value=value):
            added_lists: list[ast.expr] = []
            while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                added_lists.insert(0, ast.Starred(value.right))
                value = value.left
            if isinstance(value, ast.Name) and value.id == list_name:
                return ast.List(added_lists)
    return None


def _changed_entry(owner: ast.expr) -> Iterator[Bound]:
    """The name of a container of which an entry changes, however deep."""
    while isinstance(owner, ast.Subscript):
        owner = owner.value
    if isinstance(owner, ast.Name):
        yield owner.id, None, None


def own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Expressions of a statement, without those of the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.keyword | ast.withitem):
            yield from ast.walk(child)


def _targets(target: ast.expr | None, value: ast.expr | None) -> Iterator[Bound]:
    if isinstance(target, ast.Name):
        yield target.id, value, None
    elif isinstance(target, ast.Subscript):
        yield from _changed_entry(target)
    elif isinstance(target, ast.Tuple | ast.List):
        # Behind `*rest` nobody knows the positions.
        is_plain = all(isinstance(element, ast.Name) for element in target.elts)
        for index, element in enumerate(target.elts):
            inner = element.value if isinstance(element, ast.Starred) else element
            if isinstance(inner, ast.Name):
                yield inner.id, value if is_plain else None, index


def changed_attributes(statement: ast.stmt) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Attributes that a statement sets, with their values; None for one that is computed."""
    yield from _assigned_attributes(statement)
    for node in own_expressions(statement):
        for attribute in _filled_attributes(node):
            yield attribute, None
        for attribute, given in _fields_by_name(node):
            # As a part of another expression, a call may run never or often.
            value = given if isinstance(statement, ast.Expr) and statement.value is node else None
            if isinstance(statement, ast.Assign) and node in statement.targets:
                value = statement.value
            yield attribute, value if attribute.attr.isidentifier() else None


def changed_objects(statement: ast.stmt) -> set[str]:
    """Names of the objects, classes and modules of which a statement sets a field."""
    paths = (dotted_name(attribute) for attribute, _ in changed_attributes(statement))
    return {path.partition(".")[0] for path in paths if path}


def _assigned_attributes(
    statement: ast.stmt,
) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        yield node, value if node is target else None
        case ast.AnnAssign(target=ast.Attribute() as attribute, value=value):
            yield attribute, value
        case ast.AugAssign(target=ast.Attribute() as attribute):
            yield attribute, None
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method, value=owner) as attribute)):
            # Variables of the environment may be secrets, and have notes of their own.
            is_environment = dotted_name(owner).endswith("environ")
            if _CHANGING_METHOD.fullmatch(method) and not is_environment:
                yield attribute, None


def _filled_attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes whose list or dict gets another entry, or loses one."""
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=container):
            pass
        case ast.Call(func=ast.Attribute(value=container, attr=method)) if method in MUTATORS:
            pass
        case _:
            return
    while isinstance(container, ast.Subscript):
        container = container.value
    # The environment's variables are secrets, and notes of their own.
    if isinstance(container, ast.Attribute) and container.attr not in ("__dict__", "environ"):
        yield container


def _fields_by_name(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Fields that `setattr`, or a change of `vars(…)` or `__dict__`, sets or removes."""
    match node:
        case ast.Call(args=[owner, field, given]) if called_name(node).strip("_") == "setattr":
            yield _attribute(owner, field), given
        case ast.Call(func=ast.Attribute(attr="update", value=fields)):
            owner_of_fields = fields_owner(fields)
            if owner_of_fields is None:
                return
            for mapping in (*node.args, *(word.value for word in node.keywords if not word.arg)):
                entries = literal_entries(mapping)
                if entries is None:
                    yield _attribute(owner_of_fields, mapping), None
                for name, value in (entries or {}).items():
                    yield ast.Attribute(owner_of_fields, name), value
            for keyword in node.keywords:
                if keyword.arg:
                    yield ast.Attribute(owner_of_fields, keyword.arg), keyword.value
        case (
            ast.Subscript(ctx=ast.Store() | ast.Del(), value=fields, slice=field)
            | ast.Call(
                func=ast.Attribute(attr="pop" | "setdefault", value=fields), args=[field, *_]
            )
        ):
            owner_of_fields = fields_owner(fields)
            if owner_of_fields is not None:
                yield _attribute(owner_of_fields, field), None


def _attribute(owner: ast.expr, field: ast.expr) -> ast.Attribute:
    """The attribute that an expression names; `<the expression>` where that is not constant."""
    name = str(field.value) if isinstance(field, ast.Constant) else f"<{ast.unparse(field)}>"
    return ast.Attribute(owner, name)


def fields_owner(fields: ast.expr) -> ast.expr | None:
    """The object whose fields are in `vars(object)` or `object.__dict__`; None for others."""
    match fields:
        case ast.Call(func=ast.Name(id="vars"), args=[owner]):
            return owner
        case ast.Attribute(attr="__dict__", value=owner):
            return owner
    return None


def parameters_of(
    function: Function, call: ast.Call | None
) -> Iterator[tuple[str, ast.expr | None, bool]]:
    """Parameters with what a call gives them, or with their defaults (then True)."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    num_required = len(arguments) - len(function.args.defaults)
    defaults: list[ast.expr | None] = [None] * num_required
    defaults += function.args.defaults
    named = [*arguments, *function.args.kwonlyargs]
    defaults += function.args.kw_defaults
    values: dict[str, tuple[ast.expr | None, bool]] = {
        argument.arg: (plain_default(default) if default else None, True)
        for argument, default in zip(named, defaults, strict=True)
    }
    if call is not None:
        if any(isinstance(argument, ast.Starred) for argument in call.args) or any(
            keyword.arg is None for keyword in call.keywords
        ):
            values = dict.fromkeys(values, (None, True))  # what it unpacks may replace any
        for argument, call_argument in zip(arguments, call.args, strict=False):
            values[argument.arg] = (call_argument, False)
        for keyword in call.keywords:
            if keyword.arg in values:
                values[keyword.arg] = (keyword.value, False)
    for name, (value, is_default) in values.items():
        yield name, value, is_default


def literal_entries(node: ast.AST) -> dict[str, ast.expr] | None:
    """Expressions of a dict that is written out, by their keys; None for anything else."""
    match node:
        case ast.Dict(keys=keys, values=values):
            pairs = list(zip(keys, values, strict=True))
            names = {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            return names if len(names) == len(pairs) else None
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            entries = {keyword.arg: keyword.value for keyword in keywords if keyword.arg}
            return entries if len(entries) == len(keywords) else None
    return None


def field_default(statement: ast.stmt, name: str) -> ast.expr | None:
    """The default of a dataclass's field, `field(default=…)` included."""
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        return None
    value = statement.value
    if statement.target.id != name or value is None:
        return None
    return plain_default(value)


class Names(Protocol):
    """Names of a scope."""

    def resolve(self, node: ast.expr) -> tuple[ast.expr | ast.stmt, Any, int | None]:
        """Follow names to what is behind them, and the scope to read that in."""


S = TypeVar("S", bound=Names)


def class_order(scope: S, definition: ast.ClassDef) -> list[tuple[ast.ClassDef | str, S]]:
    """A class of this scope and its bases in the order in which Python looks for a field, with
    the scopes that define them; a class that the script does not define by its name."""
    order: list[tuple[ast.ClassDef | str, S]] = [(definition, scope)]
    for base in definition.bases:
        try:
            target, defined_in, _ = scope.resolve(base)
        except Computed:
            target, defined_in = base, scope
        if isinstance(target, ast.ClassDef):
            order += class_order(defined_in, target)
        else:
            order.append((dotted_name(base).rpartition(".")[2], scope))
    # What several classes derive from comes behind all of them.
    last = {base: position for position, (base, _) in enumerate(order)}
    return [order[position] for position in sorted(last.values())]


def is_member(scope: Names, node: ast.Attribute) -> bool:
    """True for a member of an Enum of the script.

    Raises:
        Computed: a branch decides on its class.
    """
    definition, defined_in, _ = scope.resolve(node.value)
    if not isinstance(definition, ast.ClassDef):
        return False
    bases = [base for base, _ in class_order(defined_in, definition)]
    return any(isinstance(base, str) and base.endswith("Enum") for base in bases)


def is_dataclass(definition: ast.ClassDef) -> bool:
    """True for a class that a decorator makes a dataclass."""
    return any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list)


def dataclass_fields(definition: ast.ClassDef | str) -> list[str]:
    """Fields that the objects of a dataclass get by its own lines."""
    if isinstance(definition, str) or not is_dataclass(definition):
        return []
    return [
        ast.unparse(item.target)
        for item in definition.body
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
    ]


def plain_default(value: ast.expr) -> ast.expr | None:
    """The expression of a default, out of `field(default=…)` and typer's `Option(…)`; None where
    a function makes it, or the user must give it."""
    if not isinstance(value, ast.Call) or called_name(value) not in ("field", "Argument", "Option"):
        return value
    defaults = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
    if called_name(value) != "field":
        defaults += value.args[:1]
    is_given = bool(defaults) and ast.unparse(defaults[0]) != "..."
    return defaults[0] if is_given else None


def is_setting_field(node: ast.AST, name: str) -> bool:
    """True for what sets or deletes a field of this name, or of a computed one, of any object."""
    if isinstance(node, ast.Attribute):
        return node.attr == name and not isinstance(node.ctx, ast.Load)
    return has_field(set_fields(node), name)


def set_fields(node: ast.AST) -> list[ast.Attribute]:
    """Fields that an expression sets by their names, or whose list or dict it changes."""
    return [*(field for field, _ in _fields_by_name(node)), *_filled_attributes(node)]


def has_field(fields: Sequence[ast.Attribute], name: str) -> bool:
    """True if one of the fields has the name, or a computed one."""
    return any(field.attr == name or not field.attr.isidentifier() for field in fields)
