"""Reads rows from JSONL, CSV and Parquet files, and from datasets of the hub.

The readers of `datasets` name neither the row nor the column of a bad value. They also copy what
they read to a cache on disk. Here files become one table that remembers where each row came from.

For the hub, `datasets` alone would ask it on every rank and in every attempt. Where that fails, it
may take another version from its cache. Here one process fetches one commit and converts it once
per cache, into a folder named after the commit. The folder is whole or absent, and all ranks read
it.
"""

import csv
import hashlib
import json
import os
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import is_offline_mode

from grpo_api.spec.dataset import DatasetFiles, DatasetSpec
from grpo_api.text.contract import DATASET_TOKEN_ENV

from ..gang import ranks
from ..hub.repositories import Hub, Repository, run_under_lease
from ..hub.retry import passing_error
from ..runtime.durable_files import (
    POINTER_REMEDY,
    is_lfs_pointer,
    name_unreadable,
    sync_folder,
    sync_tree,
)
from ..runtime.errors import BadInput, DiskFailed, is_volume_away

Row = dict[str, Any]
csv.field_size_limit(2**31 - 1)  # Python's own is 128 KiB, which a long prompt exceeds
SUFFIXES = {".jsonl": "JSONL", ".json": "JSONL", ".parquet": "Parquet", ".csv": "CSV"}


@dataclass(frozen=True)
class FileTable:
    """The rows of one file."""

    name: str
    """Path as the spec names it, with wildcards resolved."""
    table: pa.Table
    """The rows."""
    lines: list[int] | None = None
    """Line on which each row ends, from 1; None for formats without lines."""

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        if self.lines is None:
            return f"{self.name} row {index + 1}"
        return f"{self.name} line {self.lines[index]}"


@name_unreadable()
def read_files(
    files: DatasetFiles, root: Path, most_rows: int | None = None
) -> tuple[pa.Table, Callable[[int], str]]:
    """The rows of `spec.dataset.files` below `root`; the first `most_rows` of them, if it is set. A
    column that a file lacks is null there, and so is one that only later rows have. Also where a
    row (from 0) is, such as `train.jsonl line 7`.

    Raises:
        BadInput: a file is missing, empty, not UTF-8 or malformed; with file, row and column.
    """
    tables: list[FileTable] = []
    rows_left = most_rows
    for path in _resolve(files.paths, root):
        tables.append(_read_file(path, root, files.format, rows_left))
        if rows_left is not None:
            rows_left -= tables[-1].table.num_rows
    starts = [0, *accumulate(file.table.num_rows for file in tables)]

    def place(index: int) -> str:
        part = bisect_right(starts, index) - 1
        return tables[part].place(index - starts[part])

    try:
        table = pa.concat_tables([file.table for file in tables], promote_options="default")
        # What another version of `datasets` wrote there of the features, this one may not read.
        return table.replace_schema_metadata(), place
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        names = ", ".join(file.name for file in tables)
        raise BadInput(
            f"dataset.files.paths: a column has different types in {names}: {error}; give it one"
        ) from error


def _resolve(paths: list[str], root: Path) -> list[Path]:
    """The files that the paths name, wildcards in alphabetical order."""
    resolved: list[Path] = []
    for position, path in enumerate(paths):
        matches = sorted(root.glob(path)) if "*" in path else [root / path]
        matches = [match for match in matches if match.is_file()]
        if not matches:
            entries = sorted(root.iterdir()) if root.is_dir() else []
            # A folder's name ends in a slash: its files are named by FOLDER/*.
            names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
            there = ", ".join(names[:10]) or "nothing"
            raise BadInput(
                f"dataset.files.paths[{position}]: no file {path!r} in {root}; the folder has "
                f"{there}"
            )
        resolved += matches
    return resolved


def _read_file(path: Path, root: Path, declared: str, most_rows: int | None) -> FileTable:
    name = str(path.relative_to(root))
    kind = SUFFIXES.get(path.suffix.lower()) if declared == "Auto" else declared
    if kind is None:
        raise BadInput(
            f"{name}: unknown suffix {path.suffix!r}; set dataset.files.format to JSONL, Parquet "
            "or CSV"
        )
    if path.stat().st_size == 0:
        raise BadInput(f"{name} is empty; every file must have at least one row")
    if is_lfs_pointer(path):
        raise BadInput(f"{name} {POINTER_REMEDY}")
    if kind == "Parquet":
        return _read_parquet(path, name, most_rows)
    parse = _json_rows if kind == "JSONL" else _csv_rows
    return _table(name, parse, path, most_rows)


