"""Follows a trainer's dataset back to load_dataset, through what the script does with its rows.

Some of it is the spec's own words: renamed columns, and a slice from the start. So is a `map` that
builds the prompt of a column and a fixed system message. Rows that are made in any other way can be
had only by running the script. The job then names a file, and the note says how to write it.
"""

import ast
from typing import Any

from .expressions import Scope
from .syntax import Computed, called_name
from .trl_run import DatasetUse, TrlRun, TrlSetting, is_folder_name

ROWS_FILE = "train.jsonl"
_FILES = ("json", "csv", "parquet")
_LOADER_POSITIONS = ("path", "name", "data_dir", "data_files", "split")
_RENAME_POSITIONS = ("original_column_name", "new_column_name")
_WITHOUT_EFFECT = ("remove_columns", "select_columns", "with_format", "set_format")
_LOADING_ONLY = ("num_proc", "cache_dir", "trust_remote_code", "keep_in_memory", "streaming")
_MAPPING_ONLY = ("num_proc", "remove_columns", "desc", "load_from_cache_file", "keep_in_memory")
WRITE_ROWS = (
    f'the rows are made by the script: let it write them, `dataset.to_json("{ROWS_FILE}")`, and '
    "put the file on the claim that dataset.files names (docs/how-to/train/data.md)"
)


