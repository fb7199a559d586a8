"""Finds a run's history in anybody's file, in a folder, or in the cluster.

In the cluster a short-lived pod reads it with the user's own rights.

`grpo diagnose` takes a run's own terminal output, too: transformers prints each step's logs as a
Python dict beside its progress bar. Such a dict has no step, and ms-swift logs its step as a part
of all: `"global_step/max_steps": "15/1000"`.
"""

import ast
import csv
import io
import math
import re
import sys
import tempfile
from argparse import Namespace
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_api.findings.step_row import (
    EVALUATION_KEYS,
    RANK_SECONDS,
    REWARD,
    STEP_KEYS,
    TRAINER_STEP_KEYS,
    StepRow,
    as_number,
    step_row,
    without_prefix,
)
from grpo_api.report.history import (
    ATTEMPT,
    METRICS_FILE,
    STEP,
    Row,
    newest_attempt,
    parse_json,
    parse_lines,
    standing_rows,
)
from grpo_api.text.contract import EXPORT_FOLDER

from ..cluster import kubectl
from ..cluster.delivery_pod import start_delivery
from ..cluster.download import download_files
from ..show.errors import ManifestError, NotYet

SOURCE_HELP = "name of a GRPOJob, a run's or a model's folder, a file of logged steps, or -"


def load_history(options: Namespace, source: str, name: str = METRICS_FILE) -> list[Row]:
    """The rows of a run, or the lines of another of its history files.

    `source`: an existing file or folder, or - for standard input; else the name of a job.

    Raises:
        ManifestError: the file can't be read, or the folder has none.
        NotYet: the job has no history.
        KubectlError: the cluster does not give it.
    """
    if source == "-":
        return _dictionaries(sys.stdin.read().removeprefix("\ufeff"), is_csv=False)
    path = Path(source)
    if path.is_dir():
        return _rows_in(path, name)
    if path.exists() or "/" in source or path.suffix:
        return load_rows(path)
    return load_job_history(options, source, name)


def load_job_history(options: Namespace, job_name: str, name: str) -> list[Row]:
    """The lines of a history file of a job in the cluster.

    Raises:
        NotYet: the job has no history.
        KubectlError: the cluster does not give it.
    """
    with tempfile.TemporaryDirectory() as folder:
        return load_rows(_download(options, job_name, name, Path(folder)))


def load_steps(options: Namespace, source: str) -> list[StepRow]:
    """The steps that a run consists of, as the rules judge them.

    Raises:
        ManifestError: as load_history; or no reward and no evaluation is logged. By other numbers
            alone a fine-tuning on answers, or one panel of a tracker, would be judged as a run that
            has no rewards.
        NotYet, KubectlError: as load_history.
    """
    logged = standing_rows(number_steps(load_history(options, source)))
    attempt = logged[-1].get(ATTEMPT) if logged else None
    # The ranks of earlier attempts were other pods, maybe on other nodes.
    of_attempt = (
        row if row.get(ATTEMPT) == attempt else {**row, RANK_SECONDS: ()} for row in logged
    )
    steps = [row for row in map(step_row, of_attempt) if row is not None]
    if not steps or not _has_rewards(logged):
        raise ManifestError(
            f"{source} has no steps with TRL's key reward: give what the trainer printed, JSON "
            "lines, CSV with a header, or trainer_state.json"
        )
    return steps


def _rows_in(folder: Path, name: str) -> list[Row]:
    """The rows of a file of a folder."""
    file = _file_in(folder, name)
    try:
        return load_rows(file)
    except ManifestError:
        # A new attempt may have written its own file and deleted the older ones since.
        newer_file = _file_in(folder, name)
        if newer_file == file:
            raise
        return load_rows(newer_file)


def _file_in(folder: Path, name: str) -> Path:
    """The file of a folder: of an attempt or a model, else of a run's newest attempt."""
    paths = [path.relative_to(folder).as_posix() for path in folder.glob(f"*/{METRICS_FILE}")]
    newest = newest_attempt(paths)
    places = [folder, folder / EXPORT_FOLDER]
    if newest:
        places.insert(1, folder / newest)
    files = [place / name for place in places if (place / name).is_file()]
    if not files:
        raise ManifestError(
            f"{folder} has no {name}: name a run's folder on its volume, which `grpo run` has in "
            "_volumes, or an exported model's"
        )
    return files[0]


def _download(options: Namespace, job_name: str, name: str, folder: Path) -> Path:
    metadata, job = kubectl.get_job(options, job_name)
    if not job.spec.checkpoint.is_lasting:
        raise NotYet(
            f"{job_name} keeps no history: it has no spec.checkpoint.volume, volumeClaimTemplate "
            "or store"
        )
    with start_delivery(options, metadata, job, history=True) as delivery:
        wanted = {
            file: entry for file, entry in delivery.wait_for_listing().files.items() if file == name
        }
        if not wanted:
            raise NotYet(f"{job_name} has no {name} yet, or its spec.samples.groups is 0")
        download_files(folder, wanted, delivery.read_file, lambda _: None)
    return folder / name


HISTORY_KEY = "log_history"
"""Where trainer_state.json has its steps."""


