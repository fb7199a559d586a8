"""Finds out what an expression of a script is, without running it.

Names are followed to what they are bound to: constants, arithmetic of constants, literal dicts,
defaults of argparse and of dataclasses that TrlParser fills. Everything else is `Computed`. A name
that a branch or a loop binds again is computed, too: which binding counts is known only at run
time.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any

from .command_line import (
    PARSING,
    is_override,
    option_default,
    option_flag,
    option_of,
    parsed_classes,
    parsing_call,
    require_command_line,
)
from .constant_folding import FUNCTIONS, apply, operate
from .syntax import (
    Computed,
    Function,
    bound_names,
    called_name,
    changed_containers,
    class_order,
    dataclass_fields,
    dotted_name,
    foreign_containers,
    function_named,
    function_result,
    global_changes,
    is_member,
    is_setting_field,
    last_position,
    own_expressions,
    parameters_of,
    plain_default,
    statements,
)
from .trl_run import Note

DTYPES = ("bfloat16", "float16", "float32")
MAX_CALLS = 8
"""Functions that are followed one after the other."""
_LAUNCHED = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
"""Variables that torchrun and `accelerate launch` set: a script's default is not what counts."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What binds a name."""

    line: int
    end: tuple[int, int]
    """Line and column where the statement ends; a name behind it reads what it binds."""
    value: ast.expr | ast.stmt | None
    """The expression, or the definition or import; None where a loop or a caller binds it."""
    index: int | None = None
    """Position in a tuple that is unpacked."""
    is_conditional: bool = False
    scope: "Scope | None" = None
    """Where the value is to be read; None where the name is bound."""
    is_assumed: bool = False
    """A parameter's default, of a function that the script itself does not call."""