class DatasetReader:
    """Fills `run.dataset`."""

    def __init__(self, run: TrlRun) -> None:
        self.run = run
        self._files: tuple[ast.Call, Any] | None = None
        """Call that loads files, and its data_files."""

    @property
    def use(self) -> DatasetUse:
        """What is read so far."""
        return self.run.dataset

    def read(self, node: ast.expr | None, scope: Scope, line: int) -> None:
        """Read the trainer's argument; `line` is the trainer's own."""
        if node is None:
            self.use.is_made_by_script = True
            self.run.note(line, "train_dataset", "", f"it is not given here; {WRITE_ROWS}")
            return
        self._follow(node, scope)
        if self._files is not None:
            self._take_files(*self._files)

    def _follow(self, node: ast.expr, scope: Scope) -> None:
        """Read the base of the rows first, then each step on the way back to the trainer."""
        try:
            target, inner, index = scope.follow(node)
            is_step = isinstance(target, ast.Call) and _is_method(target.func, inner)
            is_loading = isinstance(target, ast.Call) and _is_load_dataset(target, inner)
        except Computed as error:
            self._is_made(node, str(error))
            return
        if isinstance(target, ast.Subscript):
            self._follow(target.value, inner)
            self._take_split(target, inner)
        elif not isinstance(target, ast.Call) or index is not None:
            self._is_made(target)
        elif is_loading:
            self._load(target, inner)
        elif isinstance(target.func, ast.Attribute) and is_step:
            self._follow(target.func.value, inner)
            self._take_step(target, target.func.attr, inner)
        else:
            self._is_made(target)

    def _is_made(self, node: ast.AST, why: str = "") -> None:
        if self.use.is_made_by_script:
            return
        self.use.is_made_by_script = True
        self.run.note_node(node, "train_dataset", f"{why}; {WRITE_ROWS}" if why else WRITE_ROWS)

    def _load(self, call: ast.Call, scope: Scope) -> None:
        try:
            arguments = _evaluate_arguments(call, _LOADER_POSITIONS, scope)
        except Computed as error:
            self._is_made(call, str(error))
            return
        path, files = arguments.pop("path", None), arguments.pop("data_files", None)
        self.use.config, self.use.split = arguments.pop("name", None), arguments.pop("split", None)
        self.use.revision = arguments.pop("revision", None)
        if path in _FILES and files is not None:
            self._files = call, files
            self.use.config = None
        elif isinstance(path, str) and files is None and not is_folder(path):
            self.use.name = path
        else:
            self._is_made(call)
        if arguments.get("streaming") is True:
            advice = "TRL trains a stream in its order: dataset.shuffle is false"
            self.run.note(call.lineno, "load_dataset(streaming)", "", advice)
            self.run.config["shuffle_dataset"] = TrlSetting(False, call.lineno)
        for name, value in arguments.items():
            if name in ("token", "use_auth_token"):
                advice = "set dataset.tokenSecretRef"
                self.run.note(call.lineno, f"load_dataset({name})", "", advice)
            elif name not in _LOADING_ONLY:
                self._is_made(call, f"load_dataset({name}={value!r}) is not taken")

    def _take_files(self, call: ast.Call, files: Any) -> None:
        """Take the files of the split, which no step has named before the last."""
        paths = _files_of(files, self.use.split or "train")
        if not paths:
            self._is_made(call)
        if self.use.is_made_by_script:
            return
        self.use.files = paths
        advice = "put the files on the claim of dataset.files"
        if any(path.endswith(".csv") for path in paths):
            advice += "; rewards get every value of a CSV file as a text"
        self.run.note(call.lineno, "data_files", ", ".join(paths), advice)

    def _take_split(self, node: ast.Subscript, scope: Scope) -> None:
        try:
            split = scope.evaluate(node.slice)
        except Computed as error:
            self._is_made(node, str(error))
            return
        if not isinstance(split, str) or self.use.split is not None:
            self._is_made(node)
        else:
            self.use.split = split

    def _take_step(self, call: ast.Call, method: str, scope: Scope) -> None:
        """One method of the rows."""
        if self.use.is_made_by_script or method in _WITHOUT_EFFECT:
            return
        is_taken = False
        try:
            if method == "map":
                is_taken = self._take_map(call, scope)
            elif method == "rename_column":
                arguments = _evaluate_arguments(call, _RENAME_POSITIONS, scope)
                old, new = (arguments.get(name) for name in _RENAME_POSITIONS)
                is_taken = self._rename({new: old})
            elif method == "rename_columns":
                names = _evaluate_arguments(call, ("column_mapping",), scope)["column_mapping"]
                is_taken = self._rename({new: old for old, new in names.items()})
            elif method in ("select", "take"):
                is_taken = self._take_first(call, scope)
        except (Computed, LookupError, ValueError, AttributeError):
            is_taken = False
        if not is_taken:
            self._is_made(call, f".{method}(…)")

    def _rename(self, names: dict[Any, Any]) -> bool:
        """Take new names for columns; False if the spec has no word for them."""
        texts = [*names, *names.values()]
        if not all(isinstance(text, str) and text for text in texts):
            return False
        for new, old in names.items():
            source = self.use.columns.pop(old, old)
            if new == "prompt":
                self.use.prompt_column = source
            else:
                self.use.columns[new] = source
        return True

    def _take_first(self, call: ast.Call, scope: Scope) -> bool:
        """Take the first N rows as a slice of the split."""
        argument = call.args[0] if len(call.args) == 1 else None
        is_range = isinstance(argument, ast.Call) and called_name(argument) == "range"
        if isinstance(argument, ast.Call) and is_range and len(argument.args) == 1:
            argument = argument.args[0]
        elif argument is None or called_name(call) == "select":
            return False
        count = scope.evaluate(argument)
        split = self.use.split or "train"
        is_plain = self.use.name is not None and split.isidentifier()
        if not isinstance(count, int) or count < 1 or not is_plain:
            return False
        self.use.split = f"{split}[:{count}]"
        return True

    @property
    def _has_changes(self) -> bool:
        """True once a step has renamed a column or built the prompt."""
        use = self.use
        has_prompt = use.prompt_column != "prompt" or use.system_prompt is not None
        return has_prompt or bool(use.columns)

    def _take_map(self, call: ast.Call, scope: Scope) -> bool:
        """Take a function that only builds the prompt and renames columns."""
        options = {keyword.arg for keyword in call.keywords} - set(_MAPPING_ONLY)
        if len(call.args) != 1 or options:
            return False
        function, inner, _ = scope.resolve(call.args[0])
        if function is not call.args[0]:
            inner = inner.deferred_scope()  # the function reads its names when the rows are made
        parameter, result = _row_function(function)
        if result is None or self._has_changes:
            return False  # the function reads columns as the steps before it left them
        prompt: tuple[str, str | None] = (self.use.prompt_column, None)
        columns: dict[Any, Any] = {}
        for key_node, value in zip(result.keys, result.values, strict=True):
            key = inner.evaluate(key_node) if key_node is not None else None
            column = _column_of(value, parameter)
            if key == "prompt":
                prompt = (column, None) if column else _chat_of(value, parameter, inner)
            elif column is None or key is None:
                raise Computed(value)
            elif column != key:
                columns[key] = column
        return self._take_row(prompt, columns)

    def _take_row(self, prompt: tuple[str, str | None], columns: dict[Any, Any]) -> bool:
        """Take the prompt's column and system message, and new names for columns."""
        sources = [prompt[0], *columns.values()]
        if set(sources) & set(columns) or len(set(columns.values())) < len(columns):
            return False  # a job has either a column's own values or the new ones of its name
        if not self._rename(columns):
            return False
        column, self.use.system_prompt = prompt
        # The prompt's column goes by its new name, too.
        renamed = {old: new for new, old in self.use.columns.items()}
        self.use.prompt_column = renamed.get(column, column)
        return True


