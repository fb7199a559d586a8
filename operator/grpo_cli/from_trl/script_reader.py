"""Reads a script that makes a GRPOTrainer, by its syntax tree: nothing of it runs.

The interpreter follows the script. When it meets the trainer, the trainer's arguments are what the
run is made of: GRPOConfig, LoraConfig, from_pretrained, load_dataset and reward functions. What
can't be followed becomes a note with its line.
"""

import ast
import sys

from grpo_api.spec.trl_places import RENAMED, Place, place_of

from .config_fields import BATCHING, FOREIGN, READ_ELSEWHERE, refusal_message
from .dataset_reader import DatasetReader
from .interpreter.statements import Interpreter
from .interpreter.syntax import called_name, dotted_name, join_cells, parse
from .interpreter.values import (
    COMPUTED,
    ITEM,
    Class,
    Computed,
    External,
    Object,
    Unknown,
    Use,
    constant,
    is_none,
    line_of,
)
from .job_spec import adapter_refusal, loading_refusal
from .notebook import SUFFIX
from .reward_reader import RewardReader
from .side_settings import (
    OWN_CODE,
    TOKENIZER_LOADING,
    may_change_dtype,
    note_changes,
    note_side_settings,
)
from .trl_run import (
    NOT_TAKEN,
    OTHER_TOKENIZER,
    POSITIONS,
    SET_MODEL,
    TRAINED_ADAPTER,
    UNSLOTH_LORA,
    ReadModule,
    TrlError,
    TrlRun,
    TrlSetting,
)

TRAINER, CONFIG = "GRPOTrainer", "GRPOConfig"
_LOADERS = ("AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")
_UNPACKED = "it is computed when the script runs: write its entries into the job"
_BY_POSITION = "it is given by its position: write it into the job by its name"
_AGAIN = "it is made again: the job is the first; write another one for what changes"


