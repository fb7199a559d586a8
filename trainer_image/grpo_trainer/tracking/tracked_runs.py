"""Opens and ends a run in each tracker, around transformers' own callback of it.

Only the tracker's process imports this module. A run has one identity over all attempts, made of
the job's uid. So each attempt goes on in the run of the one before:

- W&B: the run's id is the uid, with resume "allow". A step that was rolled back is logged again as
  a further row of the same train/global_step, which is the x-axis of all charts.
- MLflow: the run with the tag `grpo.dev/uid`. Of a step that was logged twice it shows the later.
- Trackio: the run of that name, which ends with the uid's first part. It keeps both rows.
- TensorBoard: one folder; readers drop earlier attempts' events from the first new step on
  (purge_step).
"""

import json
import logging
import os
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, TypedDict
from urllib.error import HTTPError
from urllib.request import urlopen

from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.utils import flatten_dict

UID_TAG = "grpo.dev/uid"
COMPLETIONS = "completions"
GLOBAL_STEP = "train/global_step"
"""transformers' x-axis of all charts."""
ANSWER_SECONDS = 15.0


class RunRequest(TypedDict):
    """What a tracker's process is asked to open."""

    tracker: str
    settings: dict[str, Any]
    """The tracker's part of spec.tracking, by its Python names."""
    uid: str
    name: str
    """Name of the run."""
    folder: str
    """Folder of the run's own, for TensorBoard."""
    first_step: int
    """Step of the first row that follows."""
    config: dict[str, Any]
    """Spec and plan."""


