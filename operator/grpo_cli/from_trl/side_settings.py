"""Names what a script sets beside the trainer's arguments, by calls and variables.

They say where its run is tracked and goes on, and in which environment. Other stages, too, change
the model that is trained.
"""

import ast

from .syntax import called_name, dotted_name
from .trl_run import TrlRun

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
_MODEL_CALLS = ("add_special_tokens", "add_tokens", "load_adapter", "resize_token_embeddings")
_CHANGED_MODEL = "a job trains the model's files: save the changed model, and give it by --model"
_OTHER_STAGE = "a job trains by GRPO alone: save what this trains, and give it by --model"


def note_side_settings(run: TrlRun, module: ast.Module, text: str, trainer: ast.Call) -> None:
    """Note each of them in the run; `text` is the script, `trainer` its call of GRPOTrainer."""
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(attr="train")):
                _note_resume(run, node, text)
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


def _note_resume(run: TrlRun, call: ast.Call, text: str) -> None:
    given = [word.value for word in call.keywords if word.arg == "resume_from_checkpoint"]
    # A model's `train(False)` is torch's, and sets its mode.
    if not ast.unparse(call.func).endswith("model.train"):
        given += call.args[:1]
    for node in given:
        if not (isinstance(node, ast.Constant) and node.value is None):
            value = ast.get_source_segment(text, node) or ast.unparse(node)
            run.note(call.lineno, "resume_from_checkpoint", value, _RESUMES)


def _note_variable(run: TrlRun, node: ast.expr, owner: ast.expr, variable: ast.expr) -> None:
    """Name a variable of the environment; its value may be a token, and is not shown."""
    if dotted_name(owner) != "os.environ":
        return
    name, advice = "os.environ", "set it in env, if the run needs it; a secret by valueFrom"
    if isinstance(variable, ast.Constant):
        name = f"os.environ[{variable.value!r}]"
        if str(variable.value) in _TRACKER_VARIABLES:
            advice = f"set tracking.{_TRACKER_VARIABLES[str(variable.value)]}"
    run.note(node.lineno, name, "", advice)
