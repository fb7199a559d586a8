"""Reads a script that makes a GRPOTrainer, by its syntax tree: nothing of it runs.

What the trainer is given is followed back to GRPOConfig, LoraConfig, from_pretrained,
load_dataset and reward functions, wherever the script makes them. What can't be followed becomes a
note with its line.
"""

import ast
import sys
from collections.abc import Iterator

from grpo_api.spec.trl_places import PLACES, Place

from .command_line import parsed_classes
from .config_fields import BATCHING, READ_ELSEWHERE, refusal_message
from .dataset_reader import DatasetReader
from .expressions import Scope
from .job_spec import adapter_refusal, loading_refusal
from .notebook import SUFFIX
from .reward_reader import RewardReader
from .side_settings import (
    OWN_CODE,
    TOKENIZER_LOADING,
    bind_neighbours,
    bodies_in_branches,
    change_advice,
    is_named,
    may_change_dtype,
    note_method,
    note_side_settings,
    owner_kind,
    scoped_statements,
)
from .syntax import (
    Computed,
    called_name,
    changed_attributes,
    class_order,
    dotted_name,
    field_default,
    is_dataclass,
    literal_entries,
    own_expressions,
    parse,
)
from .trl_run import (
    LORA_POSITIONS,
    NOT_TAKEN,
    OTHER_TOKENIZER,
    POSITIONS,
    RENAMED,
    TRAINED_ADAPTER,
    UNSLOTH_LORA,
    ReadModule,
    TrlError,
    TrlRun,
    TrlSetting,
    short_text,
)

TRAINER, CONFIG = "GRPOTrainer", "GRPOConfig"
_LOADERS = ("AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")