def _is_load_dataset(call: ast.Call, scope: Scope) -> bool:
    """True for the library's load_dataset, not for one of the script or of another module."""
    if called_name(call) != "load_dataset":
        return False
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    definition = scope.resolve(owner)[0]
    if isinstance(definition, ast.Import):
        return ast.unparse(owner) == "datasets"
    if isinstance(definition, ast.ImportFrom):
        return definition.module == "datasets"
    return isinstance(definition, ast.Name)


def _is_method(function: ast.expr, scope: Scope) -> bool:
    """False for a function of a class or a module, which makes rows."""
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    target = scope.resolve(owner)[0] if isinstance(owner, ast.Name) else None
    return not isinstance(target, ast.Import | ast.ImportFrom)


def _evaluate_arguments(call: ast.Call, positions: tuple[str, ...], scope: Scope) -> dict[str, Any]:
    """A call's arguments by their names, which must be constants."""
    arguments = dict(zip(positions, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:
            raise Computed(call)
        arguments[keyword.arg] = keyword.value
    if len(call.args) > len(positions):
        raise Computed(call)
    return {name: scope.evaluate(node) for name, node in arguments.items()}


def _files_of(files: Any, split: str) -> tuple[str, ...]:
    """Paths of `data_files` that a split has, whole; files without one are of the split train."""
    files = (files if isinstance(files, dict) else {"train": files}).get(split)
    paths = [files] if isinstance(files, str) else files
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return ()
    names = tuple(path.rpartition("/")[2] for path in paths)
    is_on_claim = len(set(names)) == len(names) and not any("://" in path for path in paths)
    return names if is_on_claim else ()


def is_folder(path: str) -> bool:
    """True for what load_dataset reads from the disk."""
    return is_folder_name(path) or path in _FILES


def _row_function(node: ast.AST) -> tuple[str, ast.Dict | None]:
    """Parameter and returned dict of a function of one row that does nothing else."""
    if isinstance(node, ast.Lambda) and len(node.args.args) == 1:
        body = node.body
        return node.args.args[0].arg, body if isinstance(body, ast.Dict) else None
    if not isinstance(node, ast.FunctionDef) or len(node.args.args) != 1:
        return "", None
    steps = [
        statement
        for statement in node.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    last = steps[0] if len(steps) == 1 else None
    result = last.value if isinstance(last, ast.Return) else None
    return node.args.args[0].arg, result if isinstance(result, ast.Dict) else None


def _column_of(node: ast.expr, parameter: str) -> str | None:
    """The column that `row["column"]` names; None for anything else."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return None
    key = node.slice
    if node.value.id != parameter or not isinstance(key, ast.Constant):
        return None
    return key.value if isinstance(key.value, str) else None


def _chat_of(node: ast.expr, parameter: str, scope: Scope) -> tuple[str, str]:
    """Column and system message of a chat of these two. One of the user's message alone has no
    words in the spec, which would leave the text without a chat template."""
    if not isinstance(node, ast.List) or len(node.elts) != 2:
        raise Computed(node)
    system, user = (_message_of(element, scope) for element in node.elts)
    column = _column_of(user[1], parameter)
    text = scope.evaluate(system[1])
    is_chat = (system[0], user[0]) == ("system", "user") and isinstance(text, str)
    if column is None or not is_chat:
        raise Computed(node)
    return column, text


def _message_of(node: ast.expr, scope: Scope) -> tuple[Any, ast.expr]:
    """Role and content of a literal message."""
    if not isinstance(node, ast.Dict):
        raise Computed(node)
    parts = {
        scope.evaluate(key): value
        for key, value in zip(node.keys, node.values, strict=True)
        if key is not None
    }
    if set(parts) != {"role", "content"}:
        raise Computed(node)
    return scope.evaluate(parts["role"]), parts["content"]