def read_script(text: str, source: str, read_module: ReadModule) -> TrlRun:
    """The run that a script describes; `source` is its name for messages.

    Raises:
        TrlError: it is no Python, has no GRPOTrainer or several, or is nested too deeply.
    """
    try:
        return _ScriptReader(join_cells(parse(text)), text, source, read_module).read()
    except SyntaxError as error:
        if not source.endswith((".py", SUFFIX)):
            advice = "no Python script: give the script or the YAML file that it launches"
            raise TrlError(f"{source}: {advice}") from error
        version = ".".join(map(str, sys.version_info[:2]))  # 3.11 has no syntax of 3.12
        where = f"{source} line {error.lineno or 1}"
        raise TrlError(f"{where}: no Python {version}: {error.msg}") from error
    except ValueError as error:
        raise TrlError(f"{source}: no Python: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise TrlError(f"{source}: its expressions are nested too deeply to be read") from error


class _ScriptReader:
    """One script."""

    def __init__(self, module: ast.Module, text: str, source: str, read_module: ReadModule) -> None:
        self.module = module
        self.run = TrlRun(source, text)
        self.read_module = read_module
        self.interpreter = Interpreter(module, read_module, self._read_call)
        self.datasets = DatasetReader(self.run, self.interpreter)
        self.trainer: Object | None = None
        self._kinds: dict[int, str] = {}
        """Arguments of the trainer by the ids of their objects."""
        self._num_early_changes = 0
        """Changes of objects before the trainer was made."""
        self._given: list[tuple[Object, dict[str, Use]]] = []
        """Objects that the trainer was given, with their fields then."""

    def read(self) -> TrlRun:
        """The whole script.

        Raises:
            TrlError: no GRPOTrainer, or several.
        """
        call = self._trainer()
        self.interpreter.run()
        if self.trainer is None:
            self.interpreter.run_uncalled(call)
        if self.trainer is None:
            raise TrlError(f"{self.run.source}: the {TRAINER} of line {call.lineno} is never made")
        self.run.add_notes(self.interpreter.assumed_choices)
        self._add_unnamed_changes()
        note_changes(self.run, self.interpreter.changes, self._kinds, self._num_early_changes)
        note_side_settings(self.run, self.module, call)
        return self.run

    def _add_unnamed_changes(self) -> None:
        """Keep changes below the trainer of what an object holds, such as by `vars(args)`."""
        late = self.interpreter.changes[self._num_early_changes :]
        named = {(id(change.owner), change.attribute) for change in late}
        for made, fields in self._given:
            for name, use in made.fields.items():
                if fields.get(name) is not use and (id(made), name) not in named:
                    shown = f"{self._kinds.get(id(made))}.{name}"
                    self.interpreter.note_change(made, name, use.node, use, shown)

    def _trainer(self) -> ast.Call:
        """The call that makes the trainer."""
        names: dict[str, ast.ClassDef | None] = {TRAINER: None}
        for node in ast.walk(self.module):
            if isinstance(node, ast.ImportFrom):
                aliases = [alias.asname for alias in node.names if alias.name == TRAINER]
                names |= {alias: None for alias in aliases if alias}
            if isinstance(node, ast.ClassDef):
                bases = {dotted_name(base).rpartition(".")[2] for base in node.bases}
                names |= {node.name: node} if bases & set(names) else {}
        for name, definition in names.items():
            if definition is not None:
                self.run.note(definition.lineno, f"class {name}", "", OWN_CODE)
        calls = [node for node in ast.walk(self.module) if called_name(node) in names]
        calls.sort(key=line_of)
        if not calls:
            raise TrlError(
                f"{self.run.source} makes no {TRAINER}{self._other_trainers()}: `--from-trl` takes "
                "a script or notebook that trains by TRL's GRPOTrainer, or the YAML file of `trl "
                "grpo --config`"
            )
        if len(calls) > 1:
            lines = ", ".join(str(line_of(call)) for call in calls)
            raise TrlError(
                f"{self.run.source} makes several trainers, at lines {lines}: a job has one; leave "
                "one in a copy of the script"
            )
        assert isinstance(calls[0], ast.Call), "only a call has a called name"
        return calls[0]

    def _other_trainers(self) -> str:
        """The trainers that the script makes instead, as part of a sentence; a job can't know what
        a class that another file defines changes."""
        names = {called_name(node) for node in ast.walk(self.module)}
        others = sorted(name for name in names if name.endswith("Trainer"))
        return f" but {', '.join(others)}" if others else ""

    def _read_call(self, call: Object) -> None:
        """Read a call that the interpreter meets."""
        self.datasets.note_call(call)
        module = call.path.rpartition(".")[0]
        called, is_beside = call.node, module and self.read_module(module) is not None
        if isinstance(called, ast.Call) and is_beside:
            for use in call.arguments.uses:
                shown = f"{ast.unparse(called.func)}({self.run.source_of(use.node)})"
                self.interpreter.note_change(use.value, "", called, None, shown)
        if not call.is_made_by(TRAINER):
            return
        if self.trainer is None:
            self.trainer = call
            self._read_trainer(call)
            self._num_early_changes = len(self.interpreter.changes)
            given = [call, *(use.value for use in call.fields.values())]
            self._given = [(made, dict(made.fields)) for made in given if isinstance(made, Object)]
        else:
            self.run.note(call.line, TRAINER, "", _AGAIN)

    def _read_trainer(self, call: Object) -> None:
        arguments = call.arguments.by_name(POSITIONS)
        call.fields.update(arguments)
        self._kinds[id(call)] = "trainer"
        for name, use in arguments.items():
            if name.startswith("*"):
                self.run.note(use.line, name, "", _UNPACKED)
            elif name not in POSITIONS:
                advice = "TRL's GRPOTrainer has no such argument"
                self.run.note_node(use.node, name, advice)
        self._read_model(arguments.get("model"))
        self._read_config(arguments.get("args"))
        self._read_lora(arguments.get("peft_config"))
        self._read_tokenizer(arguments.get("processing_class"))
        line = call.line
        self.datasets.read(arguments.get("train_dataset"), line)
        rewards = RewardReader(self.run, self.read_module)
        rewards.read(arguments.get("reward_funcs"), line, self.interpreter.root)
        self.datasets.note_kept_columns()
        for name, advice in NOT_TAKEN.items():
            given = arguments.get(name)
            if given is not None and not is_none(given.value):
                self.run.note_node(given.node, name, advice)

    def _read_setting(
        self, name: str, use: Use, *, refusal: str = "", place: str = ""
    ) -> TrlSetting | None:
        """The constant of an argument; a note where it is not constant. The note says why a job has
        no such setting, if `refusal` does, and else where it has it."""
        try:
            value, assumptions = constant(use.value)
        except Computed as error:
            fix = f"set {place}" if place else "write the value into the job"
            fix = SET_MODEL if name == "model" else fix
            advice = refusal or f"{error}; {fix}"
            self.run.note_node(use.node, name, advice)
            return None
        self.run.add_notes(assumptions)
        return TrlSetting(value, use.line)

    def _read_model(self, use: Use | None) -> None:
        if use is None:
            return
        made = use.value
        self._kinds[id(made)] = "model"
        if isinstance(made, Object) and made.name == ITEM and made.method:
            made = made.method[0]  # Unsloth's from_pretrained returns model and tokenizer
        name = made.name if isinstance(made, Object) else ""
        if not isinstance(made, Object):
            self.run.model = self._read_setting("model", use)
        elif name == "from_pretrained" and made.arguments.uses:
            self._read_loaded_model(made)
        elif name == "get_peft_model":
            self._read_adapted_model(made)
        elif name == "prepare_model_for_kbit_training" and made.arguments.positional:
            self._read_model(made.arguments.positional[0])
        elif name in ("to", "cuda") and made.method:
            self._read_model(Use(made.method[0], use.node, use.frame))
            if may_change_dtype(made.node):
                advice = "the weights are loaded as training.dtype says"
                self.run.note_node(made.node, "model", advice)
        else:
            self.run.model = self._read_setting("model", use)

    def _read_adapted_model(self, made: Object) -> None:
        """Read a call of get_peft_model, PEFT's or Unsloth's."""
        fields = made.arguments.by_name(("model", "peft_config"))
        self._read_model(fields.pop("model", None))
        if "peft_config" in fields:
            self._read_lora(fields["peft_config"])
        else:
            self._read_lora_fields(fields)
            defaults = {name: TrlSetting(value, 0) for name, value in UNSLOTH_LORA.items()}
            self.run.lora = defaults | (self.run.lora or {})

    def _read_loaded_model(self, made: Object) -> None:
        """Read a call of from_pretrained."""
        line = made.line
        loader = ast.unparse(made.node).partition(".from_pretrained")[0]
        if loader.rpartition(".")[2].startswith("PeftModel") and made.arguments.positional:
            self.run.note_node(made.node, "model", TRAINED_ADAPTER)
            self._read_model(made.arguments.positional[0])
            return
        if loader.rpartition(".")[2] not in _LOADERS:
            advice = "the trainer loads it by AutoModelForCausalLM, not quantised"
            self.run.note(line, "model", loader, advice)
        arguments = made.arguments.by_name(("model",))
        for name, use in arguments.items():
            field = "model" if name in ("pretrained_model_name_or_path", "model_name") else name
            value = self._read_setting(field, use, refusal=loading_refusal(field))
            if value is not None and field == "model":
                self.run.model = value
            elif value is not None:
                self.run.model_arguments[field] = value
        if not {"dtype", "torch_dtype"} & set(arguments):
            advice = "transformers takes the dtype of the model's files: set training.dtype"
            self.run.note(line, "from_pretrained", "", advice)

    def _read_config(self, use: Use | None) -> None:
        if use is None or is_none(use.value):
            return
        made = use.value
        self._kinds[id(made)] = "args"
        if not isinstance(made, Object) or not made.is_made_by(CONFIG):
            why = made.why if isinstance(made, Unknown) and made.why != COMPUTED else ""
            why = why or "no GRPOConfig(…) was found here"
            advice = f"{why}; write its settings into the job"
            self.run.note_node(use.node, "args", advice)
            return
        if made.is_parsed:
            advice = (
                "its values come from the command line or a file, and TRL's defaults were taken: "
                "add yours to the job, or give the YAML file to `grpo init --from-trl`"
            )
            self.run.note_node(made.node, "args", advice)
        if isinstance(made.maker, Class):
            self._note_plain_defaults(made.maker)
        for name, field in made.fields.items():
            self._put_config(name, field)

    def _note_plain_defaults(self, definition: Class) -> None:
        """Name the defaults of a config that is no dataclass, which does not take them."""
        for base in definition.order():
            if isinstance(base, External) or base.defaults is not None:
                continue
            for item in base.definition.body:
                if isinstance(item, ast.AnnAssign) and item.value is not None:
                    advice = f"no effect: {base.definition.name} is no dataclass"
                    name = ast.unparse(item.target)
                    self.run.note(item.lineno, name, ast.unparse(item.value), advice)

    def _read_lora(self, use: Use | None) -> None:
        if use is None or is_none(use.value):
            return
        made = use.value
        self._kinds[id(made)] = "peft_config"
        if isinstance(made, Object) and made.name == "get_peft_config":
            advice = "the command line decides; all parameters are trained, as by TRL's default"
            self.run.note_node(use.node, "peft_config", advice)
            return
        if isinstance(made, Object) and made.is_made_by("LoraConfig"):
            self._read_lora_fields(made.fields)
            return
        self.run.lora = {}
        why = made.why if isinstance(made, Unknown) and made.why != COMPUTED else ""
        why, taken = why or "no LoraConfig(…) was found here", "LoRA with PEFT's defaults"
        configs = {
            id(call.node): call for call in self.interpreter.calls if call.name == "LoraConfig"
        }
        if len(configs) == 1:
            (config,) = configs.values()
            self._read_lora_fields(config.fields)
            taken = f"the LoraConfig of line {config.line}"
        advice = f"{why}; {taken} was taken: set adapter as it should be"
        self.run.note_node(use.node, "peft_config", advice)

    def _read_lora_fields(self, fields: dict[str, Use]) -> None:
        self.run.lora = {}
        for name, use in fields.items():
            if name == "task_type":
                continue  # a causal language model, as every job's
            value = self._read_setting(name, use, refusal=adapter_refusal(name))
            if value is not None:
                self.run.lora[name] = value

    def _read_tokenizer(self, use: Use | None) -> None:
        """The model's own tokenizer needs no setting; a job has no setting for another."""
        if use is None or is_none(use.value):
            return
        made = use.value
        self._kinds[id(made)] = "processing_class"
        if isinstance(made, Object) and "chat_template" in made.fields:
            self.run.chat_template = self._read_setting(
                "chat_template", made.fields["chat_template"], place="model.chatTemplate"
            )
        is_loaded_with_model = isinstance(made, Object) and made.name == ITEM
        if isinstance(made, Object) and is_loaded_with_model and made.method:
            made = made.method[0]
        if not isinstance(made, Object) or not self._is_tokenizer(made, is_loaded_with_model):
            self.run.note_node(use.node, "processing_class", OTHER_TOKENIZER)

    def _is_tokenizer(self, made: Object, is_loaded_with_model: bool) -> bool:
        """True for a call that loads the model's own tokenizer as TRL does."""
        if self.run.model is None or not made.arguments.uses:
            return False
        try:
            name = constant(made.arguments.uses[0].value)[0]
            revision = made.arguments.named.get("revision")
            given_revision = constant(revision.value)[0] if revision else None
        except Computed:
            return False
        if name != self.run.model.value:
            return False
        if is_loaded_with_model:
            return True  # the call loads the model, too, and its arguments are read with it
        names = set(made.arguments.named) - {"pretrained_model_name_or_path"}
        model_revision = self.run.model_arguments.get("revision")
        if model_revision is not None and model_revision.value == given_revision:
            names -= {"revision"}
        return len(made.arguments.positional) <= 1 and names <= set(TOKENIZER_LOADING)

    def _put_config(self, name: str, use: Use) -> None:
        if name.startswith("*"):
            advice = _UNPACKED if isinstance(use.value, Unknown) else _BY_POSITION
            self.run.note(use.line, name, "", advice)
            return
        field = RENAMED.get(name, name)
        place = place_of(name) or Place("Spec", "", "")
        is_read = field in (*BATCHING, *READ_ELSEWHERE)
        refusal = "" if is_read else FOREIGN.get(field) or refusal_message(place)
        setting = self._read_setting(name, use, refusal=refusal, place=place.path)
        if setting is not None:
            self.run.config[field] = setting
