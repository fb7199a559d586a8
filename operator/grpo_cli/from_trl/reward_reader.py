"""Finds a script's reward functions, and takes them out of it.

The job calls them with TRL's own signature. A function of the script can't be imported from it,
since that would train. It is copied, with all that it refers to, into a file for a ConfigMap.
Functions of TRL and of other packages are named where they are.
"""

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from textwrap import dedent

from .command_line import PARSING
from .expressions import Scope
from .syntax import (
    Computed,
    added_list,
    bound_names,
    called_name,
    changed_objects,
    dotted_name,
    function_named,
    function_result,
    global_names,
    is_main_guard,
    parse,
    statements,
)
from .trl_run import ReadModule, RewardUse, TrlRun, refuse_keys

MAX_BYTES = 900_000
"""Of all reward files together: a ConfigMap takes 1 MiB."""
MADE_BY_TRL = {
    "get_soft_overlong_punishment": "soft_overlong_punishment_reward",
    "get_repetition_penalty_reward": "repetition_penalty_reward",
    "get_cosine_scaled_reward": "cosine_scaled_reward",
}
"""TRL's makers of reward functions, and the names of what they make."""
_IN_IMAGE = (
    "accelerate", "aiohttp", "datasets", "huggingface_hub", "math_verify", "numpy", "peft",
    "pydantic", "regex", "requests", "safetensors", "torch", "transformers", "trl", "yaml",
)  # fmt: skip
"""Packages of the training image that rewards may import."""
_OPENING = (
    "load_from_disk", "open", "read_bytes", "read_csv", "read_json", "read_parquet", "read_pickle",
    "read_text",
)  # fmt: skip
"""Calls that open a file."""
_RUNNING = ("GRPOTrainer", "GRPOConfig", "load_dataset", *PARSING)
"""Calls that a reward's process must not repeat."""
_LISTS = (ast.BinOp, ast.List, ast.ListComp, ast.Tuple)


def _is_list_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called_name(node) in ("list", "sorted", "tuple")


