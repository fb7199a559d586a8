"""Writes a run's history on rank 0: the rows of its steps, and whole groups of completions that are
chosen for people to read.

The rows are transformers' log_history, which every checkpoint contains; the samples lie in each
checkpoint as a file of their own. So both are hashed and sealed with it, and a resumed attempt
continues what that checkpoint has. It needs no other attempt's files, which may be torn, or be
written by an attempt that lives on. Of those it only takes the rows that were rolled back.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from grpo_api.report.history import (
    ATTEMPT,
    HISTORY_FILES,
    METRICS_FILE,
    ROLLED_BACK,
    SAMPLES_FILE,
    STEP,
    Row,
    begin_rows,
    json_line,
    parse_lines,
    thin_out,
)
from grpo_api.spec.checkpoint import SamplesSpec

from ..runtime.durable_files import write_atomically
from ..runtime.paths import ATTEMPTS, glob_run, number_in_name


class CompletionFacts(NamedTuple):
    """What TRL's own log of completions lacks."""

    tokens: int
    """Tokens of the completion, with the one that ended it."""
    is_truncated: bool
    """Whether it was cut at the longest length."""
    weights_version: int | None
    """Number of the weights that an engine sampled it with; None where the policy sampled."""


class Generation(NamedTuple):
    """The completions of all ranks, groups one after the other."""

    prompts: Sequence[Any]
    """Texts or chats, one for each completion."""
    completions: Sequence[Any]
    """Texts or chats."""
    rewards: Mapping[str, Sequence[float]]
    """By name of the reward function; NaN where it gave none."""
    advantages: Sequence[float]
    facts: Sequence[CompletionFacts]
    group_size: int
    """Completions of one prompt."""


