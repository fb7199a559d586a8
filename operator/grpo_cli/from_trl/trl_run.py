"""What a script or a configuration file says of a GRPO run, in TRL's own words.

Both readers make a `TrlRun`; `job_spec.py` makes the job of it. What nobody can take becomes a
`Note` with its line, so that no setting is lost in silence. So does a value that the types of the
spec reject: `SpecBuilder` takes it out again, and the written job always parses.
"""

import ast
import re
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic.alias_generators import to_camel

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.spec.trl_places import FIELDS
from grpo_api.text.messages import plain_text

MAX_QUOTED = 60
"""Characters of a value that a note quotes."""
_SECRET = re.compile(r"(?<!bos_)(?<!eos_)(?<!pad_)(token|key|password|secret)$", re.IGNORECASE)
"""Names whose values a file that people share must not repeat; a tokenizer's tokens are none."""
_KNOWN_KEY = re.compile(r"(?:Bearer )?(?:hf_|sk-|ghp_|gsk_|xai-|AKIA|AIza)[\w-]{16,}$")
"""Keys by the beginnings that services give them."""
_KEY = re.compile(r"(?=.*\d)[\w.+/=-]{16,}")
"""What may be the key of any service."""

POSITIONS = (
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "quantization_config",
    "peft_config",
    "tools",
    "rollout_func",
    "environment_factory",
)
"""Parameters of TRL 1.16's GRPOTrainer in their order."""
LORA_POSITIONS = ("task_type", "peft_type", "auto_mapping")

NO_CALLBACKS = "a job runs no callbacks; its metrics and checkpoints need none"
NOT_TAKEN = {
    "eval_dataset": "score the model by a second job with command grpo_trainer.evaluation",
    "reward_processing_classes": "a reward model is used with its own tokenizer",
    "callbacks": NO_CALLBACKS,
    "optimizers": "set training.optimizer, learningRate and lrSchedulerType",
    "quantization_config": "quantised base models are not trained; remove it",
    "tools": "a job has no tools",
    "rollout_func": "a job samples by itself; set generation.engine",
    "environment_factory": "a job has no environments; write a reward function",
}
"""Arguments of the trainer that no job has, with what to do."""
TRAINED_ADAPTER = "a job begins a new adapter: merge this one into its base, and give it by --model"
UNSLOTH_LORA = {
    "r": 16,
    "lora_alpha": 16,
    "target_modules": [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ],
}  # fmt: skip
"""Defaults of Unsloth's get_peft_model, which are not PEFT's."""
SET_MODEL = "name it by --model"
"""End of a note on a model that the script computes."""
OTHER_TOKENIZER = "a job takes the tokenizer of its model; save another beside the model's weights"


def is_secret_name(name: str) -> bool:
    """True for the name of a token, a key or a password, as a file writes it."""
    return bool(_SECRET.search(name.rstrip("'\"]")))


class TrlError(Exception):
    """The file says nothing that a job could be made of; one sentence with the line."""


def refuse_keys(copied: ast.AST, place: str) -> None:
    """Refuse code with the text of a key: everybody who may read ConfigMaps would have it. `place`
    and a line say where it is.

    Raises:
        TrlError: a text begins as the keys of a known service do, or its name says that it is one.
    """
    for node in ast.walk(copied):
        is_key = False
        match node:
            case ast.Constant(value=str(text)):
                is_key = _KNOWN_KEY.match(text) is not None
            case ast.Assign(targets=[target, *_], value=ast.Constant(value=str(text))):
                is_key = _is_key_of(ast.unparse(target), text)
            case ast.AnnAssign(target=target, value=ast.Constant(value=str(text))):
                is_key = _is_key_of(ast.unparse(target), text)
            case ast.keyword(arg=str(name), value=ast.Constant(value=str(text))):
                is_key = _is_key_of(name, text)
        if is_key:
            raise TrlError(
                f"{place}{getattr(node, 'lineno', 0)}: the reward holds a key, which its ConfigMap "
                "would show: read it by os.environ, and set spec.env with valueFrom.secretKeyRef"
            )


def _is_key_of(name: str, text: str) -> bool:
    return is_secret_name(name) and _KEY.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class TrlSetting:
    """A value, and the line that gives it; line 0 is TRL's default."""

    value: Any
    line: int

    @property
    def is_set(self) -> bool:
        """Return True for all but None and False. 0 equals False, but a device 0 or a layer 0 is a
        setting."""
        return self.value is not None and self.value is not False


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
        return self.text(str)

    def text(self, name_lines: Callable[[str], str]) -> str:
        """One line for users, with lines as `name_lines` calls them, such as by their cells."""
        value = f" = {short_text(self.value)}" if self.value else ""
        where = f"{name_lines(f'line {self.line}')}: " if self.line else ""
        return f"{where}{self.name}{value}: {name_lines(self.advice)}"


def short_text(text: str) -> str:
    """The text on one line, cut to what a message can quote."""
    line = plain_text("".join(letter if letter.isprintable() else " " for letter in text))
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


def is_folder_name(name: str) -> bool:
    """True for the path of a folder, which no repository of the hub has for its name."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def metric_name(name: str) -> str:
    """A reward's name as the spec takes it."""
    cleaned = re.sub(r"[^-a-zA-Z0-9_]", "_", name.rpartition("/")[2])[:63]
    return cleaned if re.match("[a-zA-Z_]", cleaned) else f"_{cleaned}"[:63]


