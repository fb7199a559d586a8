"""Reads a script that makes a GRPOTrainer, by its syntax tree: nothing of it runs.

What the trainer is given is followed back to GRPOConfig, LoraConfig, from_pretrained,
load_dataset and reward functions, wherever the script makes them. What can't be followed becomes a
note with its line.
"""

import ast
from collections.abc import Iterator

from .dataset_reader import DatasetReader
from .expressions import Computed, Scope
from .reward_reader import RewardReader
from .syntax import called_name, dotted_name, parse, statements
from .trl_run import RENAMED, ReadModule, TrlError, TrlRun, TrlSetting

TRAINER, CONFIG = "GRPOTrainer", "GRPOConfig"
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
NOT_TAKEN = {
    "eval_dataset": "score the model by a second job with command grpo_trainer.evaluation",
    "reward_processing_classes": "a reward model is used with its own tokenizer",
    "callbacks": "a job runs no callbacks; its metrics and checkpoints need none",
    "optimizers": "set training.optimizer, learningRate and lrSchedulerType",
    "quantization_config": "quantised base models are not trained; remove it",
    "tools": "a job has no tools",
    "rollout_func": "a job samples by itself; set generation.engine",
    "environment_factory": "a job has no environments; write a reward function",
}
"""Arguments of the trainer that no job has, with what to do."""
_LOADERS = ("AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")