def sample_groups(generation: Generation, count: int) -> list[dict[str, Any]]:
    """`count` whole groups, spread over the generation; all where there are fewer."""
    size = generation.group_size
    groups = len(generation.prompts) // size
    chosen = min(count, groups)
    starts = [index * groups // chosen * size for index in range(chosen)]
    return [
        {
            "prompt": generation.prompts[start],
            "completions": [_completion(generation, index) for index in range(start, start + size)],
        }
        for start in starts
    ]


def _completion(generation: Generation, index: int) -> dict[str, Any]:
    facts = generation.facts[index]
    scores = {name: values[index] for name, values in generation.rewards.items()}
    shown = {
        "completion": _text(generation.completions[index]),
        "tokens": facts.tokens,
        "truncated": facts.is_truncated,
        "rewards": {name: score for name, score in scores.items() if not math.isnan(score)},
        "advantage": generation.advantages[index],
    }
    if facts.weights_version is not None:
        shown["weights_version"] = facts.weights_version
    return shown


def _text(completion: Any) -> str:
    """A completion as text; of a chat the last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that a step waits for a line, whatever its volume does."""
MOST_SKIPPED = 64
"""Most lines between two tries on a disk that fails."""


class LinesFile:
    """Appends lines. After a write that failed the whole file is written again, because the failed
    one may have left a part of a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_whole = False
        """Whether the file has all lines."""
        self._is_behind = False
        """Whether lines wait for a disk that failed or hung."""
        self._failures = 0
        self._skipped = 0
        self._writer: Thread | None = None

    def append(self, line: str, all_lines: Callable[[], Iterable[str]]) -> None:
        """Append a line; where the file is not whole, write `all_lines`, which have it at the end.
        Where the disk fails training goes on, and a later line tries again."""
        if self.is_whole:
            self._write(lambda: self._append(line))
        else:
            self.write(all_lines)

    def write(self, all_lines: Callable[[], Iterable[str]]) -> None:
        """Replace the file, unless the disk fails or has failed a moment ago."""
        # Each failure doubles the lines until the next try, as with checkpoints.
        pause = min(MOST_SKIPPED, 2**self._failures - 1)
        if self._skipped < pause:
            self._skipped += 1
            return
        self._try(all_lines)

    def finish(self, all_lines: Callable[[], Iterable[str]]) -> None:
        """Try a last time to write lines that wait for the disk, as the attempt ends."""
        if not self._is_behind:
            return
        if self._writer:
            self._writer.join(PATIENCE)
        self._try(all_lines)

    def _try(self, all_lines: Callable[[], Iterable[str]]) -> None:
        self._skipped = 0
        # Before the thread begins: rows are added while a volume hangs.
        text = "".join(f"{line}\n" for line in all_lines())
        self._write(lambda: write_atomically(self._path, text))

    def _append(self, line: str) -> None:
        # A crash can tear the last line; readers skip it, and the next attempt has its own file.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _write(self, action: Callable[[], None]) -> None:
        """Write in a thread, which may hang with its volume: a step waits PATIENCE for it."""
        self.is_whole = False
        self._is_behind = True
        if self._writer and self._writer.is_alive():
            return
        ends: list[Exception | None] = []

        def run() -> None:
            try:
                action()
            except Exception as error:
                ends.append(error)
            else:
                ends.append(None)

        self._writer = Thread(target=run, name="history", daemon=True)
        self._writer.start()
        self._writer.join(PATIENCE)
        # One that ends later counts for nothing: lines were left out meanwhile.
        end = ends[0] if ends else TimeoutError(f"no answer within {PATIENCE:.0f} s")
        if end is None:
            self.is_whole = True
            self._is_behind = False
            self._failures = 0
        elif isinstance(end, OSError):
            if not self._failures:
                log.warning(f"{self._path} is behind until it can be written: {end}")
            self._failures += 1
        else:
            raise end


class RunHistory:
    """The history of a run, as one attempt continues it."""

    def __init__(
        self,
        folder: Path | None,
        attempt: int,
        samples: SamplesSpec,
        checkpoint: Path | None = None,
        *,
        is_own: bool = True,
        is_main: bool = True,
    ) -> None:
        """`folder` is the attempt's, None where nothing is kept. The history continues that of the
        checkpoint, which `is_own`, or of the run that spec.resumeFrom names. Only rank 0
        (`is_main`) writes."""
        may_have_samples = samples.groups > 0 or checkpoint is not None
        self.keeps_samples = folder is not None and may_have_samples
        """Whether samples go into checkpoints, which those of earlier attempts always do; the same
        on all ranks."""
        self._folder = folder if is_main else None
        self._attempt = attempt
        self._spec = samples
        self._checkpoint = checkpoint
        self._is_own = is_own
        self._rows: list[Row] = []
        self._rolled_back: list[Row] = []
        self._samples: list[str] = []
        self._sampled_step = 0
        self._is_incomplete = False
        """Whether a disk that failed has kept something of earlier attempts back."""
        if folder is not None:
            self._metrics_file = LinesFile(folder / METRICS_FILE)
            self._samples_file = LinesFile(folder / SAMPLES_FILE)

    def begin(self, rows: list[Row]) -> None:
        """Begin the files with what the checkpoint has. `rows` are its log_history: the list that
        the trainer adds to."""
        self._rows = rows
        if not self._is_own:
            for row in rows:
                row[ATTEMPT] = 0
        self._take_earlier()

    def _take_earlier(self) -> None:
        """Begin the files with what earlier attempts have, and delete theirs once these have it."""
        samples: list[Row] | None = []
        if self._checkpoint:  # its files were checked against its manifest
            samples = _read_lines(self._checkpoint / SAMPLES_FILE)
        self._put_first(samples or [])
        self._is_incomplete = samples is None
        if self._folder is None:
            return
        earlier = _earlier_rows(self._folder)
        if earlier is None:
            self._is_incomplete = True
        else:
            begun = begin_rows(_logged_steps(self._rows), earlier)
            self._rolled_back = [row for row in begun if row.get(ROLLED_BACK)]
        if self._samples:
            self._samples_file.write(lambda: self._samples)
        self._metrics_file.write(self._lines)
        has_samples = not self._samples or self._samples_file.is_whole
        if has_samples and self._metrics_file.is_whole and not self._is_incomplete:
            _remove_older_files(self._folder)

    def _put_first(self, samples: list[Row]) -> None:
        """Put the samples of a checkpoint before those of this attempt."""
        if not samples:
            return
        if not self._is_own:
            for sample in samples:
                sample[ATTEMPT] = 0
        sealed = [json_line(sample) for sample in samples]
        newer = [line for line in self._samples if line not in sealed]
        self._samples = thin_out([*sealed, *newer], self._spec.max_bytes)
        self._sampled_step = max(self._sampled_step, samples[-1].get(STEP, 0))

    def add_row(self, row: Row) -> None:
        """Take one more row, which log_history has at its end."""
        if self._folder is not None:
            self._metrics_file.append(json_line(row), self._lines)

    def _lines(self) -> Iterable[str]:
        """All rows, as in the file."""
        return map(json_line, begin_rows(_logged_steps(self._rows), self._rolled_back))

    def is_sample_due(self, step: int) -> bool:
        """Return True if samples of a generation that was made in this step are to be kept."""
        if self._folder is None or not self._spec.groups:
            return False
        return not self._sampled_step or step - self._sampled_step >= self._spec.every_steps

    def add_samples(self, step: int, generation: Generation) -> list[dict[str, Any]]:
        """Keep groups of a generation: as many as fit into maxBytes alone. Return these groups."""
        assert self._folder is not None
        groups, limit = sample_groups(generation, self._spec.groups), self._spec.max_bytes
        row: Row = {STEP: step, ATTEMPT: self._attempt, "groups": []}
        # Each is measured alone: a line of hundreds of long groups takes seconds to make.
        group_sizes = (_line_bytes(group) + len(", ") for group in groups)
        sizes = accumulate(group_sizes, initial=_line_bytes(row) - len(", "))
        fitting = len(list(takewhile(lambda size: size < limit, sizes))) - 1
        if not fitting:
            return []
        row["groups"] = groups = groups[:fitting]
        self._sampled_step = step
        line = json_line(row)
        grown = [*self._samples, line]
        self._samples = thin_out(grown, limit)
        if self._samples == grown:
            self._samples_file.append(line, lambda: self._samples)
        else:
            self._samples_file.write(lambda: self._samples)
        return groups

    def finish(self) -> None:
        """Bring files up to date that are behind, as the attempt ends."""
        if self._folder is not None:
            self._samples_file.finish(lambda: self._samples)
            self._metrics_file.finish(self._lines)

    def save_samples(self, folder: Path) -> None:
        """Write the samples into a checkpoint or an export, on rank 0.

        Raises:
            OSError: the disk is full.
        """
        if self._is_incomplete:
            self._take_earlier()
        if self._folder is not None and self._samples:
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(f"{line}\n" for line in self._samples)
            (folder / SAMPLES_FILE).write_text(text, encoding="utf-8")

    def save_rows(self, folder: Path) -> None:
        """Write the rows that stand into an exported model, on rank 0.

        Raises:
            OSError: the disk is full.
        """
        lines = (f"{json_line(row)}\n" for row in _logged_steps(self._rows))
        (folder / METRICS_FILE).write_text("".join(lines), encoding="utf-8")


def _line_bytes(row: Row) -> int:
    return len(json_line(row).encode())


def _logged_steps(rows: Iterable[Row]) -> list[Row]:
    """Rows of steps; transformers logs totals of a run beside them."""
    return [row for row in rows if "loss" in row]


def _read_lines(path: Path) -> list[Row] | None:
    """The rows of a file, none without one; None where the disk fails, which must not end a run."""
    try:
        return parse_lines(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning(f"the history in {path} can't be read: {error}")
        return None


def _earlier_rows(folder: Path) -> list[Row] | None:
    """The rows in the files of the attempts before that of `folder`; None where the disk fails.

    Mostly there is one file. An attempt that could not read its predecessor's has left both.
    """
    try:
        paths = _older_files(folder, METRICS_FILE)
    except OSError as error:
        log.warning(f"the histories in {folder.parent} can't be listed: {error}")
        return None
    rows: list[Row] = []
    for path in paths:
        read_rows = _read_lines(path)
        if read_rows is None:
            return None
        rows += read_rows
    return rows


def _remove_older_files(folder: Path) -> None:
    """Delete the files of older attempts, whose rows this one has."""
    for name in HISTORY_FILES:
        with suppress(OSError):  # they count for nothing
            for path in _older_files(folder, name):
                path.unlink()


def _older_files(folder: Path, name: str) -> list[Path]:
    """The files of that name of attempts before that of `folder`.

    Raises:
        OSError: the disk fails.
    """
    paths = glob_run(folder.parent, f"{ATTEMPTS}/{name}")
    return [path for path in paths if number_in_name(path.parent) < number_in_name(folder)]
