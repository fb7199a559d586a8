"""Puts what a script reports to into `tracking`; users make the Secrets with the keys."""

from typing import Any

from grpo_api.spec.trl_fields import FIELDS

from .spec_builder import SpecBuilder
from .trl_run import Given, TrlRun

TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
SECRET_KEY = "token"


def put_trackers(run: TrlRun, builder: SpecBuilder, name: str, given: Given) -> None:
    """Set `tracking` by report_to, project, run_name and trackio_space_id."""
    names = given.value if isinstance(given.value, list) else [given.value]
    for tracker in names:
        if tracker in (None, "none"):
            continue
        if tracker not in TRACKERS:
            run.note(given.line, name, tracker, f"a job has {', '.join(TRACKERS)}: set tracking")
        elif tracker == "mlflow":
            run.note(given.line, name, tracker, "set tracking.mlflow.url, the tracking server")
        elif tracker == "trackio" and not _value(run, "trackio_space_id"):
            run.note(given.line, name, tracker, "set tracking.trackio, with a Space or a server")
        else:
            _put_tracker(run, builder, tracker, name, given)
    run_name = run.config.get("run_name")
    if run_name is not None and run_name.value is not None:
        builder.put("tracking.runName", run_name.value, "run_name", run_name)


def _put_tracker(run: TrlRun, builder: SpecBuilder, tracker: str, name: str, given: Given) -> None:
    settings: dict[str, Any] = {}
    if tracker != "tensorboard":
        settings["project"] = _value(run, "project")
        settings["tokenSecretRef"] = {"name": tracker, "key": SECRET_KEY}
        advice = f"put its API key into the Secret {tracker}, key {SECRET_KEY}"
        run.note(given.line, name, tracker, advice)
    if tracker == "trackio":
        settings["space"] = _value(run, "trackio_space_id")
    builder.put(f"tracking.{tracker}", settings, name, given)


def _value(run: TrlRun, name: str) -> Any:
    given = run.config.get(name)
    return given.value if given else FIELDS[name].default
