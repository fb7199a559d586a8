"""Names what a script sets beside the trainer's arguments, and what it changes of these.

Calls and variables say where its run is tracked and goes on, and in which environment. Other stages
change the model that is trained, and so do statements between its loading and the training.
Modules beside the script have constants, which are taken.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from grpo_api.spec.trl_places import FIELDS

from .expressions import DTYPES, Scope
from .syntax import (
    Computed,
    called_name,
    changed_attributes,
    dotted_name,
    is_trl_import,
    own_expressions,
    parse,
    statements,
)
from .trl_run import NO_CALLBACKS, ReadModule, TrlRun

_RESUMES = "a job goes on from its own checkpoints; set resumeFrom for those of another job"
_TRACKER_CALLS = {
    "wandb.init": "wandb and runName",
    "trackio.init": "trackio and runName",
    "mlflow.set_tracking_uri": "mlflow.url",
    "mlflow.set_experiment": "mlflow.experiment",
}
"""Calls by which a script chooses where its run is tracked, and the job's fields."""
_TRACKER_VARIABLES = {
    "WANDB_PROJECT": "wandb.project",
    "MLFLOW_TRACKING_URI": "mlflow.url",
    "MLFLOW_EXPERIMENT_NAME": "mlflow.experiment",
}
"""Variables that choose the same, and the job's fields."""
_MODEL_CALLS = (
    "add_adapter", "add_special_tokens", "add_tokens", "load_adapter", "load_state_dict",
    "resize_token_embeddings",
)  # fmt: skip
_CHANGED_MODEL = "a job trains the model's files: save the changed model, and give it by --model"
_OTHER_STAGE = "a job trains by GRPO alone: save what this trains, and give it by --model"
OWN_CODE = "a job trains by TRL's own code; what the script changes of it is not taken"
TOKENIZER_LOADING = (
    "cache_dir", "model_max_length", "pad_token", "padding_side", "token", "truncation_side",
    "trust_remote_code", "use_fast",
)  # fmt: skip
"""What a tokenizer may be loaded with that changes no token: TRL itself pads."""
_WITHOUT_EFFECT = ("eval", "pad_token_id", "use_cache")
_ALWAYS_NAMED = ("chat_template", "eos_token", "eos_token_id", "requires_grad", "requires_grad_")
"""Fields that are named whatever object they belong to."""
N = TypeVar("N", bound=ast.AST)
Part = tuple[ast.stmt, bool, Scope]
"""A statement, whether a condition or a loop decides on it, and its scope."""


def note_side_settings(run: TrlRun, module: ast.Module, trainer: ast.Call) -> None:
    """Note each of them in the run; `trainer` is the call of GRPOTrainer."""
    for node in ast.walk(module):
        match node:
            case ast.ImportFrom():
                _note_foreign_class(run, node)
            case ast.expr() if _may_bind_anything(node):
                advice = "it may set anything of the run: compare the job with the script's run"
                run.note(node.lineno, ast.unparse(node), "", advice)
            case ast.Call(func=ast.Attribute(attr="train")):
                _note_resume(run, node)
            case ast.Call(func=ast.Attribute(attr="push_to_hub")):
                if not run.value("push_to_hub"):
                    advice = "set export.to to Hub, and export.hub.repository"
                    run.note(node.lineno, ast.unparse(node.func), "", advice)
            case ast.Call() if dotted_name(node.func) in _TRACKER_CALLS:
                name = dotted_name(node.func)
                run.note(node.lineno, name, "", f"set tracking.{_TRACKER_CALLS[name]}")
            case ast.Call(func=ast.Attribute(attr=method)) if method in _MODEL_CALLS:
                run.note(node.lineno, ast.unparse(node.func), "", _CHANGED_MODEL)
            case ast.Call() if called_name(node).endswith("Trainer") and node is not trainer:
                run.note(node.lineno, called_name(node), "", _OTHER_STAGE)
            case ast.Subscript(ctx=ast.Store(), value=owner, slice=variable):
                _note_variable(run, node, owner, variable)
            case ast.Call(func=ast.Attribute(attr="setdefault" | "update", value=owner)):
                _note_variable(run, node, owner, node.args[0] if node.args else node)
            case ast.AugAssign(target=ast.Attribute() | ast.Name() as owner, value=added):
                _note_variable(run, owner, owner, added)


