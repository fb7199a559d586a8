"""Loads `spec.dataset`: rows with a `prompt` column that fits the model, and a fingerprint of them.

Bad data stops a run here, before its first step, and the message says which row and which column.
All ranks get the same rows in the same order.

All columns are the reward functions' arguments. TRL passes them under their names, beside arguments
of its own, and takes two of them for pictures that belong to the prompt. Only text prompts are
trained on here, so TRL sees these two columns under another name.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from grpo_api.report.preflight import PromptLengths
from grpo_api.report.training_metrics import PROMPTS, PROMPTS_DROPPED, PROMPTS_DUPLICATE
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.spec.training import TrainingSpec
from grpo_api.text.contract import DATA_MOUNT, DATA_MOUNT_ENV

from ..gang import ranks
from ..hub.repositories import Hub
from ..runtime.errors import BadInput
from .prompts import Prompt, PromptEncoder, build_prompt
from .row_sources import read_files, read_hub

RESERVED = (
    "completion", "prompts", "completions", "completion_ids", "trainer_state", "log_extra",
    "log_metric", "environments",
)  # fmt: skip
"""Names by which TRL hands reward functions something else, or nothing."""
PICTURES = ("image", "images")
_HIDDEN = "column "

_MEDIA = (datasets.Image, datasets.Audio, datasets.Video)
_TIMES = re.compile("date|time|duration")
"""In Arrow's names of the types of columns, whatever they are nested in."""