def load_rows(path: Path) -> list[Row]:
    """The logged dictionaries of a file, in its order.

    Raises:
        ManifestError: it can't be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    # PowerShell's > writes UTF-16.
    encoding = "utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
    # A kill may have cut a character in two.
    text = content.decode(encoding, errors="replace")
    return _dictionaries(text, is_csv=path.suffix.lower() in (".csv", ".tsv"))


def sampled_completions(lines: Iterable[Row]) -> Iterator[Row]:
    """Each completion of samples.jsonl with its step and prompt; what has another form is left
    out."""
    for line in lines:
        for group in dictionaries_of(line.get("groups")):
            for completion in dictionaries_of(group.get("completions")):
                yield {STEP: step_of(line), "prompt": group.get("prompt"), **completion}


def step_of(line: Row) -> int:
    """The step of a line; 0 where it has none."""
    step = line.get(STEP)
    return step if isinstance(step, int) else 0


def dictionaries_of(value: Any) -> list[Row]:
    """The dictionaries of a list; none of anything else."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _dictionaries(text: str, *, is_csv: bool) -> list[Row]:
    if is_csv:
        return _csv_rows(text)
    whole = parse_json(text)
    if isinstance(whole, dict) and isinstance(whole.get(HISTORY_KEY), list):
        whole = whole[HISTORY_KEY]
    if isinstance(whole, list):
        return dictionaries_of(whole)
    rows = parse_lines(text)
    if not _has_rewards(rows):
        # A program may print its settings as JSON, and its steps otherwise.
        printed = list(printed_rows(text))
        rows = printed if _has_rewards(printed) else rows or printed
    # A table without the suffix of one is known by its columns.
    return rows or [row for row in _csv_rows(text) if step_row({STEP: 1, **row})]


def _has_rewards(rows: Iterable[Row]) -> bool:
    """Return True if a reward or an evaluation is logged. Of a run whose rewards are all silent the
    key is there, without a value."""
    keys = {without_prefix(str(key)) for row in rows for key in row}
    return not keys.isdisjoint({REWARD, *EVALUATION_KEYS})


def _csv_rows(text: str) -> list[Row]:
    """The rows of a table with a header, whose columns a comma, a semicolon or a tab separates."""
    csv.field_size_limit(2**31 - 1)  # a completion may have more than the default, 128 KiB
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    lines = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True
    )
    run = _panel_run(lines.fieldnames or ())
    rows: list[Row] = []
    for line in lines:
        # None is the key of what a line has beyond the header.
        row: Row = {str(key).strip().removeprefix(run): value for key, value in line.items()}
        if delimiter != ",":
            row = {key: _with_decimal_point(value) for key, value in row.items()}
        rows.append(row)
    return rows


_PANEL = " - "
_DECIMAL_COMMA = re.compile(r"-?[0-9]+,[0-9]+(?:[eE][-+]?[0-9]+)?")


def _panel_run(columns: Sequence[str]) -> str:
    """The prefix of each key in the CSV of a panel of W&B, `RUN - train/reward`; else empty."""
    names = (name for name in columns if name and not name.endswith(("__MIN", "__MAX")))
    runs = {name.rpartition(_PANEL)[0] for name in names if _PANEL in name}
    if len(runs) > 1:
        raise ManifestError(f"the table has {len(runs)} runs ({', '.join(sorted(runs))}); give one")
    return f"{runs.pop()}{_PANEL}" if runs else ""


def _with_decimal_point(value: Any) -> Any:
    is_number = isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip())
    return value.replace(",", ".") if is_number else value


_DICT = re.compile(r"\{['\"].*\}")
_NOT_FINITE = re.compile(r"(?<=: )-?(?:nan|inf)(?=[,}])")
_PARTS = "global_step/max_steps"


def printed_rows(text: str) -> Iterator[Row]:
    """Yield the dicts in lines of a terminal, whatever text is around them."""
    for line in text.splitlines():  # a progress bar ends its lines by "\r"
        match = _DICT.search(line)
        if match is None:
            continue
        row = parse_json(match[0])
        if row is None:
            # Python prints NaN and infinity as names, which no literal has.
            literal = _NOT_FINITE.sub(lambda name: repr(name[0]), match[0])
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                row = ast.literal_eval(literal)
        if isinstance(row, dict):
            yield row


def number_steps(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows with their steps; where none has one, each reward that was logged is one more."""
    rows = [_with_whole_step(row) for row in rows]
    known_steps = [_trainer_step(row) for row in rows]
    if any(step is not None for step in known_steps):
        return _fill_steps(rows, known_steps)
    if any(without_prefix(key) in STEP_KEYS for row in rows for key in map(str, row)):
        return rows
    step, steps = 0, []
    for row in rows:
        # Of an evaluation and of the run's end no reward is logged under TRL's key of a step.
        parsed = step_row({STEP: 1, **row})
        if parsed is not None and REWARD in parsed.values:
            step += 1
        steps.append({STEP: max(1, step), **row})
    return steps


def _trainer_step(row: Row) -> float | None:
    """The row's step as the trainer counts it; None where it has none."""
    for key, value in row.items():
        if without_prefix(str(key)).lower() in TRAINER_STEP_KEYS:
            step = as_number(value)
            if step is not None and math.isfinite(step):
                return step
    return None


def _fill_steps(rows: Sequence[Row], steps: Sequence[float | None]) -> Sequence[Row]:
    """The rows with the trainer's steps. W&B also has rows without one, of durations that TRL logs
    before their step, and counts all rows as `_step`."""
    step = [step for step in steps if step is not None][-1]
    filled = []
    for row, own_step in zip(reversed(rows), reversed(steps), strict=True):
        step = step if own_step is None else own_step
        filled.append({**row, STEP: step})
    return filled[::-1]


def _with_whole_step(row: Mapping[str, object]) -> Row:
    step, _, _ = str(row.get(_PARTS, "")).partition("/")
    return {STEP: int(step), **row} if step.isdecimal() else dict(row)