def _note_foreign_class(run: TrlRun, node: ast.ImportFrom) -> None:
    """Name a trainer or a config that has the name of TRL's and comes from elsewhere."""
    if not node.level and (node.module or "").partition(".")[0] in ("trl", "unsloth"):
        return  # Unsloth changes TRL's classes in their place
    for alias in node.names:
        if alias.name in ("GRPOConfig", "GRPOTrainer"):
            run.note(node.lineno, f"class {alias.name}", node.module or ".", OWN_CODE)


def _may_bind_anything(node: ast.expr) -> bool:
    """True for what may bind any name of the script."""
    match node:
        case ast.Call(func=ast.Name(id="exec")):
            return True
        case (
            ast.Subscript(ctx=ast.Store(), value=owner)
            | ast.Call(func=ast.Attribute(attr="update", value=owner))
        ):
            return isinstance(owner, ast.Call) and called_name(owner) == "globals"
    return False


def _note_resume(run: TrlRun, call: ast.Call) -> None:
    given = [word.value for word in call.keywords if word.arg == "resume_from_checkpoint"]
    # A model's `train(False)` is torch's, and sets its mode.
    if not ast.unparse(call.func).endswith("model.train"):
        given += call.args[:1]
    for node in given:
        if not (isinstance(node, ast.Constant) and node.value is None):
            run.note(call.lineno, "resume_from_checkpoint", run.source_of(node), _RESUMES)


def _note_variable(run: TrlRun, node: ast.expr, owner: ast.expr, variable: ast.expr) -> None:
    """Name a variable of the environment; its value may be a token, and is not shown."""
    if dotted_name(owner) not in ("os.environ", "environ"):
        return
    name, advice = "os.environ", "set it in env, if the run needs it; a secret by valueFrom"
    if isinstance(variable, ast.Constant):
        name = f"os.environ[{variable.value!r}]"
        if str(variable.value) in _TRACKER_VARIABLES:
            advice = f"set tracking.{_TRACKER_VARIABLES[str(variable.value)]}"
    run.note(node.lineno, name, "", advice)


def owner_kind(
    objects: Mapping[tuple[int, int | None], str], attribute: ast.Attribute, scope: Scope
) -> str | None:
    """The argument of the trainer that an attribute belongs to, "trainer", or "trl" for what is
    imported of it; "unknown" if only the run shows whether a field belongs to the config.
    `objects` are the arguments by the expressions that make them."""
    node = attribute.value
    is_part = isinstance(node, ast.Attribute | ast.Subscript)
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    try:
        target, _, index = scope.follow(node)
    except Computed:
        is_self = isinstance(node, ast.Name) and node.id == "self"
        return "unknown" if attribute.attr in FIELDS and not is_self else None
    if is_trl_import(target):
        return "trl"
    kind = objects.get((id(target), index))
    return kind if not is_part or kind in ("trainer", "model") else None


def note_method(run: TrlRun, method: ast.FunctionDef) -> None:
    """Name the fields that a method of a config sets, as `__post_init__` does; and each `__init__`,
    which may give its base other values than it is given."""
    if method.name == "__init__":
        advice = "a config's own __init__ may set any field: write what it sets into the job"
        run.note(method.lineno, method.name, "", advice)
    for statement, _ in statements(method.body):
        for target, value in changed_attributes(statement):
            advice = f"{method.name} sets it; set it in the job"
            run.note(statement.lineno, ast.unparse(target), run.source_of(value), advice)


def may_change_dtype(call: ast.Call) -> bool:
    """True for a model's `to` or `cuda` that may change its type, not only its device."""
    names = (dotted_name(node).removeprefix("torch.") for node in call.args)
    return bool(call.keywords) or any(name in DTYPES for name in names)


