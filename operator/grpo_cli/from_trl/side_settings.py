"""Names what a script sets beside the trainer's arguments, and what it changes of these.

Calls and variables say where its run is tracked and goes on, and in which environment. Other stages
change the model that is trained, and so do statements between its loading and the training.
"""

import ast
from collections.abc import Mapping, Sequence

from grpo_api.spec.trl_places import FIELDS

from .interpreter.objects import Change
from .interpreter.syntax import called_name, dotted_name, walk_reachable
from .interpreter.values import DTYPES, External, Unknown, owners
from .trl_run import NO_CALLBACKS, TrlRun

_RESUMES = "a job goes on from its own checkpoints; set resumeFrom for those of another job"
_SIDE_CALLS = {
    "wandb.init": "tracking.wandb and runName",
    "trackio.init": "tracking.trackio and runName",
    "mlflow.set_tracking_uri": "tracking.mlflow.url",
    "mlflow.set_experiment": "tracking.mlflow.experiment",
    "torch.set_float32_matmul_precision": "training.overrides.tf32",
}
"""Calls beside the trainer's arguments that set the run, and the job's fields."""
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
_LIBRARIES = ("accelerate", "peft", "transformers")
"""What TRL trains by."""
_WITHOUT_EFFECT = ("eval", "pad_token_id", "use_cache")
_ALWAYS_NAMED = (
    "allow_tf32", "chat_template", "eos_token", "eos_token_id", "requires_grad", "requires_grad_",
)  # fmt: skip
"""Fields that are named whatever object they belong to."""


def note_side_settings(run: TrlRun, module: ast.Module, trainer: ast.Call) -> None:
    """Note each of them in the run; `trainer` is the call of GRPOTrainer."""
    for node in walk_reachable(module):
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
            case ast.Call() if dotted_name(node.func) in _SIDE_CALLS:
                name = dotted_name(node.func)
                run.note(node.lineno, name, "", f"set {_SIDE_CALLS[name]}")
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
        case ast.Call(func=ast.Name(id="exec"), args=[_, scope, *_]):
            return called_name(scope) in ("globals", "locals")
        case ast.Call(func=ast.Name(id="exec")):
            return True
        case (
            ast.Subscript(ctx=ast.Store(), value=owner)
            | ast.Call(func=ast.Attribute(attr="update", value=owner))
        ):
            return isinstance(owner, ast.Call) and called_name(owner) in ("globals", "locals")
    return False


def _note_resume(run: TrlRun, call: ast.Call) -> None:
    given = [word.value for word in call.keywords if word.arg == "resume_from_checkpoint"]
    # A model's `train(False)` is torch's, and sets its mode.
    if not ast.unparse(call.func).endswith("model.train"):
        given += call.args[:1]
    for node in given:
        if not (isinstance(node, ast.Constant) and node.value is None):
            run.note_node(node, "resume_from_checkpoint", _RESUMES)


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


def may_change_dtype(call: ast.AST) -> bool:
    """True for a model's `to` or `cuda` that may change its type, not only its device."""
    if not isinstance(call, ast.Call):
        return False
    names = (dotted_name(node).removeprefix("torch.") for node in call.args)
    return bool(call.keywords) or any(name in DTYPES for name in names)


def note_changes(
    run: TrlRun, changes: Sequence[Change], kinds: Mapping[int, str], num_early: int
) -> None:
    """Note changes of the trainer's arguments that no reader has taken: those below the trainer,
    of which `num_early` are above it, and those of objects whose fields a job does not have.
    `kinds` are the arguments by the ids of their objects."""
    for position, change in enumerate(changes):
        kind = _owner_kind(change, kinds)
        is_read = kind in ("args", "peft_config") and change.call is None
        if kind == "processing_class" and change.attribute == "chat_template":
            is_read = True
        if (is_read and position < num_early) or not _is_named(kind, change):
            continue
        source = ""
        if change.use is not None and isinstance(change.use.node, ast.expr):
            source = run.source_of(change.use.node)
        advice = _change_advice(kind, change)
        run.note(change.line, change.name, source, advice)


def _owner_kind(change: Change, kinds: Mapping[int, str]) -> str | None:
    """The argument of the trainer that a change is of, "trainer", or "library" for code that trains
    the run; "unknown" if only the run shows whether a field belongs to the config."""
    for depth, owner in enumerate(owners(change.owner)):
        library = owner.path.partition(".")[0] if isinstance(owner, External) else ""
        # Calls such as transformers.set_seed change no code.
        if library == "trl" or (library in _LIBRARIES and change.call is None):
            return "library"
        kind = kinds.get(id(owner))
        if kind is not None:
            return kind if depth == 0 or kind in ("trainer", "model") else None
    is_self = change.name.startswith("self.")
    is_open = isinstance(change.owner, Unknown) and change.attribute in FIELDS
    return "unknown" if is_open and not is_self else None


def _is_named(kind: str | None, change: Change) -> bool:
    """True for a change that may change the training, and has no note for another reason."""
    if kind not in ("model", "processing_class"):
        return kind is not None or change.attribute in _ALWAYS_NAMED
    if change.attribute in ("to", "cuda") and change.call is not None:
        return may_change_dtype(change.call)
    return change.attribute not in (*_MODEL_CALLS, *_WITHOUT_EFFECT, *TOKENIZER_LOADING)


def _change_advice(kind: str | None, change: Change) -> str:
    """Why a change is not taken, and what to do."""
    if change.attribute.startswith("requires_grad"):
        return "a job trains all parameters, or an adapter"
    if change.attribute == "add_callback":
        return NO_CALLBACKS
    if change.attribute == "allow_tf32":
        return "set training.overrides.tf32"
    if not change.attribute:
        return "code of another file may change it: compare, and set it in the job"
    advice = {"library": OWN_CODE, "model": _CHANGED_MODEL}.get(kind or "")
    if advice is None:
        advice = "a condition decides on it" if change.is_conditional else "it changes here"
        advice += "; set it in the job"
    return advice