@dataclass(slots=True)
class TrlRun:
    """A GRPO run."""

    source: str
    """Name of the file."""
    text: str = ""
    """A script."""
    config: dict[str, TrlSetting] = field(default_factory=dict)
    """Fields of GRPOConfig that are set."""
    model: TrlSetting | None = None
    """Hub id or folder of the model."""
    model_arguments: dict[str, TrlSetting] = field(default_factory=dict)
    """What from_pretrained is given, in its words (`dtype`, `revision`, …)."""
    chat_template: TrlSetting | None = None
    """Template that the script gives its tokenizer."""
    lora: dict[str, TrlSetting] | None = None
    """Fields of LoraConfig that are set; None trains all parameters."""
    dataset: DatasetUse = field(default_factory=DatasetUse)
    rewards: list[RewardUse] = field(default_factory=list)
    reward_files: dict[str, str] = field(default_factory=dict)
    """Python files of the rewards by their names."""
    notes: list[Note] = field(default_factory=list)
    """What was not taken, by line."""

    def value(self, name: str) -> Any:
        """A field of GRPOConfig as the run has it: set, or TRL's default."""
        setting = self.config.get(name)
        return setting.value if setting else FIELDS[name].default

    def note(self, line: int, name: str, value: object, advice: str) -> None:
        """Keep what was not taken."""
        self.add_notes([Note(line, name, value if isinstance(value, str) else repr(value), advice)])

    def add_notes(self, notes: Iterable[Note]) -> None:
        """Keep notes by line; the same is kept once, and without a secret's value."""
        for note in notes:
            entry = replace(note, value="") if is_secret_name(note.name) else note
            if entry not in self.notes:
                insort(self.notes, entry, key=lambda earlier: earlier.line)

    def note_node(self, node: ast.AST, name: str, advice: str) -> None:
        """Keep what was not taken, as the script writes it."""
        self.note(getattr(node, "lineno", 0), name, self.source_of(node), advice)

    def source_of(self, node: ast.AST | None) -> str:
        """What the script writes; empty for nothing."""
        if node is None:
            return ""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


ReadModule = Callable[[str], str | None]
"""Source of a module that lies beside the script, by its name; None where no module has it."""


MAX_TRIES = 20
"""Rounds of taking rejected values out; each removes one at least."""


class SpecBuilder:
    """Collects the fields of a spec."""

    def __init__(self, run: TrlRun) -> None:
        self.run = run
        self.spec: dict[str, Any] = {}
        self._origins: dict[str, tuple[str, TrlSetting]] = {}
        """TRL's name and value of what was put at a path."""

    def set_field(
        self, path: str, value: Any, name: str = "", setting: TrlSetting | None = None
    ) -> None:
        """Set a field, such as `training.beta`; `name` and `setting` say where it comes from."""
        *sections, field = path.split(".")
        place = self.spec
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
        if setting is not None:
            self._origins[path] = (name, setting)

    def get(self, path: str) -> Any:
        """The value at a path; None where it is not set."""
        place: Any = self.spec
        for part in path.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def finish(self) -> dict[str, Any]:
        """The spec without what its types reject; each rejected value is a note.

        What is wrong between several fields stays, and is a note, too.
        """
        for _ in range(MAX_TRIES):
            problems = error_messages(self.spec)
            rejected = [self._reject(problem) for problem in problems]
            if not any(rejected) and not any(self._reject_between(problem) for problem in problems):
                break
        for problem in error_messages(self.spec):
            self.run.note(0, "the job", "", f"{problem}; correct it before it is applied")
        sections = map(to_camel, GRPOJobSpec.model_fields)
        return {section: self.spec[section] for section in sections if section in self.spec}

    def _reject(self, problem: str) -> bool:
        """Take out the value that a problem is about; False if it is about none."""
        for path, (name, setting) in list(self._origins.items()):
            where = f"spec.{path}"
            if problem.startswith((f"{where}:", f"{where}.", f"{where}[")):
                self._remove(path)
                advice = f"not allowed: {problem.removeprefix(where).lstrip(':. ')}"
                self.run.note(setting.line, name, setting.value, advice)
                return True
        return False

    def _reject_between(self, problem: str) -> bool:
        """Take out the first value that a problem between several fields names, if it is over
        then."""
        section, _, message = problem.partition(": ")
        message_words = re.findall(r"\w+", message)
        fields = {path: path.rpartition(".")[2] for path in self._origins}
        named = [
            path
            for path, field in fields.items()
            if f"spec.{path}".startswith(f"{section}.") and field in message_words
        ]
        for path in sorted(named, key=lambda path: message_words.index(fields[path])):
            value = self.get(path)
            name, setting = self._remove(path)
            if problem not in error_messages(self.spec):
                self.run.note(setting.line, name, setting.value, f"not allowed here: {message}")
                return True
            self.set_field(path, value, name, setting)
        return False

    def _remove(self, path: str) -> tuple[str, TrlSetting]:
        *sections, field = path.split(".")
        place = self.spec
        for section in sections:
            place = place[section]
        del place[field]
        return self._origins.pop(path)


def error_messages(spec: dict[str, Any]) -> list[str]:
    """What is wrong with a spec, a sentence for each field."""
    try:
        parse_spec(spec, creating=True)
    except SpecInvalid as error:
        return error.problems
    return []
