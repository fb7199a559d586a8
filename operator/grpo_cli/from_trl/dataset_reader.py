"""Follows a trainer's dataset back to load_dataset, through what the script does with its rows.

Some of it is the spec's own words: renamed columns, and a slice from the start. So is a `map` that
builds the prompt of a column and a fixed system message. Rows that are made in any other way can be
had only by running the script. The job then names a file, and the note says how to write it.
"""

import ast
import re
from typing import Any

from .interpreter.statements import Interpreter
from .interpreter.values import (
    COMPUTED,
    ITEM,
    Arguments,
    Column,
    Computed,
    Entries,
    Function,
    Items,
    Object,
    Row,
    Store,
    Unknown,
    Use,
    Value,
    constant,
    line_of,
)
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

    def __init__(self, run: TrlRun, interpreter: Interpreter) -> None:
        self.run = run
        self.interpreter = interpreter
        self._made_rows: dict[int, Value] = {}
        """What the functions of `map` make of a row, by the ids of their calls."""
        self._files: tuple[ast.AST, Any] | None = None
        """Call that loads files, and its data_files."""
        self._kept: dict[str, tuple[str, int]] = {}
        """Columns that a `map` gives another name and keeps, with that name and its line."""

    @property
    def use(self) -> DatasetUse:
        """What is read so far."""
        return self.run.dataset

    def note_call(self, call: Object) -> None:
        """Follow the function that a `map` calls, with the names that it has now."""
        function = call.arguments.positional[0].value if call.arguments.positional else None
        if call.method and call.name == "map" and isinstance(function, Function):
            row = Row(call.node, Store("entries"))
            arguments = Arguments([Use(row, call.node)])
            num_calls = len(self.interpreter.calls)
            made = self.interpreter.follow(function, arguments)
            calls = self.interpreter.calls[num_calls:]
            # A library's function that gets the row may change it.
            is_open = any(value is row for inner in calls for value in inner.arguments.values)
            self._made_rows[id(call)] = Unknown(call.node) if is_open else made

    def read(self, use: Use | None, line: int) -> None:
        """Read the trainer's argument; `line` is the trainer's own."""
        if use is None:
            self.use.is_made_by_script = True
            self.run.note(line, "train_dataset", "", f"it is not given here; {WRITE_ROWS}")
            return
        self._files = None
        self._follow(use.value, use)
        if self._files is not None:
            self._take_files(*self._files)

    def _follow(self, value: Value, use: Use) -> None:
        """Read the base of the rows first, then each step on the way back to the trainer; `use` is
        the trainer's argument."""
        changes = self.interpreter.changes
        is_changed = any(c.owner is value and c.attribute == "set_transform" for c in changes)
        base = value.maker if isinstance(value, Object) else value
        if isinstance(base, Unknown) or is_changed or not isinstance(value, Object):
            why = base.why if isinstance(base, Unknown) and base.why != COMPUTED else ""
            self._is_made(use.node, why)
        elif value.path in ("load_dataset", "datasets.load_dataset"):
            self._load(value)
        elif value.method:
            self._follow(value.method[0], use)
            self._take_step(value)
        else:
            self._is_made(value.node)

    def _is_made(self, node: ast.AST, why: str = "") -> None:
        if self.use.is_made_by_script:
            return
        self.use.is_made_by_script = True
        self.run.note_node(node, "train_dataset", f"{why}; {WRITE_ROWS}" if why else WRITE_ROWS)

    def _constant(self, value: Value) -> Any:
        plain, assumptions = constant(value)
        self.run.add_notes(assumptions)
        return plain

    def _arguments(self, call: Object, positions: tuple[str, ...]) -> dict[str, Any]:
        """A call's arguments by their names, which must be constants."""
        if call.arguments.has_unknown or len(call.arguments.positional) > len(positions):
            raise Computed(COMPUTED)
        given = call.arguments.by_name(positions)
        return {name: self._constant(use.value) for name, use in given.items()}

    def _load(self, call: Object) -> None:
        try:
            arguments = self._arguments(call, _LOADER_POSITIONS)
        except Computed as error:
            self._is_made(call.node, str(error))
            return
        path, files = arguments.pop("path", None), arguments.pop("data_files", None)
        self.use.config, self.use.split = arguments.pop("name", None), arguments.pop("split", None)
        self.use.revision = arguments.pop("revision", None)
        if path in _FILES and files is not None:
            self._files = call.node, files
            self.use.config = None
        elif isinstance(path, str) and files is None and not is_folder(path):
            self.use.name = path
        else:
            self._is_made(call.node)
        line = call.line
        if arguments.get("streaming") is True:
            advice = "TRL trains a stream in its order: dataset.shuffle is false"
            self.run.note(line, "load_dataset(streaming)", "", advice)
            self.run.config["shuffle_dataset"] = TrlSetting(False, line)
        for name, value in arguments.items():
            if name in ("token", "use_auth_token"):
                advice = "set dataset.tokenSecretRef"
                self.run.note(line, f"load_dataset({name})", "", advice)
            elif name not in _LOADING_ONLY:
                self._is_made(call.node, f"load_dataset({name}={value!r}) is not taken")

    def _take_files(self, node: ast.AST, files: Any) -> None:
        """Take the files of the split, which no step has named before the last."""
        paths = _files_of(files, self.use.split or "train")
        if not paths:
            self._is_made(node)
        if self.use.is_made_by_script:
            return
        self.use.files = paths
        advice = "put the files on the claim of dataset.files"
        if any(path.endswith(".csv") for path in paths):
            advice += "; rewards get every value of a CSV file as a text"
        self.run.note(line_of(node), "data_files", ", ".join(paths), advice)

    def _take_step(self, call: Object) -> None:
        """One method of the rows."""
        method = call.name
        if self.use.is_made_by_script or method in _WITHOUT_EFFECT:
            return
        is_taken = False
        try:
            if method == ITEM:
                is_taken = self._take_split(self._constant(call.arguments.positional[0].value))
            elif method == "map":
                is_taken = self._take_map(call)
            elif method == "rename_column":
                arguments = self._arguments(call, _RENAME_POSITIONS)
                old, new = (arguments.get(name) for name in _RENAME_POSITIONS)
                is_taken = self._rename({new: old})
            elif method == "rename_columns":
                names = self._arguments(call, ("column_mapping",))["column_mapping"]
                is_taken = self._rename({new: old for old, new in names.items()})
            elif method in ("select", "take"):
                is_taken = self._take_first(call)
        except (Computed, LookupError, ValueError, AttributeError):
            is_taken = False
        if not is_taken:
            self._is_made(call.node, "" if method == ITEM else f".{method}(…)")

    def _take_split(self, split: Any) -> bool:
        if not isinstance(split, str) or self.use.split is not None:
            return False
        self.use.split = split
        return True

    def _rename(self, names: dict[Any, Any]) -> bool:
        """Take new names for columns; False if the spec has no word for them."""
        texts = [*names, *names.values()]
        if not all(isinstance(text, str) and text for text in texts):
            return False
        if self._has_prompt and "prompt" in texts:
            return False
        for new, old in names.items():
            source = self.use.columns.pop(old, old)
            if new == "prompt":
                self.use.prompt_column = source
                continue
            self.use.columns[new] = source
            if self._has_prompt and self.use.prompt_column == old:
                self.use.prompt_column = new
        return True

    def _take_first(self, call: Object) -> bool:
        """Take the first N rows as a slice of the split."""
        given = call.arguments
        argument = (
            given.positional[0].value if len(given.uses) == len(given.positional) == 1 else None
        )
        is_range = isinstance(argument, Object) and argument.path == "range"
        if isinstance(argument, Object) and is_range and len(argument.arguments.positional) == 1:
            argument = argument.arguments.positional[0].value
        elif argument is None or call.name == "select":
            return False
        count = self._constant(argument)
        split = self.use.split or "train"
        is_plain = self.use.name is not None and split.isidentifier()
        if not isinstance(count, int) or count < 1 or not is_plain:
            return False
        self.use.split = f"{split}[:{count}]"
        return True

    @property
    def _has_prompt(self) -> bool:
        """True once a step has built the prompt."""
        return self.use.prompt_column != "prompt" or self.use.system_prompt is not None

    def _take_map(self, call: Object) -> bool:
        """Take a function that only builds the prompt and renames columns."""
        options = set(call.arguments.named) - set(_MAPPING_ONLY)
        row = self._made_rows.get(id(call))
        if options or not isinstance(row, Entries) or self._has_prompt or self.use.columns:
            return False  # the function reads columns as the steps before it left them
        prompt: tuple[str, str | None] = (self.use.prompt_column, None)
        columns: dict[Any, Any] = {}
        for key, use in row.cells.items():
            column = use.value.name if isinstance(use.value, Column) else None
            if key == "prompt":
                prompt = (column, None) if column else self._chat(use.value)
            elif column is None:
                return False
            elif column != key:
                columns[key] = column
        if "remove_columns" not in call.arguments.named:
            self._kept = {old: (new, call.line) for new, old in columns.items()}
        return self._take_row(prompt, columns)

    def note_kept_columns(self) -> None:
        """Name the columns that the script's rows have under two names, where a reward may read the
        one that a job's rows lack."""
        texts = self.run.reward_files.values()
        for old, (new, line) in self._kept.items():
            is_read = any(re.search(rf"\b{re.escape(old)}\b", text) for text in texts)
            if is_read and self.use.columns.get(new) == old:
                advice = f"a reward may read it; a job's rows have it as {new} alone"
                self.run.note(line, f"column {old}", "", advice)

    def _chat(self, value: Value) -> tuple[str, str]:
        """Column and system message of a chat of these two. One of the user's message alone has no
        words in the spec, which would leave the text without a chat template."""
        messages = [use.value for use in value.uses] if isinstance(value, Items) else []
        parts = [message.cells for message in messages if isinstance(message, Entries)]
        if len(messages) != 2 or any(set(part) != {"role", "content"} for part in parts):
            raise Computed(COMPUTED)
        system, user = parts
        roles = [self._constant(part["role"].value) for part in (system, user)]
        text, column = self._constant(system["content"].value), user["content"].value
        if (
            roles != ["system", "user"]
            or not isinstance(text, str)
            or not isinstance(column, Column)
        ):
            raise Computed(COMPUTED)
        return column.name, text

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