def read_script(text: str, source: str, read_module: ReadModule) -> TrlRun:
    """The run that a script describes; `source` is its name for messages.

    Raises:
        TrlError: it is no Python, has no GRPOTrainer or several, or is nested too deeply.
    """
    try:
        return _ScriptReader(parse(text), text, source, read_module).read()
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
        self.root = Scope(module, module.body)
        bind_neighbours(self.root, read_module)
        self._objects: dict[tuple[int, int | None], str] = {}
        """Arguments of the trainer by the expressions that make them."""

    def read(self) -> TrlRun:
        """The whole script.

        Raises:
            TrlError: no GRPOTrainer, or several.
        """
        call, scope = self._trainer()
        arguments = self._arguments(call, POSITIONS, scope)
        for name in set(arguments) - set(POSITIONS):
            advice = "TRL's GRPOTrainer has no such argument"
            self.run.note(call.lineno, name, self.run.source_of(arguments[name]), advice)
        self._read_model(arguments, scope)
        self._read_config(arguments.get("args"), scope)
        if "peft_config" in arguments:
            self._read_lora(arguments["peft_config"], scope)
        self._read_tokenizer(arguments.get("processing_class"), scope)
        self._read_changes(call, scope)
        datasets = DatasetReader(self.run)
        datasets.read(arguments.get("train_dataset"), scope, call.lineno)
        rewards = RewardReader(self.run, self.read_module)
        rewards.read(arguments.get("reward_funcs"), scope, call.lineno)
        for name, advice in NOT_TAKEN.items():
            node = arguments.get(name)
            if node is not None and not _is_none(node):
                self.run.note_node(node, name, advice)
        note_side_settings(self.run, self.module, call)
        for note in self.root.assumptions:
            self.run.note(note.line, note.name, note.value, note.advice)
        return self.run

    def _trainer(self) -> tuple[ast.Call, Scope]:
        """The call that makes the trainer, and the scope that it is in."""
        names = self._classes(TRAINER)
        for name, definition in names.items():
            if definition is not None:
                self.run.note(definition.lineno, f"class {name}", "", OWN_CODE)
        calls = [
            (node, scope)
            for statement, _, scope in scoped_statements(self.module.body, self.root)
            for node in own_expressions(statement)
            if isinstance(node, ast.Call) and called_name(node) in names
        ]
        if not calls:
            raise TrlError(
                f"{self.run.source} makes no {TRAINER}{self._other_trainers()}: `--from-trl` takes "
                "a script or notebook that trains by TRL's GRPOTrainer, or the YAML file of `trl "
                "grpo --config`"
            )
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call, _ in calls)
            raise TrlError(
                f"{self.run.source} makes several trainers, at lines {lines}: a job has one; leave "
                "one in a copy of the script"
            )
        return calls[0]

    def _other_trainers(self) -> str:
        """The trainers that the script makes instead, as part of a sentence; a job can't know what
        a class that another file defines changes."""
        names = {called_name(node) for node in ast.walk(self.module) if isinstance(node, ast.Call)}
        others = sorted(name for name in names if name.endswith("Trainer"))
        return f" but {', '.join(others)}" if others else ""

    def _classes(self, name: str) -> dict[str, ast.ClassDef | None]:
        """Names of a class of TRL: its own, imported as, and the script's own subclasses."""
        names: dict[str, ast.ClassDef | None] = {name: None}
        for node in ast.walk(self.module):
            if isinstance(node, ast.ImportFrom):
                aliases = [alias.asname for alias in node.names if alias.name == name]
                names |= {alias: None for alias in aliases if alias}
            if isinstance(node, ast.ClassDef):
                bases = {dotted_name(base).rpartition(".")[2] for base in node.bases}
                names |= {node.name: node} if bases & set(names) else {}
        return names

    def _arguments(
        self, call: ast.Call, positions: tuple[str, ...], scope: Scope
    ) -> dict[str, ast.expr]:
        """What a call is given, by parameter; literal dicts that it unpacks are among it."""
        arguments: dict[str, ast.expr] = dict(zip(positions, call.args, strict=False))
        for node in call.args[len(positions) :]:
            self.run.note_node(node, "argument", "give it by its name")
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = keyword.value
                continue
            arguments |= dict(self._unpacked_entries(keyword.value, scope))
        return arguments

    def _unpacked_entries(self, node: ast.expr, scope: Scope) -> Iterator[tuple[str, ast.expr]]:
        """The entries of what `**` unpacks, where they are literal."""
        value = None
        try:
            target, inner, _ = scope.resolve(node)
            if inner is scope and (entries := literal_entries(target)) is not None:
                yield from entries.items()
                return
            value = inner.evaluate(target) if isinstance(target, ast.expr) else None
        except Computed:
            pass
        if not isinstance(value, dict):
            advice = "it is computed when the script runs: write its entries into the job"
            self.run.note(node.lineno, f"**{short_text(self.run.source_of(node))}", "", advice)
            return
        for name, entry in value.items():
            constant = ast.Constant(entry, lineno=node.lineno, col_offset=0)
            yield str(name), constant

    def _read_setting(
        self, name: str, node: ast.expr, scope: Scope, *, refusal: str = "", place: str = ""
    ) -> TrlSetting | None:
        """The constant of an argument; a note where it is not constant. The note says why a job has
        no such setting, if `refusal` does, and else where it has it."""
        try:
            return TrlSetting(scope.evaluate(node), node.lineno)
        except Computed as error:
            fix = f"set {place}" if place else "write the value into the job"
            advice = refusal or f"{error}; {fix}"
            self.run.note_node(node, name, advice)
            return None

    def _read_model(self, arguments: dict[str, ast.expr], scope: Scope) -> None:
        node = arguments.get("model")
        if node is None:
            return
        try:
            target, inner, index = scope.follow(node)
        except Computed:
            self._read_setting("model", node, scope)
            return
        self._objects[id(target), index] = "model"
        if not isinstance(target, ast.Call):
            self.run.model = self._read_setting("model", node, scope)
            return
        name = called_name(target)
        if name == "from_pretrained" and target.args + target.keywords:
            self._read_loaded_model(target, inner)
        elif name == "get_peft_model":
            call_arguments = self._arguments(target, ("model", "peft_config"), inner)
            self._read_model(call_arguments, inner)
            if "peft_config" in call_arguments:
                self._read_lora(call_arguments["peft_config"], inner)
            else:
                call_arguments.pop("model", None)
                self._read_lora_fields(call_arguments, inner)
                defaults = {name: TrlSetting(value, 0) for name, value in UNSLOTH_LORA.items()}
                self.run.lora = defaults | (self.run.lora or {})
        elif name == "prepare_model_for_kbit_training" and target.args:
            self._read_model({"model": target.args[0]}, inner)
        elif name in ("to", "cuda") and isinstance(target.func, ast.Attribute):
            self._read_model({"model": target.func.value}, inner)
            if may_change_dtype(target):
                advice = "the weights are loaded as training.dtype says"
                self.run.note_node(target, "model", advice)
        else:
            self.run.model = self._read_setting("model", node, scope)

    def _read_loaded_model(self, call: ast.Call, scope: Scope) -> None:
        """Read a call of from_pretrained."""
        loader = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        loader_name = self.run.source_of(loader).rpartition(".")[2]
        if loader_name.startswith("PeftModel") and call.args:
            self.run.note_node(call, "model", TRAINED_ADAPTER)
            self._read_model({"model": call.args[0]}, scope)
            return
        if loader_name not in _LOADERS:
            advice = "the trainer loads it by AutoModelForCausalLM, not quantised"
            self.run.note(call.lineno, "model", self.run.source_of(loader), advice)
        arguments = self._arguments(call, ("model",), scope)
        for former in ("pretrained_model_name_or_path", "model_name"):
            if former in arguments:
                arguments["model"] = arguments.pop(former)
        self._read_pretrained(arguments, scope)
        if not {"dtype", "torch_dtype"} & set(arguments):
            advice = "transformers takes the dtype of the model's files: set training.dtype"
            self.run.note(call.lineno, called_name(call), "", advice)

    def _read_pretrained(self, arguments: dict[str, ast.expr], scope: Scope) -> None:
        for name, node in arguments.items():
            value = self._read_setting(name, node, scope, refusal=loading_refusal(name))
            if value is None:
                continue
            if name == "model":
                self.run.model = value
            else:
                self.run.model_arguments[name] = value

    def _read_config(self, node: ast.expr | None, scope: Scope) -> None:
        if node is None or _is_none(node):
            return
        try:
            target, inner, index = scope.follow(node)
            parsed = parsed_classes(inner, target) if isinstance(target, ast.Call) else None
        except Computed as error:
            advice = f"{error}; write its settings into the job"
            self.run.note_node(node, "args", advice)
            return
        self._objects[id(target), index] = "args"
        classes = self._classes(CONFIG)
        if isinstance(target, ast.Call) and called_name(target) in classes and index is None:
            self._put_defaults(classes[called_name(target)], self.root)
            for name, value in self._arguments(target, ("output_dir",), inner).items():
                self._put_config(name, value, inner)
        elif parsed is not None:
            if index is not None and index < len(parsed):
                definition, defined_in, _ = inner.resolve(parsed[index])
                self._put_defaults(definition, defined_in)
            advice = (
                "its values come from the command line or a file, and TRL's defaults were taken: "
                "add yours to the job, or give the YAML file to `grpo init --from-trl`"
            )
            self.run.note_node(target, "args", advice)
        else:
            advice = "no GRPOConfig(…) was found here: write its settings into the job"
            self.run.note_node(node, "args", advice)

    def _put_defaults(self, definition: ast.AST | None, scope: Scope) -> None:
        """Defaults that a subclass of GRPOConfig in the script, or a base of it, replaces, and what
        their methods set."""
        if not isinstance(definition, ast.ClassDef):
            return
        defaults: dict[str, tuple[ast.expr, Scope]] = {}
        for base, inner in reversed(class_order(scope, definition)):
            if isinstance(base, str):
                # TRL's own defaults come before those of classes behind it.
                defaults = {} if base in self._classes(CONFIG) else defaults
                continue
            for statement in base.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    name = statement.target.id
                    default = field_default(statement, name)
                    if default is not None and is_dataclass(base):
                        defaults[name] = default, inner
                    elif default is not None:
                        advice = f"no effect: {base.name} is no dataclass"
                        self.run.note(statement.lineno, name, self.run.source_of(default), advice)
                if isinstance(statement, ast.FunctionDef):
                    note_method(self.run, statement)
        for name, (default, inner) in defaults.items():
            self._put_config(name, default, inner)

    def _read_lora(self, node: ast.expr, scope: Scope) -> None:
        if _is_none(node):
            return
        why = "no LoraConfig(…) was found here"
        try:
            target, inner, index = scope.follow(node)
            self._objects[id(target), index] = "peft_config"
        except Computed as error:
            target, inner, why = node, scope, str(error)
        if isinstance(target, ast.Constant) and target.value is None:
            return
        if isinstance(target, ast.Call) and called_name(target) == "get_peft_config":
            advice = "the command line decides; all parameters are trained, as by TRL's default"
            self.run.note_node(node, "peft_config", advice)
            return
        if isinstance(target, ast.Call) and called_name(target) == "LoraConfig":
            self._read_lora_fields(self._arguments(target, LORA_POSITIONS, inner), inner)
            return
        taken = "LoRA with PEFT's defaults"
        self.run.lora = {}
        configs = [
            (call, inner)
            for statement, _, inner in scoped_statements(self.module.body, self.root)
            for call in own_expressions(statement)
            if isinstance(call, ast.Call) and called_name(call) == "LoraConfig"
        ]
        if len(configs) == 1:
            call, inner = configs[0]
            self._read_lora_fields(self._arguments(call, LORA_POSITIONS, inner), inner)
            taken = f"the LoraConfig of line {call.lineno}"
        advice = f"{why}; {taken} was taken: set adapter as it should be"
        self.run.note_node(node, "peft_config", advice)

    def _read_lora_fields(self, arguments: dict[str, ast.expr], scope: Scope) -> None:
        self.run.lora = {}
        for name, node in arguments.items():
            if name == "task_type":
                continue  # a causal language model, as every job's
            value = self._read_setting(name, node, scope, refusal=adapter_refusal(name))
            if value is not None:
                self.run.lora[name] = value

    def _read_tokenizer(self, node: ast.expr | None, scope: Scope) -> None:
        """The model's own tokenizer needs no setting; a job has no setting for another."""
        if node is None or _is_none(node):
            return
        try:
            target, inner, index = scope.follow(node)
            self._objects[id(target), index] = "processing_class"
            if isinstance(target, ast.Call) and self._is_tokenizer(target, inner, index):
                return
        except Computed:
            pass
        self.run.note_node(node, "processing_class", OTHER_TOKENIZER)

    def _is_tokenizer(self, call: ast.Call, scope: Scope, index: int | None) -> bool:
        """True for a call that loads the model's own tokenizer as TRL does.

        Raises:
            Computed: the name of the loaded model is not constant.
        """
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        name = scope.evaluate(arguments[0]) if arguments else None
        if self.run.model is None or name != self.run.model.value:
            return False
        if index is not None:
            return True  # the call loads the model, too, and its arguments are read with it
        names = {keyword.arg for keyword in call.keywords[len(call.args) == 0 :]}
        revision = self.run.model_arguments.get("revision")
        if revision is not None and "revision" in names:
            given = [word.value for word in call.keywords if word.arg == "revision"]
            names -= {"revision"} if scope.evaluate(given[0]) == revision.value else set()
        return len(call.args) <= 1 and names <= set(TOKENIZER_LOADING)

    def _read_changes(self, trainer: ast.Call, scope: Scope) -> None:
        """Settings that the script changes after their object was made, as by `args.beta = 0.1`."""
        self._objects[id(trainer), None] = "trainer"
        parts = list(scoped_statements(self.module.body, self.root))
        branch_bodies = bodies_in_branches(self.module, parts)
        for statement, in_own_branch, inner in parts:
            is_beside_trainer = inner.body is scope.body
            is_late = is_beside_trainer and statement.lineno > trainer.lineno
            is_conditional = in_own_branch or (
                not is_beside_trainer and id(inner.body) in branch_bodies
            )
            for target, value in changed_attributes(statement):
                kind = owner_kind(self._objects, target, inner)
                name = f"{ast.unparse(target.value)}.{target.attr}"
                if value is not None and not is_conditional and not is_late:
                    if kind == "args":
                        self._put_config(target.attr, value, inner)
                        continue
                    if target.attr == "chat_template" and kind == "processing_class":
                        self.run.chat_template = self._read_setting(name, value, inner)
                        continue
                if is_named(kind, target, statement):
                    source = self.run.source_of(value)
                    advice = change_advice(kind, target.attr, is_conditional)
                    self.run.note(statement.lineno, name, source, advice)

    def _put_config(self, name: str, node: ast.expr, scope: Scope) -> None:
        field = RENAMED.get(name, name)
        place = PLACES.get(field, Place("Spec", "", ""))
        is_read = field in (*BATCHING, *READ_ELSEWHERE)
        refusal = "" if is_read else refusal_message(place)
        setting = self._read_setting(name, node, scope, refusal=refusal, place=place.path)
        if setting is not None:
            self.run.config[field] = setting


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