def is_named(kind: str | None, target: ast.Attribute, statement: ast.stmt) -> bool:
    """True for a change that may change the training, and has no note for another reason."""
    if kind not in ("model", "processing_class"):
        return kind is not None or target.attr in _ALWAYS_NAMED
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="to" | "cuda")) as call):
            return may_change_dtype(call)
    return target.attr not in (*_MODEL_CALLS, *_WITHOUT_EFFECT, *TOKENIZER_LOADING)


def change_advice(kind: str | None, name: str, is_conditional: bool) -> str:
    """Why a change is not taken, and what to do."""
    if name.startswith("requires_grad"):
        return "a job trains all parameters, or an adapter"
    if name == "add_callback":
        return NO_CALLBACKS
    advice = {"trl": OWN_CODE, "model": _CHANGED_MODEL}.get(kind or "")
    if advice is None:
        advice = "a condition decides on it" if is_conditional else "it changes here"
        advice += "; set it in the job"
    return advice


def scoped_statements(
    body: Sequence[ast.stmt], scope: Scope
) -> Iterator[tuple[ast.stmt, bool, Scope]]:
    """Statements of a body and of the functions that it defines, whether a condition decides on
    them, and their scopes."""
    for statement, is_conditional in statements(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from scoped_statements(statement.body, scope.inside(statement))
        elif isinstance(statement, ast.ClassDef):
            yield from scoped_statements(statement.body, scope)
        else:
            yield statement, is_conditional, scope


def bodies_in_branches(module: ast.Module, parts: Sequence[Part]) -> set[int]:
    """Ids of the bodies of functions that a condition or a loop calls; `parts` are the script's
    statements."""
    branch_calls = {
        called_name(node)
        for statement, is_conditional, _ in parts
        for node in own_expressions(statement)
        if is_conditional and isinstance(node, ast.Call)
    }
    return {
        id(node.body)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name in branch_calls
    }


def bind_neighbours(root: Scope, read_module: ReadModule) -> None:
    """Give what the script imports from beside it the constants that it has there."""
    for statement in root.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                constants = _constants(alias.name, read_module, with_functions=False)
                if constants:
                    settings = _settings_class(alias.name, constants)
                    name = alias.asname or alias.name
                    root.rebind(name, statement, _placed(settings, statement))
        elif isinstance(statement, ast.ImportFrom) and statement.level <= 1:
            constants = _constants(statement.module or "", read_module)
            names = {alias.name: alias.asname or alias.name for alias in statement.names}
            if "*" in names:
                names = {name: name for name in constants if not name.startswith("_")}
            for name in names.keys() & constants:
                # It hides what the script binds above, also where nobody knows its value.
                value = constants[name] or statement
                root.rebind(names[name], statement, _placed(value, statement))


def _settings_class(name: str, constants: Mapping[str, ast.expr | None]) -> ast.ClassDef:
    """A class whose fields are read as those of a module."""
    pairs = [(ast.Name(key), value) for key, value in constants.items() if value]
    return ast.ClassDef(name, [], [], [ast.Assign([key], value) for key, value in pairs], [])


def _placed(node: N, statement: ast.stmt) -> N:
    """The node with the place of a statement."""
    return ast.fix_missing_locations(ast.copy_location(node, statement))


def _constants(
    module_name: str, read_module: ReadModule, *, with_functions: bool = True
) -> dict[str, ast.expr | None]:
    """What a module beside the script assigns, with None for what is computed; unless
    `with_functions`, nothing of one that defines some."""
    text = read_module(module_name)
    try:
        module = parse(text or "")
    except (SyntaxError, ValueError):
        return {}
    if not with_functions and any(isinstance(part, ast.FunctionDef) for part in module.body):
        return {}
    scope, constants = Scope(module, module.body), dict[str, ast.expr | None]()
    for name, bindings in scope.bindings.items():
        if not all(isinstance(made.value, ast.stmt) for made in bindings):
            constants[name] = None
        with suppress(Computed, SyntaxError):
            value = scope.deferred_scope().evaluate(ast.Name(name, lineno=0, col_offset=0))
            if not scope.assumptions:  # that a variable of the environment may replace
                constants[name] = ast.parse(repr(value), mode="eval").body
        scope.assumptions.clear()
    return constants