class RewardReader:
    """Fills `run.rewards` and `run.reward_files`."""

    def __init__(self, run: TrlRun, read_module: ReadModule) -> None:
        self.run = run
        self.read_module = read_module
        self.module_name = "rewards" if read_module("rewards") is None else "script_rewards"
        self.copied: dict[tuple[int, int], str] = {}
        """Statements of the script that the rewards need, by line and column."""
        self.lines: set[int] = set()
        """Lines of these statements."""
        self.changes: set[tuple[int, str]] = set()
        """Lines that change what the rewards use, with its name."""
        self.visited: set[str] = set()
        self.variables: set[str] = set()
        """Variables of the environment that notes name already."""
        self.packages: set[str] = set()
        """Packages that notes name already."""

    def read(self, node: ast.expr | None, scope: Scope, line: int) -> None:
        """Read reward_funcs; `line` is the trainer's own."""
        if node is None:
            self.run.note(line, "reward_funcs", "", "none is given; write the job's rewards")
            return
        entries = self._entries(node, scope)
        for entry, inner in [(node, scope)] if entries is None else entries:
            self._read_entry(entry, inner)
        self._finish(scope)

    def _entries(self, node: ast.expr, scope: Scope) -> list[tuple[ast.expr, Scope]] | None:
        """What reward_funcs lists, with the scope of each; None if it is no list."""
        if isinstance(node, ast.List | ast.Tuple):
            return self._listed(node.elts, scope)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            first_part, second_part = (ast.Starred(part) for part in (node.left, node.right))
            return self._listed([first_part, second_part], scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = function_named(scope.module, node.func.id)
            result = function_result(scope.module, node.func.id)
            if function is None or result is None:
                return None
            return self._entries(result, scope.inside(function, node, scope))
        first = scope.first_binding(node) if isinstance(node, ast.Name) else None
        if first is None or not isinstance(first[0].value, (*_LISTS, ast.Call)):
            return None
        if first[0].index is not None:
            return self._unpacked(node, scope)
        assert isinstance(node, ast.Name), "only a name is bound"
        entries = self._entries(first[0].value, first[1])
        if entries is not None:
            entries += self._added_items(node.id, first[0].line, first[1])
        return entries

    def _unpacked(self, node: ast.expr, scope: Scope) -> list[tuple[ast.expr, Scope]] | None:
        """What a list has that a script's function returns beside other values."""
        try:
            target, inner, index = scope.follow(node)
        except Computed:
            return None
        if index is None and isinstance(target, ast.List | ast.Tuple):
            return self._listed(target.elts, inner)
        return None

    def _added_items(
        self, list_name: str, line: int, scope: Scope
    ) -> Iterator[tuple[ast.expr, Scope]]:
        """What is added to a list below its line."""
        bound_lines = {line}
        for statement, is_conditional in statements(scope.body):
            names = {name for name, _, _ in bound_names(statement)}
            if list_name not in names or statement.lineno == line:
                continue
            bound_lines.add(statement.lineno)
            added = added_list(statement, list_name)
            entries = None if added is None or is_conditional else self._entries(added, scope)
            if entries is not None:
                yield from entries
            else:
                advice = "the list changes here: add what it adds to the job's rewards"
                self.run.note_node(statement, "reward_funcs", advice)
        for change in scope.bindings[list_name]:
            if change.line not in bound_lines:
                advice = "a function changes the list here: add what it adds to the job's rewards"
                self.run.note(change.line, "reward_funcs", list_name, advice)

    def _listed(
        self, elements: Sequence[ast.expr], scope: Scope
    ) -> list[tuple[ast.expr, Scope]] | None:
        """What a list has that is written out, with lists that it unpacks."""
        entries: list[tuple[ast.expr, Scope]] = []
        for element in elements:
            inner: list[tuple[ast.expr, Scope]] | None = [(element, scope)]
            if isinstance(element, ast.Starred):
                inner = self._entries(element.value, scope)
            if inner is None:
                return None
            entries += inner
        return entries

    def _read_entry(self, node: ast.expr, scope: Scope) -> None:
        try:
            target, inner, _ = scope.resolve(node)
            imported = self._imported_function(node, target, scope)
        except Computed as error:
            self._add_unknown(node, str(error))
            return
        if imported and imported[1].isascii():
            self.add_imported(node.lineno, *imported)
        elif isinstance(target, _LISTS) or _is_list_call(target) or _is_list(node, scope):
            self._add_unknown(node, "the list is computed when the script runs")
        elif isinstance(target, ast.Constant) and isinstance(target.value, str):
            self.run.rewards.append(RewardUse(node.lineno, target.value))
        elif isinstance(target, ast.Call) and called_name(target) == "from_pretrained":
            self._add_loaded_model(node, target, inner)
        elif _is_made_here(node, target, scope):
            if isinstance(node, ast.Name) and node.id.isascii():
                # TRL names the metrics after the function itself, whatever the script calls it.
                name = self._metric_name(target, inner) or node.id
                self._copy_names([node.id], scope, node)
                self._add_function(node, name, node.id)
            else:
                self._copy_expression(node, scope)
        else:
            self._add_unknown(node, "the script does not say where it comes from")

    def _imported_function(
        self, node: ast.expr, target: ast.AST, scope: Scope
    ) -> tuple[str, str] | None:
        """Module and name of a function that the script imports."""
        if isinstance(target, ast.ImportFrom) and isinstance(node, ast.Name):
            for alias in target.names:
                if (alias.asname or alias.name) == node.id:
                    return target.module or "", alias.name
        dotted = dotted_name(node)
        if isinstance(node, ast.Attribute) and dotted:
            first = dotted.partition(".")[0]
            statement = scope.resolve(ast.Name(first, lineno=node.lineno, col_offset=0))[0]
            module, _, name = dotted.rpartition(".")
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    if alias.asname == first:
                        module = module.replace(first, alias.name, 1)
                return module, name
            if isinstance(statement, ast.ImportFrom) and statement.module:
                return f"{statement.module}.{module}", name
        return None

    def add_imported(self, line: int, module: str, name: str) -> None:
        """Add a function of a module, which is copied if it lies beside the script."""
        is_sibling = self._copy_module(module)
        if module.partition(".")[0] == "trl":
            module = "trl.rewards"
        elif not is_sibling:
            advice = f"the training image must have the package {module.partition('.')[0]!r}"
            self.run.note(line, f"reward {name}", module, advice)
        function = f"{module}:{name}"
        self.run.rewards.append(RewardUse(line, name, function, is_sibling))

    def _copy_module(self, module: str) -> bool:
        """Copy a module that lies beside the script, and those beside it that it imports. Return
        False if the script has no such module."""
        if not module or "." in module:
            return False
        if f"{module}.py" in self.run.reward_files:
            return True
        text = self.read_module(module)
        if text is None:
            return False
        self.run.reward_files[f"{module}.py"] = text
        try:
            module_tree = parse(text)
        except (SyntaxError, ValueError):
            self.run.note(0, f"{module}.py", "", "it is no Python: correct it in the ConfigMap")
            return True
        refuse_keys(module_tree, f"{module}.py:")
        for node in ast.walk(module_tree):
            self._copy_imported(node, f"{module}.py")
            self._note_variable(node, f"{module}.py")
            self._note_file(node, f"{module}.py")
        return True

    def _copy_imported(self, node: ast.AST, file: str) -> None:
        """Copy what a statement imports from beside the script, and name other packages that the
        training image may lack."""
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level:
            line = 0 if file in self.run.reward_files else node.lineno
            advice = f"the files of a ConfigMap are no package: import it in {file} without a dot"
            self.run.note(line, "import", "." * node.level + (node.module or ""), advice)
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            package = module.partition(".")[0]
            is_there = package in _IN_IMAGE or package in sys.stdlib_module_names
            if self._copy_module(module) or is_there or package in self.packages:
                continue
            self.packages.add(package)
            advice = f"{file} imports it: the training image must have the package {package!r}"
            line = 0 if file in self.run.reward_files else getattr(node, "lineno", 0)
            self.run.note(line, "import", module, advice)

    def _note_variable(self, node: ast.AST, file: str) -> None:
        """Name a variable of the environment that a copied file reads."""
        match node:
            case ast.Subscript(value=owner, slice=variable, ctx=ast.Load()):
                is_read = dotted_name(owner).endswith("environ")
            case ast.Call(func=function, args=[variable, *_]):
                name = dotted_name(function)
                is_read = name.endswith(("environ.get", "getenv", "environ.setdefault"))
            case _:
                return
        source = ast.unparse(variable) if is_read else ""
        if source in ("", *self.variables):
            return
        self.variables.add(source)
        advice = f"{file} reads it: set it in env, if the reward needs it; a secret by valueFrom"
        line = 0 if file in self.run.reward_files else getattr(node, "lineno", 0)
        self.run.note(line, f"os.environ[{source}]", "", advice)

    def _note_file(self, node: ast.AST, file: str) -> None:
        """Name a file of this machine that a copied file opens."""
        if isinstance(node, ast.Call) and called_name(node) in _OPENING:
            advice = f"{file} opens a file: a pod has none of this machine; add it to the ConfigMap"
            line = 0 if file in self.run.reward_files else node.lineno
            self.run.note(line, ast.unparse(node.func), "", advice)

    def _add_loaded_model(self, node: ast.expr, call: ast.Call, scope: Scope) -> None:
        try:
            name = scope.evaluate(call.args[0]) if call.args else None
        except Computed:
            name = None
        if isinstance(name, str):
            self.run.rewards.append(RewardUse(node.lineno, name))
        else:
            self._add_unknown(node, "the model's name is computed when the script runs")

    def _add_function(self, node: ast.expr, name: str, attribute: str) -> None:
        function = f"{self.module_name}:{attribute}"
        self.run.rewards.append(RewardUse(node.lineno, name, function, is_in_config_map=True))

    def _add_unknown(self, node: ast.expr, why: str) -> None:
        """An entry that nobody can take leaves a reward that a preflight finds missing."""
        name = f"reward_{len(self.run.rewards) + 1}"
        advice = f"{why}; write it as function {name} of {self.module_name}.py"
        self.run.note_node(node, "reward_funcs", advice)
        self._add_function(node, name, name)

    def _metric_name(self, target: ast.AST, scope: Scope) -> str:
        """The name by which TRL logs what a definition or a call makes; empty if unknown."""
        if isinstance(target, ast.FunctionDef | ast.AsyncFunctionDef):
            return target.name
        if isinstance(target, ast.Attribute):
            return target.attr
        if not isinstance(target, ast.Call):
            return ""
        if called_name(target) == "partial" and target.args:
            return dotted_name(target.args[0]).rpartition(".")[2]
        try:
            maker = scope.resolve(target.func)[0]
        except Computed:
            return ""
        if isinstance(maker, ast.ClassDef):
            # TRL takes the class's name, unless an object has a name.
            return "" if "__name__" in ast.unparse(maker) else maker.name
        if isinstance(maker, ast.FunctionDef):
            result = function_result(scope.module, maker.name)
            functions = {node.name for node in maker.body if isinstance(node, ast.FunctionDef)}
            return dotted_name(result) if result and dotted_name(result) in functions else ""
        return MADE_BY_TRL.get(called_name(target), "")

    def _copy_expression(self, node: ast.expr, scope: Scope) -> None:
        """Give what the list makes on the spot, as by partial, a name in the file."""
        refuse_keys(node, f"{self.run.source} line ")
        attribute = f"reward_{len(self.run.rewards) + 1}"
        self._copy_names(global_names(node), scope, node)
        end = len(self.run.text), len(self.run.rewards)  # after all lines
        self.copied[end] = f"{attribute} = {self.run.source_of(node)}"
        self._add_function(node, self._metric_name(node, scope) or attribute, attribute)
        if isinstance(node, ast.Name):
            advice = f"the spec takes names in ASCII: it is {attribute}"
            self.run.note(node.lineno, "reward_funcs", node.id, advice)

    def _copy_names(self, names: Sequence[str], scope: Scope, reward: ast.expr) -> None:
        """Copy the statements that bind these names, and what those refer to."""
        for name in names:
            if name in self.visited:
                continue
            self.visited.add(name)
            units = _units_that_bind(name, scope) or _star_imports(name, scope)
            running = [
                node
                for unit in units
                if not isinstance(unit, ast.FunctionDef)
                for node in ast.walk(unit)
                if isinstance(node, ast.Call) and called_name(node) in _RUNNING
            ]
            if running:
                advice = (
                    f"the reward at line {reward.lineno} uses it, but making it again would run "
                    f"the script: define it in {self.module_name}.py"
                )
                self.run.note_node(running[0], name, advice)
                continue
            self.changes |= {(line, name) for line in _change_lines(name, scope)}
            if not units and scope.first_binding(ast.Name(name)):
                advice = f"the reward uses this parameter: define it in {self.module_name}.py"
                self.run.note(reward.lineno, name, "", advice)
            for unit in units:
                self._copy_unit(unit, scope, reward)

    def _copy_unit(self, unit: ast.stmt, scope: Scope, reward: ast.expr) -> None:
        refuse_keys(unit, f"{self.run.source} line ")
        self.copied[unit.lineno, unit.col_offset] = self._statement_source(unit)
        self.lines |= set(range(unit.lineno, (unit.end_lineno or 0) + 1))
        self._copy_imported(unit, f"{self.module_name}.py")
        for node in ast.walk(unit):
            self._note_variable(node, f"{self.module_name}.py")
            self._note_file(node, f"{self.module_name}.py")
        self._copy_names(global_names(unit), scope, reward)

    def _finish(self, scope: Scope) -> None:
        """Write what was copied into one file, in the script's order; name what was not."""
        for line, name in sorted(self.changes):
            if line not in self.lines:
                advice = f"the reward uses what changes here: set it in {self.module_name}.py"
                self.run.note(line, name, "", advice)
        if self.copied:
            future = [
                "from __future__ import annotations"
                for statement in scope.module.body
                if isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            ]
            head = f'"""Reward functions of {self.run.source}."""'
            parts = [head, *future[:1], *(self.copied[place] for place in sorted(self.copied))]
            self.run.reward_files[f"{self.module_name}.py"] = "\n\n".join(parts) + "\n"
        size = sum(len(text.encode()) for text in self.run.reward_files.values())
        if size > MAX_BYTES:
            advice = "too large for a ConfigMap: put the modules into the training image"
            self.run.note(1, "reward functions", f"{size:,} bytes", advice)
            self.run.reward_files.clear()

    def _statement_source(self, unit: ast.stmt) -> str:
        """A statement as the script writes it, without its indentation."""
        decorators = getattr(unit, "decorator_list", [])
        first = min([unit.lineno, *(node.lineno for node in decorators)])
        # Not splitlines, which breaks at more characters than Python's lines do.
        lines = self.run.text.split("\n")[first - 1 : unit.end_lineno]
        source = dedent("\n".join(lines))
        try:
            same = ast.dump(ast.parse(source).body[0]) == ast.dump(unit)
        except (SyntaxError, IndexError):
            same = False
        # A text of several lines may lose its indentation, or share its line with another.
        return source if same and len(ast.parse(source).body) == 1 else ast.unparse(unit)


def _star_imports(name: str, scope: Scope) -> list[ast.stmt]:
    """The imports of all names of a module, one of which binds a name that nothing else does."""
    imports = [node for node in ast.walk(scope.module) if isinstance(node, ast.ImportFrom)]
    star_imports = {node.lineno: node for node in imports if node.names[0].name == "*"}
    made = scope.first_binding(ast.Name(name))
    is_other = made is not None and made[0].line not in star_imports
    return [] if is_other or hasattr(builtins, name) else list(star_imports.values())


def _is_made_here(node: ast.expr, target: ast.AST, scope: Scope) -> bool:
    """True for what the script defines or makes on the spot, or a module of which it has all."""
    if isinstance(node, ast.Name):
        return not isinstance(target, ast.Name) or bool(_star_imports(node.id, scope))
    root = next((part for part in ast.walk(node) if isinstance(part, ast.Name)), None)
    made = scope.first_binding(root) if root else None
    is_part = isinstance(node, ast.Attribute | ast.Subscript)
    is_part_of_made = is_part and made is not None and made[0].value is not None
    return is_part_of_made or isinstance(node, ast.Call | ast.Lambda)


def _is_list(node: ast.expr, scope: Scope) -> bool:
    """True for what functions of the script return as a list."""
    try:
        target = scope.follow(node)[0]
    except Computed:
        return False
    return isinstance(target, _LISTS) or _is_list_call(target)


def _binds(scope: Scope, name: str) -> bool:
    """True for a name that a statement or a parameter of the scope's own binds."""
    is_bound = any(name in _names_of(statement) for statement, _ in statements(scope.body))
    return is_bound or any(not made.is_conditional for made in scope.bindings.get(name, ()))


def _units_that_bind(name: str, scope: Scope | None) -> list[ast.stmt]:
    """The whole statements, as with their `try`, that bind or change a name in the scope that binds
    it: this one, or one around it."""
    while scope is not None and not _binds(scope, name):
        scope = scope.outer
    units = _flat_statements(scope.body if scope else [])
    return [unit for unit in units if name in _names_in(unit)]


def _names_in(unit: ast.stmt) -> set[str]:
    """Names that a whole statement binds, or of whose objects it sets a field."""
    parts = (statement for statement, _ in statements([unit]))
    return set().union(*(_names_of(part) | changed_objects(part) for part in parts))


def _change_lines(name: str, scope: Scope | None) -> Iterator[int]:
    """Lines of what changes a name beside the statements that bind it: a function that sets or
    fills it, and statements around a reward's use that set its fields."""
    while scope is not None:
        made = scope.bindings.get(name, ())
        yield from (item.line for item in made if item.value is None and item.is_conditional)
        if _binds(scope, name):
            return
        parts = statements(scope.body)
        yield from (part.lineno for part, _ in parts if name in changed_objects(part))
        scope = scope.outer


def _flat_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        is_opening = isinstance(statement, ast.With) and any(
            called_name(item.context_expr) in _OPENING
            for item in statement.items
            if isinstance(item.context_expr, ast.Call)
        )
        if is_opening or not isinstance(statement, ast.If | ast.With):
            yield statement
        elif isinstance(statement, ast.With) or is_main_guard(statement):
            yield from _flat_statements(statement.body)
        else:
            yield statement


def _names_of(statement: ast.stmt) -> set[str]:
    return {name for name, _, _ in bound_names(statement)}
