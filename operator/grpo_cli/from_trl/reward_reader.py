"""Finds a script's reward functions, and takes them out of it.

The job calls them with TRL's own signature. A function of the script can't be imported from it,
since that would train. It is copied, with all that it refers to, into a file for a ConfigMap.
Functions of TRL and of other packages are named where they are.
"""

import ast
import builtins
import sys
from collections.abc import Sequence
from textwrap import dedent

from .interpreter.functions import PARSING
from .interpreter.syntax import (
    OPENING,
    called_name,
    dotted_name,
    global_names,
    parse,
    whole_statements,
)
from .interpreter.values import (
    COMPUTED,
    Class,
    External,
    Frame,
    Function,
    Items,
    Known,
    Object,
    Part,
    Place,
    Rest,
    Unknown,
    Use,
    Value,
    line_of,
    written_places,
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
_READS_VARIABLE = ("environ.get", "getenv", "environ.setdefault")
_RUNNING = ("GRPOTrainer", "GRPOConfig", "load_dataset", *PARSING)
"""Calls that a reward's process must not repeat."""


class RewardReader:
    """Fills `run.rewards` and `run.reward_files`."""

    def __init__(self, run: TrlRun, read_module: ReadModule) -> None:
        self.run = run
        self.read_module = read_module
        self.module_name = "rewards" if read_module("rewards") is None else "script_rewards"
        self.nodes: list[ast.AST] = []
        """Expressions of the entries."""
        self.copied: dict[tuple[int, int], str] = {}
        """Statements of the script that the rewards need, by line and column."""
        self.places: set[Place] = set()
        """Where these statements begin, and those in them."""
        self.changes: dict[Place, str] = {}
        """Statements that change what the rewards use, with its name."""
        self.visited: set[str] = set()
        self.variables: set[str] = set()
        """Variables of the environment that notes name already."""
        self.packages: set[str] = set()
        """Packages that notes name already."""

    def read(self, use: Use | None, line: int, root: Frame) -> None:
        """Read reward_funcs; `line` is the trainer's own, `root` has the module's names."""
        if use is None:
            self.run.note(line, "reward_funcs", "", "none is given; write the job's rewards")
            return
        entries = use.value.uses if isinstance(use.value, Items) else [use]
        self.nodes = [entry.node for entry in entries]
        for entry in entries:
            self._read_entry(entry, root)
        self._finish(root)

    def _read_entry(self, use: Use, root: Frame) -> None:
        value, frame = use.value, use.frame or root
        match value:
            case Rest():
                advice = "the list changes here: add what it adds to the job's rewards"
                self.run.note_node(use.node, "reward_funcs", advice)
            case Unknown():
                self._add_unknown(use, value.why)
            case Known(value=str(name)):
                self.run.rewards.append(RewardUse(use.line, name))
            case External(is_imported=True, path=path) if value.name.isascii():
                self.add_imported(use.line, path.rpartition(".")[0], value.name)
            case Object(name="from_pretrained"):
                self._add_loaded_model(use, value)
            case Function() | Object() | Class() | Part() | External():
                self._add_made(use, value, frame)
            case _:
                self._add_unknown(use, COMPUTED)

    def _add_made(self, use: Use, value: Value, frame: Frame) -> None:
        """Add what the script defines, or makes of it."""
        use, frame = _by_own_name(use, value, frame)
        name = use.node.id if isinstance(use.node, ast.Name) else ""
        is_bound = _binds(frame, name, value)
        if isinstance(value, External):
            is_bound = bool(name and _star_imports(name, frame))
        if not is_bound and (name or isinstance(value, External)):
            self._add_unknown(use, "the script does not say where it comes from")
        elif not name and self.nodes.count(use.node) > 1:
            self._add_unknown(use, "a loop makes it")
        elif name and name.isascii():
            self._copy_names([name], frame, use.node)
            self._add_function(use.line, self._metric_name(value) or name, name)
        else:
            self._copy_expression(use, frame)

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
        self._read_needs(module_tree, f"{module}.py")
        return True

    def _read_needs(self, copied: ast.AST, file: str) -> None:
        """Copy what a copied file imports from beside the script, and name what else it needs of a
        pod: packages, variables and files."""
        for node in ast.walk(copied):
            line = 0 if file in self.run.reward_files else line_of(node)
            match node:
                case ast.ImportFrom(level=level, module=module) if level:
                    advice = (
                        f"the files of a ConfigMap are no package: import it in {file} without a "
                        "dot"
                    )
                    self.run.note(line, "import", "." * level + (module or ""), advice)
                case ast.ImportFrom(module=str(module)):
                    self._read_import(module, file, line)
                case ast.Import(names=names):
                    for alias in names:
                        self._read_import(alias.name, file, line)
                case ast.Subscript(value=owner, slice=variable, ctx=ast.Load()):
                    if dotted_name(owner).endswith("environ"):
                        self._note_variable(variable, file, line)
                case ast.Call(func=function, args=arguments):
                    name = dotted_name(function)
                    if arguments and name.endswith(_READS_VARIABLE):
                        self._note_variable(arguments[0], file, line)
                    if called_name(node) in OPENING:
                        advice = (
                            f"{file} opens a file: a pod has none of this machine; add it to the "
                            "ConfigMap"
                        )
                        self.run.note(line, ast.unparse(function), "", advice)

    def _read_import(self, module: str, file: str, line: int) -> None:
        package = module.partition(".")[0]
        is_there = package in _IN_IMAGE or package in sys.stdlib_module_names
        if self._copy_module(module) or is_there or package in self.packages:
            return
        self.packages.add(package)
        advice = f"{file} imports it: the training image must have the package {package!r}"
        self.run.note(line, "import", module, advice)

    def _note_variable(self, variable: ast.expr, file: str, line: int) -> None:
        """Name a variable of the environment once."""
        source = ast.unparse(variable)
        if source not in self.variables:
            self.variables.add(source)
            advice = (
                f"{file} reads it: set it in env, if the reward needs it; a secret by valueFrom"
            )
            self.run.note(line, f"os.environ[{source}]", "", advice)

    def _add_loaded_model(self, use: Use, model: Object) -> None:
        name = model.arguments.uses[0].value if model.arguments.uses else None
        if isinstance(name, Known) and isinstance(name.value, str):
            self.run.rewards.append(RewardUse(use.line, name.value))
        else:
            self._add_unknown(use, "the model's name is computed when the script runs")

    def _add_function(self, line: int, name: str, attribute: str) -> None:
        function = f"{self.module_name}:{attribute}"
        self.run.rewards.append(RewardUse(line, name, function, is_in_config_map=True))

    def _add_unknown(self, use: Use, why: str) -> None:
        """An entry that nobody can take leaves a reward that a preflight finds missing."""
        name = f"reward_{len(self.run.rewards) + 1}"
        advice = f"{why}; write it as function {name} of {self.module_name}.py"
        self.run.note_node(use.node, "reward_funcs", advice)
        self._add_function(use.line, name, name)

    def _metric_name(self, value: Value) -> str:
        """The name by which TRL logs a function or an object; empty if unknown."""
        match value:
            case Function(fields=fields) if "__name__" in fields:
                name = fields["__name__"].value
                return str(name.value) if isinstance(name, Known) else ""
            case Function():
                return value.name
            case Class():
                return value.definition.name
            case Part():
                return value.name
            case Object(maker=Class(definition=definition)):
                # TRL takes the class's name, unless an object has a name.
                return "" if "__name__" in ast.unparse(definition) else definition.name
            case Object(name="partial") if value.arguments.positional:
                inner = value.arguments.positional[0].value
                return inner.name if isinstance(inner, External) else self._metric_name(inner)
            case Object():
                return MADE_BY_TRL.get(value.name, "")
        return ""

    def _copy_expression(self, use: Use, frame: Frame) -> None:
        """Give what the list makes on the spot, as by partial, a name in the file."""
        refuse_keys(use.node, f"{self.run.source} line ")
        attribute = f"reward_{len(self.run.rewards) + 1}"
        self._copy_names(global_names(use.node), frame, use.node)
        end = len(self.run.text), len(self.run.rewards)  # after all lines
        self.copied[end] = f"{attribute} = {self.run.source_of(use.node)}"
        self._add_function(use.line, self._metric_name(use.value) or attribute, attribute)
        if isinstance(use.node, ast.Name):
            advice = f"the spec takes names in ASCII: it is {attribute}"
            self.run.note(use.line, "reward_funcs", use.node.id, advice)

    def _copy_names(self, names: Sequence[str], frame: Frame, reward: ast.expr) -> None:
        """Copy the statements that bind or change these names, and what those refer to."""
        for name in names:
            if name in self.visited or name == "__name__":
                continue
            self.visited.add(name)
            owner = frame.owner(name)
            units: list[ast.stmt] = list(_star_imports(name, frame))
            if owner is not None:
                places = set(owner.names.writers.get(name, ()))
                places |= set(written_places(owner.names[name].value))
                units = [unit for unit in whole_statements(owner.body) if _has(unit, name, places)]
                if units:
                    self.changes |= dict.fromkeys(places, name)
                else:
                    advice = f"the reward uses this parameter: define it in {self.module_name}.py"
                    self.run.note(reward.lineno, name, "", advice)
            running = [
                node
                for unit in units
                if not isinstance(unit, ast.FunctionDef)
                for node in ast.walk(unit)
                if called_name(node) in _RUNNING
            ]
            if running:
                advice = (
                    f"the reward at line {reward.lineno} uses it, but making it again would run "
                    f"the script: define it in {self.module_name}.py"
                )
                self.run.note_node(running[0], name, advice)
                self.changes = {place: key for place, key in self.changes.items() if key != name}
                continue
            for unit in units:
                self._copy_unit(unit, frame, reward)

    def _copy_unit(self, unit: ast.stmt, frame: Frame, reward: ast.expr) -> None:
        place = unit.lineno, unit.col_offset
        if place in self.copied:
            return
        refuse_keys(unit, f"{self.run.source} line ")
        self.copied[place] = self._statement_source(unit)
        self.places |= {
            (node.lineno, node.col_offset)
            for node in ast.walk(unit)
            if isinstance(node, ast.stmt | ast.expr)
        }
        self._read_needs(unit, f"{self.module_name}.py")
        self._copy_names(global_names(unit), frame, reward)

    def _finish(self, root: Frame) -> None:
        """Write what was copied into one file, in the script's order; name what was not."""
        for (line, column), name in sorted(self.changes.items()):
            if (line, column) not in self.places:
                advice = f"the reward uses what changes here: set it in {self.module_name}.py"
                self.run.note(line, name, "", advice)
        if self.copied:
            future = [
                "from __future__ import annotations"
                for statement in root.body
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


def _has(unit: ast.stmt, name: str, places: set[Place]) -> bool:
    """True for a whole statement with one of the places, which runs with its body."""
    if (
        isinstance(unit, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and unit.name != name
    ):
        return False
    start, end = (unit.lineno, unit.col_offset), (unit.end_lineno or 0, unit.end_col_offset or 0)
    return any(start <= place < end for place in places)


def _by_own_name(use: Use, value: Value, frame: Frame) -> tuple[Use, Frame]:
    """A function by its own name, by whatever expression the script uses it, and the frame that
    has this name."""
    is_function = isinstance(value, Function) and value.frame in frame.around()
    if not isinstance(value, Function) or not is_function:
        return use, frame
    if not _binds(value.frame, value.name, value):
        return use, frame
    return Use(value, ast.copy_location(ast.Name(value.name), use.node)), value.frame


def _binds(frame: Frame, name: str, value: Value) -> bool:
    """True if a name is this value where the frame reads it."""
    owner = frame.owner(name)
    return owner is not None and owner.names[name].value is value


def _star_imports(name: str, frame: Frame) -> list[ast.ImportFrom]:
    """The imports of all names of a module, one of which binds a name that nothing else does."""
    if frame.owner(name) is not None or hasattr(builtins, name):
        return []
    while frame.outer is not None:
        frame = frame.outer
    imports = [
        node for part in frame.body for node in ast.walk(part) if isinstance(node, ast.ImportFrom)
    ]
    return [node for node in imports if node.names[0].name == "*"]