def _read_parquet(path: Path, name: str, most_rows: int | None) -> FileTable:
    try:
        file = FileTable(name, _parquet_table(path, most_rows))
    except MemoryError:
        raise
    # ValueError: the name of a column is no UTF-8.
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_volume_away(error):
            raise DiskFailed(f"{name}: {error}") from error
        raise BadInput(f"{name} can't be read as Parquet: {error}; copy the file again") from error
    _require_distinct(file.table.column_names, name)
    for field in file.table.schema:
        try:
            datasets.Features.from_arrow_schema(pa.schema([field]))
        except ValueError as error:
            raise BadInput(
                f"{name}, column {field.name!r}: {error} Leave it out, or write it as text"
            ) from error
    for column in file.table.column_names:
        try:
            file.table[column].validate(full=True)
        except pa.ArrowInvalid as error:
            place = file.place(_first_undecodable(file.table[column]))
            raise BadInput(
                f"{place}, column {column!r} is not valid ({error}); write the file again"
            ) from error
    return file


def _parquet_table(path: Path, most_rows: int | None) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    with pq.ParquetFile(path) as file:
        if most_rows is None:
            return file.read()
        # A batch with a column of categories ends with its row group, however small that is.
        for batch in file.iter_batches(batch_size=most_rows or 1):
            batches.append(batch)
            if sum(each.num_rows for each in batches) >= most_rows:
                break
        return pa.Table.from_batches(batches, file.schema_arrow).slice(0, most_rows)


def _first_undecodable(column: pa.ChunkedArray) -> int:
    """Index of the first cell that has no Python value; 0 if every cell has one."""
    for index, cell in enumerate(column):
        try:
            cell.as_py()
        except UnicodeDecodeError:
            return index
    return 0


def _table(
    name: str,
    parse: Callable[[Path, str], Iterator[tuple[int, Row]]],
    path: Path,
    most_rows: int | None,
) -> FileTable:
    numbered = parse(path, name)
    columns: dict[str, None] = {}
    lines: list[int] = []
    rows: list[Row] = []
    for line, row in numbered:
        columns.update(dict.fromkeys(row))
        # Rewards get every column from the first row on, also one that a later row begins.
        if most_rows is None or len(rows) < most_rows:
            lines.append(line)
            rows.append(row)
    if not columns:
        raise BadInput(f"{name} has no rows; every file must have at least one")
    return FileTable(
        name, pa.table({column: _column(name, column, rows, lines) for column in columns}), lines
    )


_MISFITS = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError)


def _column(name: str, column: str, rows: list[Row], lines: list[int]) -> pa.Array:
    """One column; on failure, the first row whose value does not go with those before it is
    named."""
    values = [row.get(column) for row in rows]
    try:
        return pa.array(values)
    except _MISFITS as error:
        misfit = bisect_left(range(len(values)), True, key=lambda at: _is_misfit(values[: at + 1]))
        line, value = lines[misfit], values[misfit]
        problem = f"{value!r:.80} is not of the type of the rows before ({error})"
        raise BadInput(
            f"{name} line {line}, column {column!r}: {problem}; give every row the same type"
        ) from error


def _is_misfit(values: list[Any]) -> bool:
    """True if the last value does not go with those before it."""
    try:
        pa.array(values)
    except _MISFITS:
        return True
    return False


def _json_rows(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    """Line number and object of each line that is not blank."""

    def unique(pairs: list[tuple[str, Any]]) -> Row:
        row = dict(pairs)
        if len(row) < len(pairs):
            _require_distinct([key for key, _ in pairs], f"{name} line {number}")
        return row

    # undecodable bytes become lone surrogates here, so that the check below can name the column
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=unique)
            except (ValueError, RecursionError) as error:
                raise BadInput(
                    f"{name} line {number} is not a JSON object: {error}; write one per line, as "
                    "plain text in UTF-8"
                ) from error
            if not isinstance(row, dict):
                raise BadInput(
                    f"{name} line {number} is not a JSON object but {line.strip()!r:.60}; write "
                    "one per line"
                )
            _check_text(name, number, row)
            yield number, row


