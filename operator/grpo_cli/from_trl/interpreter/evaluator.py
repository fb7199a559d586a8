"""What the expressions of a script are, and what its assignments change."""

import ast
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from .constant_folding import TEXT_METHODS, call_text_method, operate
from .functions import (
    FUNCTIONS,
    LIBRARY_FUNCTIONS,
    SPECIAL_METHODS,
    call_method,
    call_special_method,
    find_parser,
    parse_options,
)
from .heap import Way
from .objects import POSITIONAL_FIELDS, Objects, computed_key, merge_cells, unpack
from .values import (
    MISSING,
    Arguments,
    Class,
    Entries,
    External,
    Frame,
    Function,
    Items,
    Known,
    Object,
    Part,
    Rest,
    Row,
    Unknown,
    Use,
    Value,
    key_of,
    make_dict,
    make_list,
    make_object,
    truth,
)

CHANGING = re.compile(
    r"(add|append|bfloat16|clear|cuda|double|eval|extend|fit|float|half|insert|load|pop|register"
    r"|remove|requires_grad|set|setdefault|to|update)(_\w*)?"
)
"""Methods that change their object, such as set_optimizer of transformers' arguments."""
_EXITS = ("exit", "quit", "sys.exit", "os._exit")
_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


class Evaluator(Objects):
    """Expressions and assignments of one script."""

    @abstractmethod
    def define(self, node: ast.Lambda, frame: Frame) -> Function:
        """The function that a definition makes."""

    @abstractmethod
    def follow_statement(self, statement: ast.stmt, frame: Frame) -> Way:
        """Follow one statement; returns how it leaves its body."""

    def use(self, node: ast.expr, frame: Frame) -> Use:
        """An expression with its value."""
        return Use(self.evaluate(node, frame), node, frame)

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """What an expression is."""
        match node:
            case ast.Constant(value=value):
                return Known(node, value)
            case ast.Name(id=name):
                owner = frame.owner(name)
                return owner.names[name].value if owner else External(node, name)
            case ast.List() | ast.Tuple():
                return self._list(node, frame)
            case ast.Dict():
                return self._dict(node, frame)
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.evaluate(owner, frame), name, node)
            case ast.Subscript(value=owner, slice=key):
                return self.item(self.evaluate(owner, frame), self.use(key, frame), node)
            case ast.Call(func=function):
                callee = self.evaluate(function, frame)
                if isinstance(function, ast.Attribute) and CHANGING.fullmatch(function.attr):
                    self._mark_change(function.value, frame)
                return self.apply(callee, self._arguments(node, frame), node)
            case ast.Lambda():
                return self.define(node, frame)
            case ast.NamedExpr(target=target, value=value):
                use = self.use(value, frame)
                self.assign(target, use, frame)
                return use.value
            case ast.IfExp() | ast.BoolOp():
                return self._evaluate_choice(node, frame)
        return self._evaluate_operation(node, frame)

    def _evaluate_choice(self, node: ast.IfExp | ast.BoolOp, frame: Frame) -> Value:
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                holds = truth(self.evaluate(test, frame))
                if holds is not None:
                    return self.evaluate(body if holds else orelse, frame)
                self.branches([partial(self._evaluate_all, [way], frame) for way in (body, orelse)])
            case ast.BoolOp(op=kind, values=[first, *rest]):
                value = self.evaluate(first, frame)
                other = rest[0] if len(rest) == 1 else ast.BoolOp(kind, rest)
                holds = truth(value)
                if holds is not None:
                    is_over = holds is isinstance(kind, ast.Or)
                    return value if is_over else self.evaluate(other, frame)
                self.branches([partial(self._evaluate_all, [other], frame), lambda: None])
        return Unknown(node)

    def _evaluate_operation(self, node: ast.expr, frame: Frame) -> Value:
        match node:
            case ast.UnaryOp(op=kind, operand=operand):
                return self._operate(kind, [self.evaluate(operand, frame)], node)
            case (
                ast.BinOp(op=kind, left=left, right=right)
                | ast.Compare(ops=[kind], left=left, comparators=[right])
            ):
                values = [self.evaluate(left, frame), self.evaluate(right, frame)]
                return self._operate(kind, values, node)
            case ast.JoinedStr(values=parts):
                return self._format(parts, frame, node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehend(node, frame)
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        self._evaluate_all(parts, frame)
        return Unknown(node)

    def _evaluate_all(self, nodes: Sequence[ast.expr], frame: Frame) -> None:
        for node in nodes:
            self.evaluate(node, frame)

    def _operate(self, kind: ast.AST, values: list[Value], node: ast.AST) -> Value:
        holds = truth(values[0])
        match kind, *values:
            case ast.Not(), _ if holds is not None:
                return Known(node, not holds)
            case ast.Add(), Items() as first, Items() as second:
                return make_list([*first.uses, *second.uses], node)
            case ast.Mult(), Items() as first, Known(value=int(number), assumptions=()) if (
                0 <= number <= 99
            ):
                return make_list(first.uses * number, node)
            case ast.BitOr(), Entries() as first, Entries() as second if not isinstance(first, Row):
                return make_dict(merge_cells(first.cells, second.cells), node)
            case ast.Is() | ast.IsNot(), first, Known(value=None):
                if isinstance(first, Items | Entries | Function | Class):
                    return Known(node, isinstance(kind, ast.IsNot))
            case ast.Is() | ast.IsNot(), *_:
                return Unknown(node)
        return self.fold(partial(operate, kind), values, node)

    def _format(self, parts: list[ast.expr], frame: Frame, node: ast.AST) -> Value:
        values: list[Value] = []
        for part in parts:
            plain = part
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    return Unknown(node)
                plain = part.value
            values.append(self.evaluate(plain, frame))
        return self.fold(lambda *texts: "".join(map(str, texts)), values, node)

    def _list(self, node: ast.List | ast.Tuple, frame: Frame) -> Items:
        uses: list[Use] = []
        for element in node.elts:
            if not isinstance(element, ast.Starred):
                uses.append(self.use(element, frame))
                continue
            items = self.iterate(self.evaluate(element.value, frame))
            uses += [Use(Rest(element), element, frame)] if items is None else items
        return make_list(uses, node)

    def _dict(self, node: ast.Dict, frame: Frame) -> Entries:
        cells: dict[object, Use] = {}
        for key_node, value in zip(node.keys, node.values, strict=True):
            use = self.use(value, frame)
            if key_node is None:
                cells = merge_cells(cells, unpack(use))
                continue
            key = key_of(self.evaluate(key_node, frame))
            cells = merge_cells(cells, {computed_key(key_node) if key is MISSING else key: use})
        return make_dict(cells, node)

    def _comprehend(self, node: _Comprehension, frame: Frame) -> Value:
        """What the loop makes that a comprehension stands for; unknown where that is not all known,
        and of a generator or a set."""
        items = self.use(node.generators[0].iter, frame)
        made = make_dict({}, node) if isinstance(node, ast.DictComp) else make_list([], node)
        # Of its own it has what `for` binds alone.
        named = [part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)]
        inner = Frame([], frame, foreign=set(named))
        inner.names |= {"<items>": items, "<made>": Use(made, node)}
        step: ast.stmt
        if isinstance(node, ast.DictComp):
            step = ast.Assign([ast.Subscript(ast.Name("<made>"), node.key)], node.value)
        else:
            append = ast.Attribute(ast.Name("<made>"), "append")
            step = ast.Expr(ast.Call(append, [node.elt], []))
        for generator in reversed(node.generators):
            for test in reversed(generator.ifs):
                step = ast.If(test, [step], [])
            is_first = generator is node.generators[0]
            source = ast.Name("<items>") if is_first else generator.iter
            step = ast.For(generator.target, source, [step], [])
        statement = self.statement
        self.follow_statement(ast.fix_missing_locations(ast.copy_location(step, node)), inner)
        self.statement = statement
        is_known = None not in (self.iterate(items.value), self.iterate(made))
        is_list = isinstance(node, ast.ListComp | ast.DictComp)
        return made if is_known and is_list else Unknown(node)

    # Calls

    def _arguments(self, node: ast.Call, frame: Frame) -> Arguments:
        arguments = Arguments()
        for argument in node.args:
            if not isinstance(argument, ast.Starred):
                arguments.positional.append(self.use(argument, frame))
                continue
            items = self.iterate(self.evaluate(argument.value, frame))
            arguments.positional += items or []
            if items is None:
                use = Use(Unknown(argument), argument, frame)
                arguments.named[ast.unparse(argument)] = use
        for keyword in node.keywords:
            use = self.use(keyword.value, frame)
            arguments.named |= {keyword.arg: use} if keyword.arg else unpack(use)
        arguments.has_unknown |= not all(str(name).isidentifier() for name in arguments.named)
        return arguments

    def apply(self, callee: Value, arguments: Arguments, node: ast.Call) -> Value:
        """What a call returns."""
        value = self._apply_own(callee, arguments, node)
        match callee:
            case Object(name="partial", arguments=Arguments(positional=[function, *given])):
                named = callee.arguments.named | arguments.named
                joined = Arguments([*given, *arguments.positional], named, arguments.has_unknown)
                return self.apply(function.value, joined, node)
            case Part(name=name) | External(name=name) if name in SPECIAL_METHODS:
                value = call_special_method(self, callee, arguments, node)
            case Part(owner=Known(value=str()) as text, name=name) if name in TEXT_METHODS:
                values = [text, *arguments.values]
                return self.fold(partial(call_text_method, name), values, node)
            case Part():
                value = call_method(self, callee, arguments, node)
            case External():
                name = callee.name if callee.name in LIBRARY_FUNCTIONS else callee.path
                if name in FUNCTIONS:
                    value = FUNCTIONS[name](self, arguments, node)
        if value is not None:
            return value
        if parser := find_parser(callee):
            return parse_options(self, parser, arguments, node)
        positions = POSITIONAL_FIELDS.get(getattr(callee, "name", ""))
        fields = arguments.by_name(positions) if positions else arguments.named
        return self.record(make_object(callee, arguments, fields, node))

    def _apply_own(self, callee: Value, arguments: Arguments, node: ast.Call) -> Value | None:
        """What a call of a function, a class or an object of the script returns."""
        match callee:
            case Function(wrapper=Value() as wrapper, owner=owner):
                first = [Use(owner, node)] if owner else []
                given = replace(arguments, positional=[*first, *arguments.positional])
                return self.apply(wrapper, given, node)
            case Function():
                return self.follow(callee, arguments)
            case Class():
                return self.instantiate(callee, arguments, node)
            case Object(maker=Class()):
                method = self.attribute(callee, "__call__", node)
                return self._apply_own(method, arguments, node)
        return None

    def follow_expression(self, node: ast.expr, frame: Frame) -> Way:
        """Follow an expression that stands for itself."""
        num_changes = len(self.changes)
        value = self.evaluate(node, frame)
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if isinstance(
                value, Object
            ) and CHANGING.fullmatch(name):
                owner = value.method[0] if value.method else value.maker
                if isinstance(owner, Object):
                    owner.fields.add_writer("", node)
                if len(self.changes) == num_changes:
                    self.note_change(owner, name, node)
        return "stop" if isinstance(value, Object) and value.path in _EXITS else None

    def _mark_change(self, node: ast.expr, frame: Frame) -> None:
        """Remember the present statement beside all names of what it changes through one of them;
        of what the run computes nothing else knows that it changes."""
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        owner = frame.owner(node.id) if isinstance(node, ast.Name) else None
        changed = owner.names[node.id].value if owner and isinstance(node, ast.Name) else None
        for outer in frame.around():
            for name, use in outer.names.items():
                if use.value is changed and not isinstance(changed, External):
                    outer.names.add_writer(name, self.statement)

    # Assignments

    def assign(self, target: ast.expr, use: object, frame: Frame) -> None:
        """Assign a value to a name, an attribute, an item, or several of them; MISSING deletes
        it."""
        match target:
            case ast.Name(id=name):
                self.write(frame.binder(name).names, name, use)
            case ast.Tuple(elts=targets) | ast.List(elts=targets) if isinstance(use, Use):
                items = self.iterate(use.value)
                has_rest = any(isinstance(part, ast.Starred) for part in targets)
                for index, part in enumerate(targets):
                    value: Value = Unknown(use.node)
                    if items is None and not has_rest:
                        value = self.item(
                            use.value, Use(Known(use.node, index), use.node), use.node
                        )
                    is_plain = items is not None and not has_rest and index < len(items)
                    item = Use(value, use.node, use.frame)
                    self.assign(part, items[index] if items and is_plain else item, frame)
            case ast.Starred(value=inner):
                self.assign(inner, use, frame)
            case ast.Attribute(value=owner, attr=name):
                self.set_attribute(self.evaluate(owner, frame), owner, name, use)
                self._mark_change(owner, frame)
            case ast.Subscript(value=owner, slice=key):
                self.set_item(self.evaluate(owner, frame), owner, self.use(key, frame), use)
                self._mark_change(owner, frame)

    def augment(self, statement: ast.AugAssign, frame: Frame) -> None:
        """Follow `target += value`."""
        current = self.evaluate(statement.target, frame)
        use = self.use(statement.value, frame)
        match statement.op, current:
            case (ast.Add(), Items() as owner) | (ast.BitOr(), Entries() as owner):
                self.extend(owner, use)
                self._mark_change(statement.target, frame)
            case _:
                value = self._operate(statement.op, [current, use.value], statement)
                self.assign(statement.target, Use(value, statement.target, frame), frame)