def read_script(text: str, source: str, read_module: ReadModule) -> TrlRun:
    """The run that a script describes; `source` is its name for messages.

    Raises:
        TrlError: it is no Python, has no GRPOTrainer or several, or is nested too deeply.
    """
    try:
        return _ScriptReader(parse(text), text, source, read_module).read()
    except SyntaxError as error:
        raise TrlError(f"{source} line {error.lineno or 1}: no Python: {error.msg}") from error
    except ValueError as error:
        raise TrlError(f"{source}: no Python: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise TrlError(f"{source}: its expressions are nested too deeply to be read") from error


class _ScriptReader:
    """One script."""

    def __init__(self, module: ast.Module, text: str, source: str, read_module: ReadModule) -> None:
        self.module = module
        self.text = text
        self.run = TrlRun(source)
        self.read_module = read_module
        self.root = Scope(module, module.body)

    def read(self) -> TrlRun:
        """The whole script.

        Raises:
            TrlError: no GRPOTrainer, or several.
        """
        call, scope = self._trainer()
        arguments = self._arguments(call, POSITIONS, scope)
        self._read_model(arguments, scope)
        self._read_config(arguments.get("args"), scope)
        self._read_changes(arguments.get("args"), scope, call.lineno)
        if "peft_config" in arguments:
            self._read_lora(arguments["peft_config"], scope)
        datasets = DatasetReader(self.run, self.text)
        datasets.read(arguments.get("train_dataset"), scope, call.lineno)
        rewards = RewardReader(self.run, self.text, self.read_module)
        rewards.read(arguments.get("reward_funcs"), scope, call.lineno)
        self._read_tokenizer(arguments.get("processing_class"), scope)
        for name, advice in NOT_TAKEN.items():
            node = arguments.get(name)
            if node is not None and not _is_none(node):
                self.run.note(node.lineno, name, self._source(node), advice)
        for note in self.root.assumptions:
            self.run.note(note.line, note.name, note.value, note.advice)
        return self.run

    def _trainer(self) -> tuple[ast.Call, Scope]:
        """The call that makes the trainer, and the scope that it is in."""
        names = {TRAINER, *self._trainer_classes()}
        calls = list(_calls(self.module.body, self.root, names))
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

    def _trainer_classes(self) -> list[str]:
        """Other names of GRPOTrainer: imported as, and the script's own subclasses."""
        names: list[str] = []
        for node in ast.walk(self.module):
            if isinstance(node, ast.ImportFrom):
                names += [
                    alias.asname for alias in node.names if alias.name == TRAINER and alias.asname
                ]
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if bases & {TRAINER, *names}:
                    names.append(node.name)
                    advice = "a job trains by TRL's own loss; what the class changes is not taken"
                    self.run.note(node.lineno, f"class {node.name}", "", advice)
        return names

    def _arguments(
        self, call: ast.Call, positions: tuple[str, ...], scope: Scope
    ) -> dict[str, ast.expr]:
        """What a call is given, by parameter; literal dicts that it unpacks are among it."""
        arguments: dict[str, ast.expr] = dict(zip(positions, call.args, strict=False))
        for node in call.args[len(positions) :]:
            self.run.note(node.lineno, "argument", self._source(node), "give it by its name")
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = keyword.value
                continue
            arguments |= dict(self._unpacked(keyword.value, scope))
        return arguments

    def _unpacked(self, node: ast.expr, scope: Scope) -> Iterator[tuple[str, ast.expr]]:
        """The entries of what `**` unpacks, where they are literal."""
        try:
            target, inner, _ = scope.resolve(node)
            value = inner.evaluate(target) if isinstance(target, ast.expr) else None
        except Computed:
            value = None
        if not isinstance(value, dict):
            advice = "it is computed when the script runs: write its entries into the job"
            self.run.note(node.lineno, f"**{self._source(node)}", "", advice)
            return
        for name, entry in value.items():
            constant = ast.Constant(entry, lineno=node.lineno, col_offset=0)
            yield str(name), constant

    def _read_setting(self, name: str, node: ast.expr, scope: Scope) -> TrlSetting | None:
        """The constant of an argument; a note where it is not constant."""
        try:
            return TrlSetting(scope.evaluate(node), node.lineno)
        except Computed as error:
            advice = f"{error}; write the value into the job"
            self.run.note(node.lineno, name, self._source(node), advice)
            return None

    def _read_model(self, arguments: dict[str, ast.expr], scope: Scope) -> None:
        node = arguments.get("model")
        if node is None:
            return
        try:
            target, inner, _ = scope.follow(node)
        except Computed:
            self._read_setting("model", node, scope)
            return
        if not isinstance(target, ast.Call):
            self.run.model = self._read_setting("model", node, scope)
            return
        name = called_name(target)
        if name == "from_pretrained" and target.args + target.keywords:
            loader = target.func.value if isinstance(target.func, ast.Attribute) else target.func
            if self._source(loader).rpartition(".")[2] not in _LOADERS:
                advice = "the trainer loads it by AutoModelForCausalLM"
                self.run.note(target.lineno, "model", self._source(loader), advice)
            call_arguments = self._arguments(target, ("model",), inner)
            for former in ("pretrained_model_name_or_path", "model_name"):
                if former in call_arguments:
                    call_arguments["model"] = call_arguments.pop(former)
            self._read_pretrained(call_arguments, inner)
        elif name == "get_peft_model":
            call_arguments = self._arguments(target, ("model", "peft_config"), inner)
            self._read_model(call_arguments, inner)
            if "peft_config" in call_arguments:
                self._read_lora(call_arguments["peft_config"], inner)
            else:
                call_arguments.pop("model", None)
                self._read_lora_fields(call_arguments, inner)
        else:
            self._read_setting("model", node, scope)

    def _read_pretrained(self, arguments: dict[str, ast.expr], scope: Scope) -> None:
        for name, node in arguments.items():
            value = self._read_setting(name, node, scope)
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
        except Computed as error:
            advice = f"{error}; write its settings into the job"
            self.run.note(node.lineno, "args", self._source(node), advice)
            return
        if isinstance(target, ast.Call) and index is None:
            for name, value in self._arguments(target, ("output_dir",), inner).items():
                self._put_config(name, value, inner)
        elif isinstance(target, ast.Call) and inner.parsed_classes(target) is not None:
            self._config_of_parser(inner.parsed_classes(target) or [], index, inner)
            advice = (
                "its values come from the command line or a file, and TRL's defaults were taken: "
                "add yours to the job, or give the YAML file to `grpo init --from-trl`"
            )
            self.run.note(target.lineno, "args", self._source(target), advice)
        else:
            advice = "no GRPOConfig(…) was found here: write its settings into the job"
            self.run.note(node.lineno, "args", self._source(node), advice)

    def _config_of_parser(self, classes: list[ast.expr], index: int | None, scope: Scope) -> None:
        """Defaults that a subclass of GRPOConfig in the script replaces."""
        if index is None or index >= len(classes):
            return
        definition, inner, _ = scope.resolve(classes[index])
        if not isinstance(definition, ast.ClassDef):
            return
        for statement in definition.body:
            if not isinstance(statement, ast.AnnAssign) or statement.value is None:
                continue
            if isinstance(statement.target, ast.Name):
                self._put_config(statement.target.id, statement.value, inner)

    def _read_lora(self, node: ast.expr, scope: Scope) -> None:
        if _is_none(node):
            return
        try:
            target, inner, _ = scope.follow(node)
        except Computed as error:
            target, inner = node, scope
            self.run.note(node.lineno, "peft_config", self._source(node), str(error))
        if isinstance(target, ast.Constant) and target.value is None:
            return
        if isinstance(target, ast.Call) and called_name(target) == "get_peft_config":
            advice = "the command line decides; all parameters are trained, as by TRL's default"
            self.run.note(node.lineno, "peft_config", self._source(node), advice)
            return
        if isinstance(target, ast.Call) and called_name(target) == "LoraConfig":
            self._read_lora_fields(self._arguments(target, LORA_POSITIONS, inner), inner)
            return
        self.run.lora = {}
        advice = (
            "an adapter is trained with LoRA of the job's defaults; set adapter as it should be"
        )
        self.run.note(node.lineno, "peft_config", self._source(node), advice)

    def _read_lora_fields(self, arguments: dict[str, ast.expr], scope: Scope) -> None:
        self.run.lora = {}
        for name, node in arguments.items():
            if name == "task_type":
                continue  # a causal language model, as every job's
            value = self._read_setting(name, node, scope)
            if value is not None:
                self.run.lora[name] = value

    def _read_tokenizer(self, node: ast.expr | None, scope: Scope) -> None:
        """The model's own tokenizer needs no setting; a job has no setting for another."""
        if node is None or _is_none(node):
            return
        advice = "a job takes the tokenizer of its model; save another beside the model's weights"
        try:
            target, inner, _ = scope.follow(node)
            if isinstance(target, ast.Call):
                arguments = [*target.args, *(keyword.value for keyword in target.keywords)]
                name = inner.evaluate(arguments[0]) if arguments else None
                if self.run.model is not None and name == self.run.model.value:
                    return
        except Computed:
            pass
        self.run.note(node.lineno, "processing_class", self._source(node), advice)

    def _read_changes(self, node: ast.expr | None, scope: Scope, line: int) -> None:
        """Settings that the script changes after the config was made, such as `args.beta = 0.1`."""
        owner = node.id if isinstance(node, ast.Name) else None
        for statement, is_conditional in statements(scope.body):
            if not isinstance(statement, ast.Assign) or statement.lineno > line:
                continue
            for target in statement.targets:
                if not isinstance(target, ast.Attribute):
                    continue
                name, value = dotted_name(target), self._source(statement.value)
                if target.attr == "chat_template":
                    self.run.chat_template = self._read_setting(name, statement.value, scope)
                elif owner is None or name != f"{owner}.{target.attr}":
                    continue
                elif is_conditional:
                    advice = "a condition decides on it; write it into the job"
                    self.run.note(statement.lineno, name, value, advice)
                else:
                    self._put_config(target.attr, statement.value, scope)

    def _put_config(self, name: str, node: ast.expr, scope: Scope) -> None:
        setting = self._read_setting(name, node, scope)
        if setting is not None:
            self.run.config[RENAMED.get(name, name)] = setting

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _calls(body: list[ast.stmt], scope: Scope, names: set[str]) -> Iterator[tuple[ast.Call, Scope]]:
    """Calls of these names in a body and in the functions that it defines, with their scopes."""
    for statement, _ in statements(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _calls(statement.body, scope.inside(statement), names)
            continue
        if isinstance(statement, ast.ClassDef):
            continue
        for node in _own_expressions(statement):
            if isinstance(node, ast.Call) and called_name(node) in names:
                yield node, scope


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Expressions of a statement, without those of the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.keyword | ast.withitem):
            yield from ast.walk(child)
