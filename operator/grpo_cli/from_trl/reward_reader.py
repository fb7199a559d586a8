"""Finds a script's reward functions, and takes them out of it.

The job calls them with TRL's own signature. A function of the script can't be imported from it,
since that would train. It is copied, with all that it refers to, into a file for a ConfigMap.
Functions of TRL and of other packages are named where they are.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from textwrap import dedent

from .expressions import Computed, Scope
from .syntax import bound_names, called_name, dotted_name, is_main_guard, statements
from .trl_run import ReadModule, RewardUse, TrlRun

MAX_BYTES = 900_000
"""Of all reward files together: a ConfigMap takes 1 MiB."""
MADE_BY_TRL = {
    "get_soft_overlong_punishment": "soft_overlong_punishment_reward",
    "get_repetition_penalty_reward": "repetition_penalty_reward",
    "get_cosine_scaled_reward": "cosine_scaled_reward",
}
"""TRL's makers of reward functions, and the names of what they make."""
_RUNNING = (
    "GRPOTrainer",
    "GRPOConfig",
    "load_dataset",
    "parse_args",
    "parse_args_and_config",
    "parse_args_into_dataclasses",
)
"""Calls that a reward's process must not repeat."""


class RewardReader:
    """Fills `run.rewards` and `run.reward_files`."""

    def __init__(self, run: TrlRun, text: str, read_module: ReadModule) -> None:
        self.run = run
        self.text = text
        self.read_module = read_module
        self.module_name = "rewards" if read_module("rewards") is None else "script_rewards"
        self.copied: dict[int, str] = {}
        """Statements of the script that the rewards need, by line."""
        self.visited: set[str] = set()

    def read(self, node: ast.expr | None, scope: Scope, line: int) -> None:
        """Read reward_funcs; `line` is the trainer's own."""
        if node is None:
            self.run.note(line, "reward_funcs", "", "none is given; write the job's rewards")
            return
        entries, inner = self._entries(node, scope)
        for entry in entries:
            self._read_entry(entry, inner)
        self._finish(scope)

    def _entries(self, node: ast.expr, scope: Scope) -> tuple[list[ast.expr], Scope]:
        """What reward_funcs lists, and where it is to be read."""
        if isinstance(node, ast.List | ast.Tuple):
            return list(node.elts), scope
        if not isinstance(node, ast.Name):
            return [node], scope
        first = scope.first_binding(node)
        if first is None or not isinstance(first[0].value, ast.List | ast.Tuple):
            return [node], scope
        binding, inner = first
        assert isinstance(binding.value, ast.List | ast.Tuple)
        entries = list(binding.value.elts)
        for statement, is_conditional in statements(inner.body):
            names = {name for name, _, _ in bound_names(statement)}
            if node.id not in names or statement.lineno == binding.line:
                continue
            added = _appended(statement)
            if added is not None and not is_conditional:
                entries.append(added)
            else:
                advice = "the list changes here: add what it adds to the job's rewards"
                self.run.note(statement.lineno, "reward_funcs", self._source(statement), advice)
        return entries, inner

    def _read_entry(self, node: ast.expr, scope: Scope) -> None:
        try:
            target, inner, _ = scope.resolve(node)
        except Computed as error:
            self._add_unknown(node, str(error))
            return
        imported = self._imported(node, target, scope)
        if imported:
            self._add_imported(node, *imported)
        elif isinstance(target, ast.Constant) and isinstance(target.value, str):
            self._add_model(node, target.value)
        elif isinstance(target, ast.Call) and called_name(target) == "from_pretrained":
            self._add_loaded_model(node, target, inner)
        elif isinstance(node, ast.Name) and not isinstance(target, ast.Name):
            # TRL names the metrics after the function itself, whatever the script calls it.
            name = self._metric_name(target) or node.id
            self._copy_names([node.id], scope, node)
            self._add_function(node, name, node.id)
        elif isinstance(node, ast.Call | ast.Lambda):
            self._copy_expression(node, scope)
        else:
            self._add_unknown(node, "the script does not say where it comes from")

    def _imported(self, node: ast.expr, target: ast.AST, scope: Scope) -> tuple[str, str] | None:
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

    def _add_imported(self, node: ast.expr, module: str, name: str) -> None:
        is_sibling = self._copy_module(module)
        if module.partition(".")[0] == "trl":
            module = "trl.rewards"
        elif not is_sibling:
            advice = f"the training image must have the package {module.partition('.')[0]!r}"
            self.run.note(node.lineno, f"reward {name}", module, advice)
        function = f"{module}:{name}"
        self.run.rewards.append(RewardUse(node.lineno, name, function, is_sibling))

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
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._copy_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                self._copy_module(node.module or "")
        return True

    def _add_model(self, node: ast.expr, name: str) -> None:
        self.run.rewards.append(RewardUse(node.lineno, name))

    def _add_loaded_model(self, node: ast.expr, call: ast.Call, scope: Scope) -> None:
        try:
            name = scope.evaluate(call.args[0]) if call.args else None
        except Computed:
            name = None
        if isinstance(name, str):
            self._add_model(node, name)
        else:
            self._add_unknown(node, "the model's name is computed when the script runs")

    def _add_function(self, node: ast.expr, name: str, attribute: str) -> None:
        function = f"{self.module_name}:{attribute}"
        self.run.rewards.append(RewardUse(node.lineno, name, function, is_in_config_map=True))

    def _add_unknown(self, node: ast.expr, why: str) -> None:
        """An entry that nobody can take leaves a reward that a preflight finds missing."""
        name = f"reward_{len(self.run.rewards) + 1}"
        advice = f"{why}; write it as function {name} of {self.module_name}.py"
        self.run.note(node.lineno, "reward_funcs", self._source(node), advice)
        self._add_function(node, name, name)

    def _metric_name(self, target: ast.AST) -> str:
        """The name by which TRL logs what a definition or a call makes; empty if unknown."""
        if isinstance(target, ast.FunctionDef | ast.AsyncFunctionDef):
            return target.name
        if not isinstance(target, ast.Call):
            return ""
        if called_name(target) == "partial" and target.args:
            return dotted_name(target.args[0]).rpartition(".")[2]
        return MADE_BY_TRL.get(called_name(target), "")

    def _copy_expression(self, node: ast.expr, scope: Scope) -> None:
        """Give what the list makes on the spot, as by partial, a name in the file."""
        attribute = f"reward_{len(self.run.rewards) + 1}"
        names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        self._copy_names(names, scope, node)
        end = len(self.text) + len(self.run.rewards)  # after all lines
        self.copied[end] = f"{attribute} = {self._source(node)}"
        self._add_function(node, self._metric_name(node) or attribute, attribute)

    def _copy_names(self, names: Sequence[str], scope: Scope, reward: ast.expr) -> None:
        """Copy the statements that bind these names, and what those refer to."""
        for name in names:
            if name in self.visited:
                continue
            self.visited.add(name)
            unit = _unit_that_binds(name, scope)
            if unit is None:
                continue
            calls = [node for node in ast.walk(unit) if isinstance(node, ast.Call)]
            running = [call for call in calls if called_name(call) in _RUNNING]
            if running and not isinstance(unit, ast.FunctionDef):
                advice = (
                    f"the reward at line {reward.lineno} uses it, but making it again would run "
                    f"the script: define it in {self.module_name}.py"
                )
                self.run.note(unit.lineno, name, self._source(running[0]), advice)
                continue
            self.copied[unit.lineno] = self._statement_source(unit)
            if isinstance(unit, ast.Import):
                for alias in unit.names:
                    self._copy_module(alias.name)
            elif isinstance(unit, ast.ImportFrom):
                self._copy_module(unit.module or "")
            used = [node.id for node in ast.walk(unit) if isinstance(node, ast.Name)]
            self._copy_names(used, scope, reward)

    def _finish(self, scope: Scope) -> None:
        """Write what was copied into one file, in the script's order."""
        if self.copied:
            future = [
                "from __future__ import annotations"
                for statement in scope.module.body
                if isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            ]
            head = f'"""Reward functions of {self.run.source}."""'
            parts = [head, *future[:1], *(self.copied[line] for line in sorted(self.copied))]
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
        lines = self.text.split("\n")[first - 1 : unit.end_lineno]
        source = dedent("\n".join(lines))
        try:
            same = ast.dump(ast.parse(source).body[0]) == ast.dump(unit)
        except (SyntaxError, IndexError):
            same = False
        # A text of several lines may lose its indentation, or share its line with another.
        return source if same and len(ast.parse(source).body) == 1 else ast.unparse(unit)

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


def _appended(statement: ast.stmt) -> ast.expr | None:
    """What `list.append(…)` adds; None for other statements."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and called_name(call) == "append" and len(call.args) == 1:
        return call.args[0]
    return None


def _unit_that_binds(name: str, scope: Scope | None) -> ast.stmt | None:
    """The whole statement, as with its `try`, that binds a name in a scope or around it."""
    while scope is not None:
        for unit in _units(scope.body):
            bindings = (inner for inner, _ in statements([unit]))
            if any(name in _names_of(statement) for statement in bindings):
                return unit
        scope = scope.outer
    return None


def _units(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.With) and (
            is_main_guard(statement) or isinstance(statement, ast.With)
        ):
            yield from _units(statement.body)
        else:
            yield statement


def _names_of(statement: ast.stmt) -> set[str]:
    return {name for name, _, _ in bound_names(statement)}


def metric_name(name: str) -> str:
    """A reward's name as the spec takes it."""
    cleaned = re.sub(r"[^-a-zA-Z0-9_]", "_", name.rpartition("/")[2])[:63]
    return cleaned if re.match("[a-zA-Z_]", cleaned) else f"_{cleaned}"[:63]