def _csv_rows(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    """Line number and cells of each record, by the header's names."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        records = filter(None, reader)  # without blank lines
        try:
            header = next(records, [])
            _require_distinct(header, f"{name} line 1")
            for cells in records:
                if len(cells) != len(header):
                    problem = f"{len(cells)} cells under a header of {len(header)}"
                    raise BadInput(
                        f"{name} line {reader.line_num}: {problem}; quote cells with commas"
                    )
                row = dict(zip(header, cells, strict=True))
                _check_text(name, reader.line_num, row)
                yield reader.line_num, row
        except csv.Error as error:
            raise BadInput(
                f"{name} line {reader.line_num} is not CSV: {error}; quote each cell with quotes "
                'or commas, and write its " as ""'
            ) from error


def _require_distinct(columns: list[str], place: str) -> None:
    for position, column in enumerate(columns):
        if column in columns[:position]:
            problem = f"column {column!r} occurs twice"
            raise BadInput(f"{place}: {problem}; give each column its own name")


def _check_text(name: str, line: int, row: Row) -> None:
    """Rejects text that is not UTF-8, naming the column."""
    if _bad_text(row) is None:
        return
    for column, value in row.items():
        bad = _bad_text([column, value])
        if bad is not None:
            raise BadInput(
                f"{name} line {line}, column {column!r} is not UTF-8 ({bad}); convert the file"
            )


def _bad_text(value: Any) -> str | None:
    """The characters of a value that no UTF-8 file can contain: undecodable bytes, or halves of
    escaped pairs."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        characters = error.object[error.start : error.end]
        undecoded = all("\udc80" <= character <= "\udcff" for character in characters)
        return repr(characters.encode(errors="surrogateescape") if undecoded else characters)
    return None


_REFUSED = (
    FileNotFoundError,
    ConnectionError,
    datasets.exceptions.DatasetGenerationError,
    ValueError,
    RuntimeError,
    StopIteration,
)
_LONGEST_SPLIT = 10**15
"""Rows, more than any split has."""


def dataset_repository(dataset: DatasetSpec) -> Repository:
    """The repository that `dataset.name` names."""
    return Repository("dataset", dataset.name or "", dataset.revision, "dataset", _token())


def _token() -> str | None:
    return os.environ.get(DATASET_TOKEN_ENV, "").strip() or None


def read_hub(
    dataset: DatasetSpec, hub: Hub, most_rows: int | None = None
) -> tuple[datasets.Dataset, bool]:
    """The rows of a hub dataset, or of a folder that stands in for one, and whether these are all.
    A collective.

    With `most_rows` only the first rows, of which no more is fetched than is needed, unless the
    cache has all of them.

    Raises:
        BadInput: there is no such dataset, configuration or split, or no right to it; or it can't
            be read.
        Transient: the hub can't be asked now, or there is no room.
    """
    repository = dataset_repository(dataset)
    if repository.folder is not None:
        if most_rows is not None:
            return _first_rows(dataset, dataset.revision, most_rows)
        return _load_dataset(dataset, dataset.revision), True
    commit = hub.commit(repository)
    folder = _folder(dataset, repository, commit)

    def convert() -> None:
        if not _has_rows(folder):
            _convert(dataset, commit, folder)

    def convert_once() -> None:
        if not _has_rows(folder):
            run_under_lease(repository, convert, hub, folder.parent)

    if is_offline_mode():
        if not _has_rows(folder):
            return _beginning(_load_dataset(dataset, dataset.revision), most_rows)
    elif most_rows is None:
        ranks.run_on_node_leader(convert_once)
    elif not _has_rows(folder):
        return run_under_lease(repository, lambda: _first_rows(dataset, commit, most_rows), hub)
    return _beginning(datasets.load_from_disk(str(folder)), most_rows)


def _beginning(rows: datasets.Dataset, most_rows: int | None) -> tuple[datasets.Dataset, bool]:
    """The first of all rows, and whether these are all."""
    if most_rows is None or len(rows) <= most_rows:
        return rows, True
    return rows.select(range(most_rows)), False


def _folder(dataset: DatasetSpec, repository: Repository, commit: str) -> Path:
    """Where the rows of that commit are, once they are there."""
    choice = json.dumps([dataset.config, dataset.split])
    name = hashlib.sha256(choice.encode()).hexdigest()[:16]
    commits = Path(datasets.config.HF_DATASETS_CACHE) / "commits" / repository.storage.name
    return commits / (commit or "none") / name


def _has_rows(folder: Path) -> bool:
    """Whether rows are there, and no crash of the volume's server has damaged them.

    Raises:
        DiskFailed: the volume does not answer.
    """
    try:
        datasets.load_from_disk(str(folder))
    # A file that is missing or empty, and one that is cut: Arrow's error is a ValueError, too.
    except (OSError, ValueError) as error:
        if is_volume_away(error):
            raise DiskFailed(f"{folder}: {error}") from error
        return False
    return True


def _convert(dataset: DatasetSpec, commit: str, folder: Path) -> None:
    """Fetch and convert under another name, so that the folder appears whole."""
    work = folder.with_name(f".{folder.name}")
    # Of a process that was killed: the lease allows one at a time.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _load_dataset(dataset, commit, work / "cache").save_to_disk(work / "rows")
        sync_tree(work / "rows")
        shutil.rmtree(folder, ignore_errors=True)
        (work / "rows").rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _load_dataset(
    dataset: DatasetSpec, revision: str | None, cache: Path | None = None
) -> datasets.Dataset:
    cache_folder = None if cache is None else str(cache)
    with _refusals(dataset):
        return datasets.load_dataset(
            dataset.name, dataset.config, split=dataset.split, revision=revision, token=_token(),
            cache_dir=cache_folder,
        )  # fmt: skip


def _first_rows(
    dataset: DatasetSpec, revision: str | None, most_rows: int
) -> tuple[datasets.Dataset, bool]:
    """The first rows of the split, and whether these are all. A part such as `train[:10%]` can't
    be streamed: those of the first part that are in it for certain."""
    part = dataset.split.partition("+")[0] if "[" in dataset.split else dataset.split
    open_split = partial(
        datasets.load_dataset, dataset.name, dataset.config, revision=revision, token=_token(),
        streaming=True,
    )  # fmt: skip
    with _refusals(dataset):
        # It refuses what a stream takes and training does not, such as `train + test`.
        datasets.NamedSplit(dataset.split)
        if part != dataset.split:  # a later part may be of no split
            open_split(split="+".join(each.partition("[")[0] for each in dataset.split.split("+")))
        stream = open_split(split=part.partition("[")[0])
        # What a CSV holds is known once it is read; it has no images to leave undecoded.
        undecoded = stream.decode(False) if stream.features else stream
        first = list(undecoded.take(most_rows))
        if not first:
            raise ValueError("it has no row")
        rows = datasets.Dataset.from_list(first, features=stream.features)
        is_whole = len(rows) < most_rows and part == dataset.split
        if "[" in part:
            rows = rows.select(_rows_of_part(part, len(rows), most_rows))
        return rows, is_whole


def _rows_of_part(part: str, count: int, most_rows: int) -> range:
    """Which of a split's first `count` rows are in a part of it, however many follow; none follow
    where they are fewer than `most_rows`."""
    instruction, split = datasets.ReadInstruction.from_spec(part), part.partition("[")[0]
    # The more rows a split has, the later a share of it begins and ends.
    longest = count if count < most_rows else _LONGEST_SPLIT
    (begin,) = instruction.to_absolute({split: longest})
    (end,) = instruction.to_absolute({split: count})
    return range(begin.from_, end.to)


@contextmanager
def _refusals(dataset: DatasetSpec) -> Iterator[None]:
    """What can't be loaded, now and later, is bad input."""
    try:
        yield
    except _REFUSED as error:
        if passing_error(error) and not is_offline_mode():
            raise
        which = f"{dataset.name!r} (config {dataset.config or 'default'}, split {dataset.split})"
        problem = "a file of it is empty" if isinstance(error, StopIteration) else error
        if type(error) is datasets.exceptions.DatasetGenerationError:
            problem = error.__cause__ or error  # it says itself that there was an error
        raise BadInput(
            f"dataset {which} can't be loaded: {' '.join(str(problem).split())}; check name, "
            "config, split, tokenSecretRef and its files"
        ) from error