def hide_columns(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows as TRL gets them."""
    new_names: dict[str, str] = {}
    for name in rows.column_names:
        if name in PICTURES or name.startswith(_HIDDEN):
            new_names[name] = _HIDDEN + name
    return rows.rename_columns(new_names)


def restore_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row that TRL got, as the reward functions get it."""
    return {name.removeprefix(_HIDDEN): value for name, value in row.items()}


def without_decoding(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows with pictures, sounds and films as they are stored: `{bytes, path}`.

    Decoding needs libraries that the image lacks, and makes objects that are different in every
    process.
    """
    features = datasets.Features(
        {name: _undecoded_feature(feature) for name, feature in rows.features.items()}
    )
    return rows if features == rows.features else rows.cast(features)


def _undecoded_feature(feature: Any) -> Any:
    if isinstance(feature, _MEDIA):
        return type(feature)(decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded_feature(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded_feature(part) for name, part in feature.items()}
    return feature


Place = Callable[[int], str]
"""From a row's index to words that say where it is."""


@dataclass(frozen=True)
class Prompts:
    """The training prompts."""

    rows: datasets.Dataset
    """Column `prompt` (text, or a list of chat messages) beside the dataset's own columns, in the
    dataset's order."""
    num_dropped: int
    """Prompts left out because they are longer than training.maxPromptLength."""
    num_duplicates: int
    """Prompts that occurred before; still in `rows` under dataset.onDuplicatePrompt Keep."""
    fingerprint: str
    """sha256 of the rows, in hexadecimal: equal for the same content under the same mapping."""
    lengths: PromptLengths
    """Tokens of the prompts, of those that are too long, too."""

    @property
    def counts(self) -> dict[str, int]:
        """How many prompts became what, by the keys of grpo_api.report.training_metrics."""
        return {
            PROMPTS.key: len(self.rows),
            PROMPTS_DROPPED.key: self.num_dropped,
            PROMPTS_DUPLICATE.key: self.num_duplicates,
        }

    @property
    def dropped_message(self) -> str:
        """The rows that were left out, as the end of a sentence; empty if all are trained on."""
        if not self.num_dropped:
            return ""
        return (
            f"; {self.num_dropped} of {len(self.rows) + self.num_dropped} prompts were dropped "
            "as too long"
        )


def load_prompts(
    dataset: DatasetSpec,
    training: TrainingSpec,
    tokenizer: Any,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    vocabulary: int | None = None,
    root: Path | None = None,
    hub: Hub | None = None,
) -> Prompts:
    """The prompts of a run; `root` is where files are mounted (None: the pod's mount),
    `template_kwargs` and `vocabulary` are as for PromptEncoder. A collective.

    Raises:
        BadInput: the dataset can't be used as declared; with the row and the column. Or a rank has
            other rows than the others.
        Transient: the hub can't be asked now, or there is no room.
    """
    encoder = PromptEncoder(tokenizer, template_kwargs, vocabulary)
    rows = read_rows(dataset, root=root or data_root(), hub=hub)
    prompts = make_prompts(rows, dataset, training, encoder)
    _require_same_rows(prompts)
    return prompts


def _require_same_rows(prompts: Prompts) -> None:
    """Make sure that all ranks have the same rows: each trains on its part of a group, by the
    row's number, and the last step is that of the number of rows. A collective."""
    everyone = ranks.gather(prompts.fingerprint)
    others = [number for number, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise BadInput(
            f"dataset: {ranks.rank_names(others)} read other rows than rank 0. Do all nodes mount "
            "the same files, and did these, or the ConfigMap, change while the pods started?"
        )


def data_root() -> Path:
    """The folder in which the pod's files of spec.dataset are mounted."""
    return Path(os.environ.get(DATA_MOUNT_ENV, DATA_MOUNT))


@dataclass(frozen=True)
class Rows:
    """The rows of a dataset, or the first of them, with the columns' names as the spec gives
    them."""

    table: datasets.Dataset
    """The rows."""
    place: Place
    """Where a row is, for messages."""
    is_whole: bool = True
    """False if there may be more rows than were read."""


def read_rows(
    dataset: DatasetSpec, *, root: Path, hub: Hub | None = None, most_rows: int | None = None
) -> Rows:
    """The rows of a dataset, or the first `most_rows`. A collective for a dataset of the hub.

    Raises:
        BadInput: they can't be read, or dataset.columns doesn't fit them.
        Transient: the hub can't be asked now, or there is no room.
    """
    if dataset.name:
        rows, is_whole = read_hub(dataset, hub or Hub(), most_rows)
        place = _hub_place(dataset)
    else:
        assert dataset.files is not None, "the schema rejects a dataset with neither name nor files"
        table, place = read_files(dataset.files, root, most_rows)
        rows = datasets.Dataset(datasets.table.InMemoryTable(table))
        is_whole = most_rows is None or len(rows) < most_rows
    if is_whole and not len(rows):
        raise BadInput("dataset: it has no row; name files, or a split, that have some")
    _require_times(rows, place)
    return Rows(_rename(without_decoding(rows), dataset.columns), place, is_whole)


def _require_times(rows: datasets.Dataset, place: Place) -> None:
    """Make sure that Python, which rewards are written in, has each date and time of the rows."""
    for column in rows.data.schema:
        if not _TIMES.search(str(column.type)):
            continue
        for index, cell in enumerate(rows.data.column(column.name)):
            try:
                cell.as_py()
            # Python's years end at 9999, and Arrow's do not.
            except (ValueError, OverflowError) as error:
                raise BadInput(
                    f"{place(index)}, column {column.name!r}: a date or time that Python does not "
                    f"have ({error}); correct it, or write the column as text"
                ) from error


def build_prompts(rows: Rows, dataset: DatasetSpec) -> dict[int, Prompt]:
    """The prompt of each row, by its index.

    Raises:
        BadInput: the prompt column is missing, a column has a reserved name, or a cell is no
            prompt.
    """
    _check_columns(rows.table, dataset)
    place = _prompt_place(rows, dataset)
    cells = enumerate(rows.table[dataset.prompt_column])
    return {index: build_prompt(cell, dataset.system_prompt, place(index)) for index, cell in cells}


def _prompt_place(rows: Rows, dataset: DatasetSpec) -> Place:
    return lambda index: f"{rows.place(index)}, column {dataset.prompt_column!r}"


def make_prompts(
    rows: Rows, dataset: DatasetSpec, training: TrainingSpec, encoder: PromptEncoder
) -> Prompts:
    """The prompts that are trained on.

    Raises:
        BadInput: as build_prompts; a prompt is too long or a duplicate where that is to fail; or
            too few are left.
    """
    prompts, place = build_prompts(rows, dataset), _prompt_place(rows, dataset)
    unique, duplicates = _without_duplicates(prompts, dataset, place)
    counts = encoder.token_counts(unique, place)
    fitting = [
        index
        for index in unique
        if _is_short_enough(counts[index], dataset, training, place(index))
    ]
    dropped = len(unique) - len(fitting)
    if rows.is_whole:
        _check_enough(len(fitting), dropped, training)
    trained_on = _with_prompts(rows.table, list(prompts.values())).select(fitting)
    lengths = prompt_lengths(list(counts.values()), dropped)
    return Prompts(trained_on, dropped, duplicates, _fingerprint(trained_on), lengths)


def prompt_lengths(counts: Sequence[int], dropped: int) -> PromptLengths:
    """Mean and 95th percentile (nearest rank) of the prompts' tokens."""
    if not counts:
        return PromptLengths(rows=0, mean=0.0, p95=0, dropped=dropped)
    rank = math.ceil(0.95 * len(counts))
    mean = sum(counts) / len(counts)
    return PromptLengths(rows=len(counts), mean=mean, p95=sorted(counts)[rank - 1], dropped=dropped)


def _hub_place(dataset: DatasetSpec) -> Place:
    return lambda index: f"{dataset.name} {dataset.split} row {index + 1}"


def _rename(rows: datasets.Dataset, columns: dict[str, str]) -> datasets.Dataset:
    for new, old in columns.items():
        _require(rows, old, f"dataset.columns[{new}]")
    if len(set(columns.values())) < len(columns):
        raise BadInput(f"dataset.columns gives one column two names: {columns}; keep one of them")
    for new in columns:
        # A column that gets another name itself leaves its own free.
        if new in rows.column_names and new not in columns.values():
            raise BadInput(
                f"dataset.columns[{new}]: the dataset has a column of this name already; rename "
                "that one too"
            )
    return rows.rename_columns({old: new for new, old in columns.items()})


def _check_columns(rows: datasets.Dataset, dataset: DatasetSpec) -> None:
    _require(rows, dataset.prompt_column, "dataset.promptColumn")
    reserved = [name for name in rows.column_names if name in RESERVED]
    if reserved:
        problem = f"column {reserved[0]!r} has a name that reward functions get something else by"
        raise BadInput(
            f"dataset: {problem}; give it another in dataset.columns, such as my_{reserved[0]}"
        )


def _require(rows: datasets.Dataset, column: str, field: str) -> None:
    if column not in rows.column_names:
        raise BadInput(
            f"{field}: the dataset has no column {column!r}; it has {', '.join(rows.column_names)}"
        )


def _without_duplicates(
    prompts: dict[int, Prompt], dataset: DatasetSpec, place: Place
) -> tuple[dict[int, Prompt], int]:
    """The prompts to go on with, and how many occurred before."""
    first: dict[str, int] = {}
    fresh: dict[int, Prompt] = {}
    for index, prompt in prompts.items():
        first_index = first.setdefault(json.dumps(prompt), index)
        if first_index == index:
            fresh[index] = prompt
        elif dataset.on_duplicate_prompt == "Fail":
            raise BadInput(
                f"{place(index)}: the same prompt as {place(first_index)}; see "
                "dataset.onDuplicatePrompt"
            )
    return prompts if dataset.on_duplicate_prompt == "Keep" else fresh, len(prompts) - len(fresh)


def _is_short_enough(tokens: int, dataset: DatasetSpec, training: TrainingSpec, place: str) -> bool:
    """Whether a prompt is short enough to be trained on."""
    limit = training.max_prompt_length
    if tokens > limit and dataset.on_long_prompt == "Fail":
        problem = f"{tokens} tokens, more than training.maxPromptLength {limit}"
        raise BadInput(f"{place}: {problem}; raise that, or set dataset.onLongPrompt to Drop")
    return tokens <= limit


def _check_enough(count: int, dropped: int, training: TrainingSpec) -> None:
    """TRL leaves out an incomplete generation batch: a dataset smaller than one would train
    nothing, silently."""
    completions = (
        training.generation_batch_size or training.prompts_per_step * training.num_generations
    )
    needed = completions // training.num_generations
    if count < needed:
        raise BadInput(
            f"dataset: {count} prompts are left ({dropped} dropped as too long), fewer than the "
            f"{needed} of one generation; add rows, raise training.maxPromptLength or lower "
            "training.promptsPerStep"
        )


def _with_prompts(rows: datasets.Dataset, prompts: list[Prompt]) -> datasets.Dataset:
    """The rows with the finished prompts as column `prompt`, in place of one of that name."""
    others = [name for name in rows.column_names if name != "prompt"]
    finished = datasets.Dataset.from_dict({"prompt": prompts})
    if not others:
        return finished
    return datasets.concatenate_datasets([rows.select_columns(others), finished], axis=1)


def _fingerprint(rows: datasets.Dataset) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
    return digest.hexdigest()