class TrackedRun:
    """A run that is open in a tracker."""

    def __init__(self, callback: Any, arguments: Any, run_id: str, url: str | None = None) -> None:
        """Open it in the callback, which writes the config."""
        self.run_id = run_id
        self.url = url
        self._callback = callback
        self._arguments = arguments
        self._state = TrainerState()
        self._control = TrainerControl()
        callback.on_train_begin(arguments, self._state, self._control)

    def log(self, step: int, logs: dict[str, float]) -> None:
        """Log a row."""
        self._state.global_step = step
        self._callback.on_log(self._arguments, self._state, self._control, logs=logs)

    def log_table(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Log completions, as TRL does where `log_completions` is set."""
        raise NotImplementedError

    def finish(self, end: str) -> None:  # noqa: ARG002  # files and Trackio know no end
        """End the run as the tracker calls it: finished, failed or killed."""
        self._callback.on_train_end(self._arguments, self._state, self._control)


class WandbRun(TrackedRun):
    """A run of W&B."""

    def log_table(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Log them as a table of W&B's."""
        wandb = import_module("wandb")
        rows = completion_rows(step, groups)
        table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        wandb.log({COMPLETIONS: table, GLOBAL_STEP: step})

    def finish(self, end: str) -> None:
        """A run that was killed is marked as preempting first: its end is then `preempted`."""
        wandb = import_module("wandb")
        super().finish(end)
        if end == "killed":
            wandb.run.mark_preempting()
        wandb.finish(exit_code=0 if end == "finished" else 1)


class MLflowRun(TrackedRun):
    """A run of MLflow."""

    def finish(self, end: str) -> None:
        """End it with MLflow's own status."""
        super().finish(end)
        import_module("mlflow").end_run(end.upper())


class TrackioRun(TrackedRun):
    """A run of Trackio."""

    def log_table(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Log them as a table of Trackio's."""
        trackio = import_module("trackio")
        frame = import_module("pandas").DataFrame(completion_rows(step, groups))
        trackio.log({COMPLETIONS: trackio.Table(dataframe=frame), GLOBAL_STEP: step})

    def finish(self, end: str) -> None:
        """End it.

        Raises:
            RuntimeError: rows are still here. Trackio buffers what it can't send and says nothing.
        """
        super().finish(end)
        storage = import_module("trackio.sqlite_storage").SQLiteStorage
        if storage.has_pending_data(self._arguments.project):
            raise RuntimeError(f"{self.url} has not taken all rows, and they end with the pod")


def open_run(request: RunRequest, token: str) -> TrackedRun:
    """Open the run, or go on in the one of an earlier attempt.

    Raises:
        Exception: whatever the tracker raises.
    """
    (kind,) = get_reporting_integration_callbacks([request["tracker"]])
    arguments = SimpleNamespace(
        run_name=request["name"],
        output_dir="",
        to_dict=lambda: request["config"],
        to_json_string=lambda: json.dumps(request["config"], indent=2),
    )
    return _OPEN[request["tracker"]](kind, arguments, request, token)


def _open_wandb(kind: Any, arguments: Any, request: RunRequest, token: str) -> TrackedRun:
    settings = request["settings"]
    os.environ["WANDB_API_KEY"] = token
    if settings.get("url"):
        os.environ["WANDB_BASE_URL"] = settings["url"]
    # It would write into the working directory, which a pod can't.
    os.environ.setdefault("WANDB_DIR", gettempdir())
    # The callback would read weights for these.
    for name in ("WANDB_LOG_MODEL", "WANDB_WATCH"):
        os.environ.pop(name, None)
    wandb = import_module("wandb")
    run = wandb.init(
        project=settings["project"],
        entity=settings.get("entity"),
        id=request["uid"],
        name=arguments.run_name,
        resume="allow",
        settings=wandb.Settings(
            console="off", silent=True, disable_code=True, disable_git=True, x_disable_stats=True
        ),
    )
    return WandbRun(kind(), arguments, run.id, run.url)


def _open_mlflow(kind: Any, arguments: Any, request: RunRequest, token: str) -> TrackedRun:
    settings, uid = request["settings"], request["uid"]
    if token:
        os.environ["MLFLOW_TRACKING_TOKEN"] = token
    # Its own seven tries take minutes, in which further rows would be lost.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    os.environ.pop("HF_MLFLOW_LOG_ARTIFACTS", None)
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    mlflow = import_module("mlflow")
    mlflow.set_tracking_uri(settings["url"])
    experiment = mlflow.set_experiment(settings["experiment"])
    client = mlflow.MlflowClient()
    earlier = client.search_runs(
        [experiment.experiment_id], f"tags.`{UID_TAG}` = '{uid}'", max_results=1
    )
    logged_parameters: dict[str, str] = {}
    if earlier:
        run = mlflow.start_run(run_id=earlier[0].info.run_id)
        logged_parameters = earlier[0].data.params
    else:
        run = mlflow.start_run(run_name=arguments.run_name, tags={UID_TAG: uid})
    # MLflow refuses a parameter that changes: those of the first attempt stay.
    config = flatten_dict(request["config"])
    arguments.to_dict = lambda: {
        key: value for key, value in config.items() if key not in logged_parameters
    }
    run_id = run.info.run_id
    page = f"{settings['url'].rstrip('/')}/#/experiments/{experiment.experiment_id}/runs/{run_id}"
    callback = kind()
    opened = MLflowRun(callback, arguments, run_id, page)
    # Sent in the background, a row would fail without a word; this process may wait.
    callback._async_log = False
    return opened


def _open_trackio(kind: Any, arguments: Any, request: RunRequest, token: str) -> TrackedRun:
    settings = request["settings"]
    if settings.get("space"):
        os.environ["HF_TOKEN"] = token
    else:
        os.environ["TRACKIO_SERVER_URL"] = settings["url"]
        os.environ["TRACKIO_WRITE_TOKEN"] = token
    space = settings.get("space")
    # A run is found by its name alone, and a job that was deleted and made again is another.
    arguments.run_name = f"{arguments.run_name} {request['uid'][:8]}"
    arguments.project = settings["project"]
    arguments.trackio_space_id = space
    arguments.trackio_bucket_id = None
    arguments.trackio_static_space_id = False
    arguments.hub_private_repo = True
    url = f"https://huggingface.co/spaces/{space}" if space else settings["url"]
    _require_answer(url)
    return TrackioRun(kind(), arguments, arguments.run_name, url)


def _require_answer(url: str) -> None:
    """Raises OSError if there is no server: Trackio would go on, and keep the rows in the pod."""
    try:
        urlopen(url, timeout=ANSWER_SECONDS).close()
    except HTTPError as error:
        error.close()


def _open_tensorboard(kind: Any, arguments: Any, request: RunRequest, _: str) -> TrackedRun:
    # It would print a line for each value that is no finite number.
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    writer = import_module("tensorboardX").SummaryWriter(
        str(folder), purge_step=request["first_step"]
    )
    return TrackedRun(kind(tb_writer=writer), arguments, str(folder))


_OPEN = {
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
    "tensorboard": _open_tensorboard,
}


def completion_rows(step: int, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each completion, with the columns of TRL's table; a chat is its JSON."""
    samples = [sample for group in groups for sample in group["completions"]]
    rewards = sorted({name for sample in samples for name in sample["rewards"]})
    rows = []
    for group in groups:
        prompt = group["prompt"]
        if not isinstance(prompt, str):
            prompt = json.dumps(prompt, ensure_ascii=False)
        for sample in group["completions"]:
            row = {"step": step, "prompt": prompt, "completion": sample["completion"]}
            row |= {name: sample["rewards"].get(name) for name in rewards}
            row["advantage"] = sample["advantage"]
            rows.append(row)
    return rows