@dataclass(slots=True)
class Scope:
    """Names of a module or a function, and of what is around it."""

    module: ast.Module
    body: Sequence[ast.stmt]
    outer: "Scope | None" = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    assumptions: list[Note] = field(default_factory=list)
    """Defaults that the command line or the environment can replace; one list for all scopes."""
    _evaluating: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for statement, is_conditional in statements(self.body):
            end = last_position(statement)
            for name, value, index in bound_names(statement):
                binding = Binding(statement.lineno, end, value, index, is_conditional)
                self.bindings.setdefault(name, []).append(binding)
        for statement, _ in statements(self.body):
            for name in self._changed_elsewhere(statement):
                self._add_change(name, statement)
        if self.outer is None:
            for node in ast.walk(self.module):
                for name in global_changes(node):
                    self._add_change(name, node)

    def _add_change(self, name: str, node: ast.AST) -> None:
        line = getattr(node, "lineno", 0)
        change = Binding(line, (line, 0), None, is_conditional=True)
        self.bindings.setdefault(name, []).append(change)

    def _changed_elsewhere(self, statement: ast.stmt) -> Iterator[str]:
        """Names whose list or dict a statement changes under another name: `other = cfg` before
        `other["beta"] = 1`, or a function of the script that it gives it to."""
        for changed in changed_containers(statement):
            for binding in self.bindings.get(changed, []):
                if isinstance(binding.value, ast.Name):
                    yield binding.value.id
        for node in own_expressions(statement):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            function = function_named(self.module, node.func.id)
            if function is None:
                continue
            changed_names = foreign_containers(function)
            for parameter, value, _ in parameters_of(function, node):
                if parameter in changed_names and isinstance(value, ast.Name):
                    yield value.id

    def inside(
        self, function: Function, call: ast.Call | None = None, caller: "Scope | None" = None
    ) -> "Scope":
        """The scope of a function of this scope; a call gives its parameters values, which are read
        in the caller's scope."""
        scope = Scope(self.module, function.body, self, assumptions=self.assumptions)
        calls = [call] if call else self._calls(function)
        for name, given, is_default in parameters_of(function, calls[0] if calls else None):
            read_in = None if is_default else caller or self
            value = given if len(calls) <= 1 else None  # each call may give another
            # A decorator, such as click's, may give what no call of the script gives.
            is_assumed = not calls or (is_default and bool(function.decorator_list))
            binding = Binding(
                function.lineno, (function.lineno, 0), value, scope=read_in, is_assumed=is_assumed
            )
            scope.bindings.setdefault(name, []).insert(0, binding)
        return scope

    def rebind(self, name: str, statement: ast.stmt, value: ast.expr | ast.stmt) -> None:
        """Take a value for what an import of this scope binds."""
        others = [made for made in self.bindings.get(name, []) if made.value is not statement]
        binding = Binding(statement.lineno, last_position(statement), value)
        self.bindings[name] = sorted([binding, *others], key=lambda made: made.end)

    def deferred_scope(self) -> "Scope":
        """The scope of a body that runs later, when any of the bindings may count."""
        return Scope(self.module, [], self, assumptions=self.assumptions)

    def _calls(self, function: Function) -> list[ast.Call]:
        """The script's calls of a function by its name, which a method has none of."""
        if not any(made.value is function for made in self.bindings.get(function.name, ())):
            return []
        return [
            node
            for node in ast.walk(self.module)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == function.name
        ]

    def lookup(self, name: ast.Name, *, is_outer: bool = False) -> tuple[Binding, "Scope"] | None:
        """What a name is bound to where it stands, and the scope to read that in.

        Raises:
            Computed: a branch or a loop binds it again.
        """
        bindings = self.bindings.get(name.id)
        if not bindings:
            return self.outer.lookup(name, is_outer=True) if self.outer else None
        if len(bindings) > 1 and any(binding.is_conditional for binding in bindings):
            lines = ", ".join(str(binding.line) for binding in bindings)
            raise Computed(name, f"{name.id} is assigned at lines {lines}, depending on conditions")
        place = name.lineno, name.col_offset
        before = [binding for binding in bindings if binding.end < place]
        if not before and not is_outer:
            raise Computed(name)
        if is_outer and 1 < len(bindings) != len(before):
            # The function may be called below all that the script binds, or between.
            raise Computed(name, f"{name.id} is assigned again at line {bindings[-1].line}")
        binding = (before or bindings)[-1]
        return binding, binding.scope or self

    def first_binding(self, name: ast.Name) -> tuple[Binding, "Scope"] | None:
        """What binds a name first, whatever changes it later."""
        bindings = self.bindings.get(name.id)
        if bindings:
            return bindings[0], bindings[0].scope or self
        return self.outer.first_binding(name) if self.outer else None

    def resolve(self, node: ast.expr) -> tuple[ast.expr | ast.stmt, "Scope", int | None]:
        """Follow names to the expression or statement behind them, its scope, and its position in
        a tuple that is unpacked.

        Raises:
            Computed: a name leads to no expression.
        """
        scope, index = self, None
        visited: set[int] = set()
        current: ast.expr | ast.stmt = node
        while isinstance(current, ast.Name):
            binding_and_scope = scope.lookup(current)
            if binding_and_scope is None:
                break
            binding, scope = binding_and_scope
            if binding.value is None or id(binding.value) in visited:
                raise Computed(node)
            visited.add(id(binding.value))
            if binding.is_assumed and isinstance(current, ast.Name):
                advice = "the parameter's default was taken; change the job if you pass another"
                default = ast.unparse(binding.value)
                self.assumptions.append(Note(binding.line, current.id, default, advice))
            index = binding.index
            current = binding.value
        return current, scope, index

    def follow(self, node: ast.expr) -> tuple[ast.expr | ast.stmt, "Scope", int | None]:
        """As resolve, and on through functions of the script to what they return.

        Raises:
            Computed: a name leads to no expression.
        """
        target, scope, index = self.resolve(node)
        for _ in range(MAX_CALLS):
            if not isinstance(target, ast.Call) or not isinstance(target.func, ast.Name):
                break
            name = target.func.id
            function, result = function_named(self.module, name), function_result(self.module, name)
            if function is None or result is None:
                break
            inner = scope.root.inside(function, target, scope)
            if index is not None and isinstance(result, ast.Tuple) and index < len(result.elts):
                result, index = result.elts[index], None
            if index is not None:
                break
            target, scope, index = inner.resolve(result)
        return target, scope, index

    @property
    def root(self) -> "Scope":
        """The module's scope."""
        return self.outer.root if self.outer else self

    def evaluate(self, node: ast.expr) -> Any:
        """The constant that an expression is.

        Raises:
            Computed: it is not constant.
        """
        if id(node) in self._evaluating:
            raise Computed(node)
        self._evaluating.add(id(node))
        num_assumptions = len(self.assumptions)
        try:
            return self._evaluate(node)
        except (Computed, ArithmeticError, ValueError, TypeError) as error:
            del self.assumptions[num_assumptions:]  # no value was taken
            raise error if isinstance(error, Computed) else Computed(node) from error
        finally:
            self._evaluating.discard(id(node))

    def _evaluate(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._evaluate_name(node)
            case ast.List() | ast.Tuple():
                return [self.evaluate(element) for element in node.elts]
            case ast.Dict():
                return self._evaluate_dict(node)
            case ast.UnaryOp(op=ast.USub()):
                return -self.evaluate(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return not self.evaluate(node.operand)
            case ast.BinOp():
                return operate(node.op, self.evaluate(node.left), self.evaluate(node.right))
            case ast.JoinedStr():
                return "".join(self._evaluate_part(part) for part in node.values)
            case ast.Attribute():
                return self._evaluate_attribute(node)
            case ast.Call():
                return self._evaluate_call(node)
            case ast.Subscript():
                return self._evaluate_item(node)
        raise Computed(node)

    def _evaluate_name(self, node: ast.Name) -> Any:
        target, scope, index = self.resolve(node)
        if index is not None and isinstance(target, ast.Tuple | ast.List):
            return scope.evaluate(target.elts[index])
        if index is not None or not isinstance(target, ast.expr) or isinstance(target, ast.Name):
            raise Computed(node)
        return scope.evaluate(target)

    def _evaluate_dict(self, node: ast.Dict) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                result |= self._mapping(value)
            else:
                result[self.evaluate(key)] = self.evaluate(value)
        return result

    def _mapping(self, node: ast.expr) -> dict[Any, Any]:
        value = self.evaluate(node)
        if not isinstance(value, dict):
            raise Computed(node)
        return value

    def _evaluate_part(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            if part.format_spec is not None or part.conversion != -1:
                raise Computed(part)
            return str(self.evaluate(part.value))
        return str(self.evaluate(part))

    def _evaluate_item(self, node: ast.Subscript) -> Any:
        container, key = self.evaluate(node.value), self.evaluate(node.slice)
        if isinstance(container, dict | list):
            try:
                return container[key]
            except LookupError as error:
                raise Computed(node) from error
        raise Computed(node)

    def _evaluate_attribute(self, node: ast.Attribute) -> Any:
        if dotted_name(node) in {f"torch.{dtype}" for dtype in DTYPES}:
            return node.attr
        target, scope, index = self.resolve(node.value)
        if node.attr == "value" and isinstance(target, ast.Attribute) and is_member(scope, target):
            return scope.evaluate(target)
        match target:
            case ast.Subscript(value=ast.Call() as parsing, slice=ast.Constant(value=int(item))):
                if called_name(parsing) in PARSING:
                    target, index = parsing, item
        call = target if isinstance(target, ast.Call) else None
        made = scope.resolve(call.func) if call else (target, scope, index)
        if index is None and isinstance(made[0], ast.ClassDef):
            return made[1]._class_field(made[0], node, scope, call)
        if call:
            return scope.parsed_argument(call, index, node)
        raise Computed(node)

    def _class_field(
        self, definition: ast.ClassDef, node: ast.Attribute, caller: "Scope", call: ast.Call | None
    ) -> Any:
        """The constant that a class of this scope, or an object that a call makes of it, has as a
        field.

        Raises:
            Computed: something else may set the field, or its value is not constant.
        """
        for other in ast.walk(self.module):
            if is_setting_field(other, node.attr):
                raise Computed(node, f"line {getattr(other, 'lineno', 0)} sets it")
        keywords = {word.arg: word.value for word in call.keywords} if call else {}
        if None in keywords or (call and call.args):
            raise Computed(node)
        if node.attr in keywords:
            return caller.evaluate(keywords[node.attr])
        return self._default_of(definition, node)[0]

    def _default_of(self, definition: ast.ClassDef, node: ast.Attribute) -> tuple[Any, int]:
        """The constant that a field has in a class of this scope, or in a base of it, and its line.

        Raises:
            Computed: none of them has it, or not as a constant.
        """
        made_by: list[tuple[Scope, list[Binding], bool]] = []
        for base, scope in class_order(self, definition):
            if isinstance(base, str):
                if base.endswith("Settings"):  # pydantic's
                    raise Computed(node, f"{base} reads variables of the environment, too")
                continue
            inner = Scope(
                self.module,
                base.body,
                scope,
                assumptions=self.assumptions,
                _evaluating=self._evaluating,
            )
            if bindings := inner.bindings.get(node.attr):
                made_by.append((inner, bindings, node.attr in dataclass_fields(base)))
        # Objects get their fields of __init__, before which a value of the class does not count.
        if len({is_field for _, _, is_field in made_by}) != 1:
            raise Computed(node)
        inner, bindings, _ = made_by[0]
        value = bindings[0].value if len(bindings) == 1 else None
        default = plain_default(value) if isinstance(value, ast.expr) else None
        if default is None:
            raise Computed(node)
        return inner.evaluate(default), bindings[0].line

    def _evaluate_call(self, node: ast.Call) -> Any:
        name = called_name(node)
        if name == "dict" and not node.args:
            return self._evaluate_dict_call(node)
        if name == "asdict":
            return self._object_fields(node)
        if name == "dedent" and len(node.args) == 1:
            return dedent(self._text(node.args[0]))
        if name in FUNCTIONS and isinstance(node.func, ast.Name):
            return self._evaluate_function(node, node.func)
        if name == "strip" and isinstance(node.func, ast.Attribute) and not node.args:
            return self._text(node.func.value).strip()
        is_environment = name == "getenv" or dotted_name(node.func).endswith("environ.get")
        if is_environment and len(node.args) == 2:
            value = self.evaluate(node.args[1])
            variable = str(self.evaluate(node.args[0]))
            if variable in _LAUNCHED:
                raise Computed(node, f"what launches the script sets {variable}")
            advice = "the script's default of this variable was taken"
            self._assume(node.lineno, variable, value, advice)
            return value
        raise Computed(node)

    def _object_fields(self, call: ast.Call) -> dict[str, Any]:
        """What dataclasses.asdict returns; without a dict_factory, which may leave fields out."""
        if len(call.args) != 1 or call.keywords or function_named(self.module, "asdict"):
            raise Computed(call)
        node = call.args[0]
        target, scope, _ = self.resolve(node)
        made = scope.resolve(target.func) if isinstance(target, ast.Call) else (target, scope, None)
        definition, defined_in, _ = made
        if not isinstance(definition, ast.ClassDef):
            raise Computed(node)
        fields: dict[str, Any] = {}
        for base, _ in reversed(class_order(defined_in, definition)):
            for name in dataclass_fields(base):
                fields[name] = self.evaluate(ast.copy_location(ast.Attribute(node, name), node))
        return fields

    def _evaluate_dict_call(self, node: ast.Call) -> dict[Any, Any]:
        entries: dict[Any, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                entries |= self._mapping(keyword.value)
            else:
                entries[keyword.arg] = self.evaluate(keyword.value)
        return entries

    def _evaluate_function(self, node: ast.Call, function: ast.Name) -> Any:
        """What one of FUNCTIONS returns, unless the script has its own of this name."""
        if node.keywords or self.lookup(function):
            raise Computed(node)
        return apply(function.id, [self.evaluate(argument) for argument in node.args])

    def _text(self, node: ast.expr) -> str:
        value = self.evaluate(node)
        if not isinstance(value, str):
            raise Computed(node)
        return value

    def parsed_argument(self, call: ast.Call, index: int | None, node: ast.Attribute) -> Any:
        """The default of an argument that a parser of the command line fills.

        Raises:
            Computed: the call parses no arguments, or this one has no default.
        """
        for other in ast.walk(self.module):
            if is_override(other, node):
                raise Computed(node, f"line {getattr(other, 'lineno', 0)} sets it, too")
        classes = parsed_classes(self, call)
        if classes is not None:
            return self._field_default(classes, index, node)
        parsing = parsing_call(self.module, call)
        if parsing is None:
            raise Computed(node)
        require_command_line(self, parsing)
        option = option_of(self.module, node)
        value = option_default(option, node, self.evaluate)
        advice = "the option's default was taken; change the job if you pass another value"
        self._assume(option.lineno, option_flag(option), value, advice)
        return value

    def _field_default(
        self, classes: list[ast.expr], index: int | None, node: ast.Attribute
    ) -> Any:
        if index is None or index >= len(classes):
            raise Computed(node)
        definition, scope, _ = self.resolve(classes[index])
        if not isinstance(definition, ast.ClassDef):
            raise Computed(node)
        for base, _ in class_order(scope, definition):
            for other in ast.walk(base) if isinstance(base, ast.ClassDef) else ():
                if is_setting_field(other, node.attr):
                    raise Computed(node, f"line {getattr(other, 'lineno', 0)} sets it, too")
        value, line = scope._default_of(definition, node)
        advice = "the default was taken; change the job if you pass another value"
        self._assume(line, f"--{node.attr}", value, advice)
        return value

    def _assume(self, line: int, name: str, value: object, advice: str) -> None:
        note = Note(line, name, repr(value), advice)
        if note not in self.assumptions:
            self.assumptions.append(note)
