"""What a script or a configuration file says of a GRPO run, in TRL's own words.

Both readers make a `TrlRun`; `job_spec.py` makes the job of it. What nobody can take becomes a
`Note` with its line, so that no setting is lost in silence.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_QUOTED = 60
"""Characters of a value that a note quotes."""


class TrlError(Exception):
    """The file says nothing that a job could be made of; one sentence with the line."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and the line that gives it; line 0 is TRL's default."""

    value: Any
    line: int


@dataclass(frozen=True, slots=True)
class Note:
    """What was not taken as it stands: where, what, and what to do."""

    line: int
    """0 where no line says it, as of a default."""
    name: str
    value: str
    """As the file writes it; empty where a name says all."""
    advice: str

    def __str__(self) -> str:
        """One line for users."""
        value = f" = {short_text(self.value)}" if self.value else ""
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.name}{value}: {self.advice}"


def short_text(text: str) -> str:
    """The text on one line, cut to what a message can quote."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= MAX_QUOTED else f"{line[: MAX_QUOTED - 1]}…"


@dataclass(slots=True)
class DatasetUse:
    """The training rows."""

    name: str | None = None
    """Hub id; None for files, and for rows that the script makes itself."""
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()
    """Paths of JSON, CSV or Parquet files."""
    columns: dict[str, str] = field(default_factory=dict)
    """New name: name in the dataset."""
    prompt_column: str = "prompt"
    system_prompt: str | None = None
    is_made_by_script: bool = False
    """The rows can be had only by running the script: they must be written to a file."""


@dataclass(frozen=True, slots=True)
class RewardUse:
    """One entry of reward_funcs: a function, or a reward model."""

    line: int
    name: str
    """Name of the function as TRL logs it, or id of the model."""
    function: str = ""
    """`module:function`; empty for a model."""
    is_in_config_map: bool = False
    """The module is among the run's reward files."""


@dataclass(slots=True)
class TrlRun:
    """A GRPO run."""

    source: str
    """Name of the file."""
    config: dict[str, Given] = field(default_factory=dict)
    """Fields of GRPOConfig that are set."""
    model: Given | None = None
    """Hub id or folder of the model."""
    model_arguments: dict[str, Given] = field(default_factory=dict)
    """What from_pretrained is given, in its words (`dtype`, `revision`, …)."""
    chat_template: Given | None = None
    """Template that the script gives its tokenizer."""
    lora: dict[str, Given] | None = None
    """Fields of LoraConfig that are set; None trains all parameters."""
    dataset: DatasetUse = field(default_factory=DatasetUse)
    rewards: list[RewardUse] = field(default_factory=list)
    reward_files: dict[str, str] = field(default_factory=dict)
    """Python files of the rewards by their names."""
    notes: list[Note] = field(default_factory=list)
    """What was not taken, by line."""

    def note(self, line: int, name: str, value: object, advice: str) -> None:
        """Keep what was not taken; the same is kept once."""
        entry = Note(line, name, value if isinstance(value, str) else repr(value), advice)
        if entry not in self.notes:
            insort(self.notes, entry, key=lambda kept: kept.line)


ReadModule = Callable[[str], str | None]
"""Source of a module that lies beside the script, by its name; None where there is none."""
