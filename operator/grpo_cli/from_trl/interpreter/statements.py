"""Follows the statements of a script, the calls of its own functions, and its imports."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..trl_run import Note, ReadModule
from .evaluator import Evaluator
from .heap import Way
from .objects import has_computed_key
from .syntax import called_name, is_run_in_parts, parse
from .values import (
    COMPUTED,
    MISSING,
    Arguments,
    Class,
    Computed,
    External,
    Frame,
    Function,
    Known,
    Object,
    Rest,
    Store,
    Unknown,
    Use,
    Value,
    assume,
    constant,
    make_dict,
    make_list,
    make_object,
    make_value,
    truth,
)

MAX_CALLS = 16
"""Calls of the script's functions inside each other that are followed."""
MAX_UNROLLED = 16
MAX_STATEMENTS = 50_000
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Interpreter(Evaluator):
    """Follows one script; `on_call` gets each call of a library when it is met."""

    def __init__(
        self, module: ast.Module, read_module: ReadModule, on_call: Callable[[Object], None]
    ) -> None:
        super().__init__(on_call)
        self.read_module = read_module
        self.root = Frame(module.body)
        self.root.names["__name__"] = Use(Known(module, "__main__"), module)
        self._functions: list[Function] = []
        """Functions that are defined, in order."""
        self._followed: set[ast.AST] = set()
        """Functions of which a call was followed."""
        self._results: list[Value] = []
        """What the present function may have returned so far."""
        self._num_statements = 0

    def run(self) -> None:
        """Follow the module."""
        self._block(self.root.body, self.root)

    def run_uncalled(self, target: ast.Call) -> None:
        """Follow functions that lead to a call and that the script itself does not call."""
        leading: list[Function] = []
        for _ in range(MAX_CALLS):
            names = {function.name for function in leading}
            leading += [
                function
                for function in self._functions
                if function not in leading and _may_call(function.node, target, names)
            ]
        for function in reversed(leading):
            if function.node not in self._followed:
                self.follow(function, None)

    # Statements

    def _block(self, body: Sequence[ast.stmt], frame: Frame) -> Way:
        for statement in body:
            self._num_statements += 1
            if self._num_statements > MAX_STATEMENTS:
                raise RecursionError
            self.statement = statement
            way = self.follow_statement(statement, frame)
            if way is not None:
                return way
        return None

    def _ways(self, bodies: Sequence[Sequence[ast.stmt]], frame: Frame) -> Way:
        """Follow bodies of which one runs."""

        def way(body: Sequence[ast.stmt]) -> Callable[[], Way]:
            return lambda: self._block(body, frame)

        return self.branches([way(body) for body in bodies])

    def follow_statement(self, statement: ast.stmt, frame: Frame) -> Way:
        """Follow one statement; returns how it leaves its body."""
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                holds = truth(self.evaluate(test, frame))
                if holds is None:
                    return self._ways([body, orelse], frame)
                return self._block(body if holds else orelse, frame)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._follow_loop(statement, frame)
            case ast.Try() | ast.TryStar():
                handlers = [handler.body for handler in statement.handlers]
                way = self._ways([[*statement.body, *statement.orelse], *handlers], frame)
                return self._block(statement.finalbody, frame) or way
            case ast.Match(subject=subject, cases=cases):
                self.evaluate(subject, frame)
                for node in [node for case in cases for node in ast.walk(case.pattern)]:
                    if name := getattr(node, "name", None) or getattr(node, "rest", None):
                        self.assign(ast.Name(name), Use(Unknown(node), node, frame), frame)
                return self._ways([*(case.body for case in cases), []], frame)
        return self._follow_simple(statement, frame)

    def _follow_simple(self, statement: ast.stmt, frame: Frame) -> Way:
        match statement:
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self._open(item, frame)
                if any(called_name(item.context_expr) == "suppress" for item in items):
                    return self._ways([body, []], frame)
                return self._block(body, frame)
            case ast.Return(value=result):
                value = self.evaluate(result, frame) if result else Known(statement, None)
                self._results.append(value)
                return "return"
            case ast.Raise():
                return "stop"
            case ast.Break() | ast.Continue():
                return "loop"
            case ast.Expr(value=value):
                return self.follow_expression(value, frame)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                frame.foreign |= set(names)
            case ast.Assert(test=test):
                self.evaluate(test, frame)
            case _:
                self._bind(statement, frame)
        return None

    def _open(self, item: ast.withitem, frame: Frame) -> None:
        """Follow what `with` opens; an `__enter__` of the script's may change its object."""
        opened = self.use(item.context_expr, frame)
        if isinstance(opened.value, Object) and isinstance(opened.value.maker, Class):
            self.set_any(opened.value.fields, item.context_expr)
        if item.optional_vars is not None:
            self.assign(item.optional_vars, opened, frame)

    def _bind(self, statement: ast.stmt, frame: Frame) -> None:
        """Follow a statement that binds or changes something."""
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                function = self._decorate(self.define(statement, frame), statement, frame)
                self.write(frame.binder(name).names, name, Use(function, statement, frame))
            case ast.ClassDef():
                self._define_class(statement, frame)
            case ast.Import() | ast.ImportFrom():
                for name, value in self._imported(statement).items():
                    self.write(frame.binder(name).names, name, Use(value, statement, frame))
            case ast.Assign(targets=targets, value=value):
                use = self.use(value, frame)
                for target in targets:
                    self.assign(target, use, frame)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.use(value, frame), frame)
            case ast.AugAssign():
                self.augment(statement, frame)
            case ast.Delete(targets=targets):
                for target in targets:
                    self.assign(target, MISSING, frame)

    def _follow_loop(self, loop: ast.For | ast.AsyncFor | ast.While, frame: Frame) -> Way:
        leaves = (ast.Break, ast.Continue, ast.Return, ast.Raise)
        is_whole = not any(isinstance(node, leaves) for node in ast.walk(loop))
        if not isinstance(loop, ast.While):
            items = self.iterate(self.evaluate(loop.iter, frame))
            if items is not None and is_whole and len(items) <= MAX_UNROLLED:
                for item in items:
                    self.statement = loop
                    self.assign(loop.target, item, frame)
                    self._block(loop.body, frame)
                return self._block(loop.orelse, frame)

        def follow_once() -> Way:
            if isinstance(loop, ast.While):
                self.evaluate(loop.test, frame)
            else:
                self.assign(loop.target, Use(Unknown(loop.target), loop.target, frame), frame)
            way = self._block(loop.body, frame)
            return None if way == "loop" else way

        self.repeat(follow_once)
        if any(isinstance(node, ast.Break) for node in ast.walk(loop)):
            return self._ways([loop.orelse, []], frame)
        return self._block(loop.orelse, frame)

    # Functions and classes

    def define(self, node: _Definition, frame: Frame) -> Function:
        """The function that a definition makes, with its defaults as they are there."""
        positional = [*node.args.posonlyargs, *node.args.args]
        with_default = positional[len(positional) - len(node.args.defaults) :]
        pairs = [
            *zip(with_default, node.args.defaults, strict=True),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        defaults = {
            argument.arg: self.use(default, frame) for argument, default in pairs if default
        }
        # A method does not see the names of its class.
        function = Function(
            node, next(outer for outer in frame.around() if not outer.is_class), defaults
        )
        self._functions.append(function)
        return function

    def _decorate(
        self,
        value: Function | Class,
        definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        frame: Frame,
    ) -> Value:
        """What the script's own decorators make of a function or a class; others leave it."""
        marks = [(self.evaluate(mark, frame), mark) for mark in definition.decorator_list]
        made: Value = value
        for mark, node in reversed(marks):
            maker = mark.maker if isinstance(mark, Object) else mark
            if isinstance(maker, Function | Class):
                call = ast.copy_location(ast.Call(node, [], []), node)
                made = self.apply(mark, Arguments([Use(made, definition, frame)]), call)
        if made is value or isinstance(value, Class):
            return made
        return replace(value, wrapper=made)  # a reward is copied as it is written

    def follow(self, function: Function, arguments: Arguments | None) -> Value:
        """What a call of a script's function returns; without arguments, a command line or a
        launcher calls it, and its defaults are assumed."""
        node = function.node
        if len(self.calling) >= MAX_CALLS or any(node is active.node for active in self.calling):
            return Unknown(node)
        assert isinstance(node, _Definition)
        self._followed.add(node)
        frame = Frame([] if isinstance(node, ast.Lambda) else node.body, function.frame)
        statement, results, self._results = self.statement, self._results, []
        self.statement = node
        self._bind_parameters(function, node, arguments, frame)

        def body() -> None:
            if isinstance(node, ast.Lambda):
                self._results.append(self.evaluate(node.body, frame))
            elif self._block(node.body, frame) is None:
                self._results.append(Known(node, None))

        self.calling.append(function)
        if is_run_in_parts(node):
            self._results.append(Unknown(node))
            self.repeat(lambda: self.call(body))
        else:
            self.call(body)
        self.calling.pop()
        returned = self._results
        self.statement, self._results = statement, results
        return returned[-1] if len({id(value) for value in returned}) == 1 else Unknown(node)

    def _bind_parameters(
        self, function: Function, node: _Definition, arguments: Arguments | None, frame: Frame
    ) -> None:
        unknown = Use(Unknown(node), node, frame)
        given = Arguments(named={"**": unknown}) if arguments is None else arguments
        positional = list(given.positional)
        if function.owner is not None:
            positional.insert(0, Use(function.owner, node, frame))
        parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        names = [*parameters, *(argument.arg for argument in node.args.kwonlyargs)]
        values = dict(zip(parameters, positional, strict=False)) | given.named
        is_assumed = arguments is None or bool(getattr(node, "decorator_list", []))
        for name in names:
            use = values.pop(name, None) or self._default(function, name, is_assumed=is_assumed)
            is_open = given.has_unknown and name not in given.named
            self.write(frame.names, name, unknown if is_open or use is None else use)
        if node.args.vararg:
            extra = positional[len(parameters) :]
            extra += [Use(Rest(node), node)] if has_computed_key(given.named) else []
            self.write(frame.names, node.args.vararg.arg, Use(make_list(extra, node), node, frame))
        if node.args.kwarg:
            self.write(frame.names, node.args.kwarg.arg, Use(make_dict(values, node), node, frame))

    def _default(self, function: Function, name: str, *, is_assumed: bool) -> Use | None:
        use = function.defaults.get(name)
        plain = self.plain_default(use) if use else None
        if plain is None or not is_assumed:
            return plain
        advice = "the parameter's default was taken; change the job if you pass another"
        note = Note(function.line, name, ast.unparse(plain.node), advice)
        return replace(plain, value=assume(plain.value, note))

    def _define_class(self, statement: ast.ClassDef, frame: Frame) -> None:
        inner = Frame(statement.body, frame, is_class=True)
        bases = [self.evaluate(base, frame) for base in statement.bases]
        num_functions = len(self._functions)
        self._block(statement.body, inner)
        self.statement = statement
        made = Class(statement, statement, bases, Store("fields", inner.names))
        for function in self._functions[num_functions:]:
            function.home = function.home or made
        if any("dataclass" in ast.unparse(mark) for mark in statement.decorator_list):
            made.defaults = {
                ast.unparse(item.target): made.fields.get(ast.unparse(item.target))
                for item in statement.body
                if isinstance(item, ast.AnnAssign)
                and "ClassVar" not in ast.unparse(item.annotation)
            }
            for name, use in made.defaults.items():
                made.fields.put(name, (self.plain_default(use) if use else None) or MISSING)
        use = Use(self._decorate(made, statement, frame), statement, frame)
        self.write(frame.binder(statement.name).names, statement.name, use)

    # Imports

    def _imported(self, statement: ast.Import | ast.ImportFrom) -> dict[str, Value]:
        """What an import binds: constants of a module beside the script, or names of others."""
        values: dict[str, Value] = {}
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                first = alias.name.partition(".")[0]
                module: Value = External(statement, alias.name if alias.asname else first, True)
                beside = self._constants(alias.name, statement, with_functions=False)
                content = {name: Use(value, statement) for name, value in beside.items() if value}
                if content:
                    module = make_object(module, Arguments(), content, statement)
                values[alias.asname or first] = module
            return values
        prefix = f"{statement.module}." if statement.module else ""
        constants = self._constants(prefix[:-1], statement) if statement.level <= 1 else {}
        names = {alias.name: alias.asname or alias.name for alias in statement.names}
        if "*" in names:
            names = {name: name for name in constants if not name.startswith("_")}
        for name, shown in names.items():
            values[shown] = constants.get(name) or External(statement, f"{prefix}{name}", True)
        return values

    def _constants(
        self, module_name: str, statement: ast.stmt, *, with_functions: bool = True
    ) -> dict[str, Value | None]:
        """What a module beside the script binds, with None for what is computed; unless
        `with_functions`, nothing of one that defines some, which may change the others."""
        try:
            module = parse(self.read_module(module_name) or "")
        except (SyntaxError, ValueError):
            return {}
        if not with_functions and any(isinstance(part, ast.FunctionDef) for part in module.body):
            return {}
        inner = Interpreter(module, lambda _: None, lambda _: None)
        inner.run()
        del inner.root.names["__name__"]
        constants: dict[str, Value | None] = {}
        for name, use in inner.root.names.items():
            try:
                value, assumptions = constant(use.value)
            except Computed:
                assumptions = [Note(0, name, "", COMPUTED)]
            # The environment may replace what assumes a default.
            constants[name] = None if assumptions else make_value(value, statement)
        return constants


def _may_call(node: ast.AST, target: ast.Call, names: set[str]) -> bool:
    """True if a function contains a call, or calls one of these functions by its name."""
    for part in ast.walk(node):
        if part is target:
            return True
        match part:
            case ast.Call(func=ast.Name(id=name)) if name in names:
                return True
    return False
