"""Every tracker as it is: two attempts are one run, with the rows, config and end that the tracker
itself gives back.

MLflow, Trackio and TensorBoard are read by their own servers and readers. W&B has no server that
can be had: it writes offline, and a stand-in of its server refuses.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Result
from grpo_api.spec.tracking import TrackerName, TrackingSpec
from grpo_api.text.contract import DATA_MOUNT_ENV, TRACKERS_ENV, tracking_token_env
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.clock import SYSTEM_CLOCK
from grpo_trainer.tracking.tracker_feed import End, TrackerFailed, row_of
from grpo_trainer.tracking.tracking import CONFIG_FIELDS, TrackedJob, TrackerProcess, tracking_of
from harness.controlplane import free_port
from harness.images.trackers import tracker_packages, tracker_servers
from harness.programs.patience import run_to_end
from tests.support.facts.resume_cases import Case, plan, train, write_data
from tests.support.ranks import demo_model

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

PATIENCE = 120.0
TOKEN = "0123456789abcdef0123456789abcdef01234567"
UID = "0b1f2c7e-1111-4222-8333-abcdefabcdef"
CASE = Case(rows=8, steps=4, save=2, kill=2)
STEPS = (1, 2, 3, 4)
"""Of the first attempt; the second goes on from step 2."""
LATER_STEPS = (3, 4, 5, 6)


@pytest.fixture(autouse=True)
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages and variables of a training pod."""
    monkeypatch.setenv(TRACKERS_ENV, str(tracker_packages()))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    for name in ("wandb", "trackio"):
        monkeypatch.setenv(tracking_token_env(name), TOKEN)


def read(program: str, *arguments: object, **environment: str) -> Any:
    """What a program prints as JSON that has the trackers' own readers."""
    done = run_to_end(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        PATIENCE,
        env=os.environ | {"PYTHONPATH": str(tracker_servers())} | environment,
    )
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def served(folder: Path, *program: str, **environment: str) -> Iterator[str]:
    """The address of a server of a tracker, once it answers. `{port}` is its port."""
    port = str(free_port())
    folder.mkdir()
    server = subprocess.Popen(
        [sys.executable, *(part.format(port=port) for part in program)],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(tracker_servers())}
        | {name: value.format(port=port) for name, value in environment.items()},
        stdout=2,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(int(PATIENCE)):
            if _answers(url):
                break
            SYSTEM_CLOCK.sleep(1.0)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        urlopen(url, timeout=5).close()
    except HTTPError:
        return True
    except (URLError, OSError):
        return False
    return True


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server, which takes half a minute to start."""
    folder = tmp_path_factory.mktemp("mlflow")
    store = f"sqlite:///{folder}/mlflow.db"
    program = ("-m", "mlflow", "server", "--port", "{port}", "--workers", "1")
    with served(folder / "server", *program, "--backend-store-uri", store) as url:
        yield url


@pytest.fixture
def trackio(tmp_path: Path) -> Iterator[str]:
    """The address of a Trackio server, which takes rows with TOKEN."""
    with served(
        tmp_path / "trackio",
        *("-c", "from trackio.cli import main; main()", "show", "--host", "127.0.0.1"),
        TRACKIO_DIR=str(tmp_path / "trackio"),
        TRACKIO_WRITE_TOKEN=TOKEN,
        GRADIO_SERVER_PORT="{port}",
    ) as url:
        yield url


def tracked(folder: Path, attempt: int = 1, **trackers: Any) -> TrainingPlan:
    """The plan of an attempt with these trackers."""
    made = plan(CASE, folder, attempt)
    job = made.job.model_copy(update={"uid": UID})
    tracking = TrackingSpec.model_validate(trackers)
    return made.model_copy(update={"tracking": tracking, "job": job})


def config_of(plan: TrainingPlan) -> dict[str, Any]:
    """What trackers are told of a plan."""
    return plan.model_dump(mode="json", by_alias=True, exclude_none=True, include=CONFIG_FIELDS)


def follow(
    plan: TrainingPlan, name: TrackerName, steps: tuple[int, ...], end: End
) -> TrackerProcess:
    """One attempt, of which the tracker gets these steps."""
    settings = getattr(plan.tracking, name)
    job = TrackedJob(plan.job, "default/demo", None, config_of(plan))
    run = TrackerProcess(name, job.request(name, settings, steps[0]), PATIENCE)
    try:
        for step in steps:
            logs = {"loss": 1.0 / step, "kl": float("nan"), "reward": float("inf"), "tall ü": 1.0}
            run.send(row_of(step, logs), PATIENCE)
        run.finish(end, PATIENCE)
    finally:
        run.close()
    return run


MLFLOW_RUNS = """
import json, sys, mlflow
client = mlflow.MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name(sys.argv[2])
print(json.dumps([
    [run.info.run_id, run.info.run_name, run.info.status, run.data.params,
     [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, "loss")]]
    for run in client.search_runs([experiment.experiment_id])]))
"""


def test_mlflow_has_one_run_over_all_attempts(tmp_path: Path, mlflow: str) -> None:
    spec = {"url": mlflow, "experiment": "GRPO"}
    first = follow(tracked(tmp_path, mlflow=spec), "mlflow", STEPS, "killed")
    ((_, _, status, _, _),) = read(MLFLOW_RUNS, mlflow, "GRPO")
    assert status == "KILLED"
    follow(tracked(tmp_path, 2, mlflow=spec), "mlflow", LATER_STEPS, "finished")
    ((run_id, name, status, params, losses),) = read(MLFLOW_RUNS, mlflow, "GRPO")
    assert (run_id, name, status) == (first.run_id, "default/demo", "FINISHED")
    assert first.url
    assert first.url.startswith(f"{mlflow}/#/experiments/")
    assert first.url.endswith(f"/runs/{run_id}")
    assert params["training.beta"] == "0.04"
    assert sorted(losses) == sorted([step, 1.0 / step] for step in (*STEPS, *LATER_STEPS))


TRACKIO_RUNS = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps({
    run: [one["train/global_step"] for one in SQLiteStorage.get_logs("grpo", run)]
    for run in SQLiteStorage.get_runs("grpo")}))
"""


def test_trackio_has_one_run_over_all_attempts(tmp_path: Path, trackio: str) -> None:
    secret = {"name": "trackio", "key": "token"}
    spec = {"url": trackio, "project": "grpo", "tokenSecretRef": secret}
    first = follow(tracked(tmp_path, trackio=spec), "trackio", STEPS, "killed")
    follow(tracked(tmp_path, 2, trackio=spec), "trackio", LATER_STEPS, "finished")
    runs = read(TRACKIO_RUNS, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert runs == {first.run_id: [*STEPS, *LATER_STEPS]}
    assert (first.run_id, first.url) == (f"default/demo {UID[:8]}", trackio)


def test_a_wrong_token_of_trackio_is_found_at_the_end_at_the_latest(
    tmp_path: Path, trackio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracking_token_env("trackio"), "wrong")
    secret = {"name": "trackio", "key": "token"}
    spec = {"url": trackio, "project": "grpo", "tokenSecretRef": secret}
    with pytest.raises(TrackerFailed, match="has not taken all rows"):
        follow(tracked(tmp_path, trackio=spec), "trackio", STEPS, "finished")


TENSORBOARD_ROWS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps([[one.step, one.value] for one in events.Scalars("train/loss")]))
"""


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    spec = {"directory": str(tmp_path / "logs")}
    first = follow(tracked(tmp_path, tensorboard=spec), "tensorboard", STEPS, "killed")
    second = follow(tracked(tmp_path, 2, tensorboard=spec), "tensorboard", LATER_STEPS, "finished")
    assert first.run_id == second.run_id
    rows = read(TENSORBOARD_ROWS, first.run_id)
    assert rows == [[step, pytest.approx(1.0 / step)] for step in range(1, 7)]


WANDB = {"project": "grpo", "tokenSecretRef": {"name": "wandb", "key": "token"}}


def test_wandb_offline_has_one_run_id_over_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    follow(tracked(tmp_path, wandb=WANDB), "wandb", STEPS, "killed")
    follow(tracked(tmp_path, 2, wandb=WANDB), "wandb", LATER_STEPS, "finished")
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{UID}.wandb"}
    assert len(files) == 2
    assert all(b"train/global_step" in file.read_bytes() for file in files)
    assert not any(TOKEN.encode() in file.read_bytes() for file in files)


TRACKIO_TABLES = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("grpo")
print(json.dumps([one["completions"] for one in SQLiteStorage.get_logs("grpo", run)
                  if "completions" in one]))
"""
COLUMNS = ["step", "prompt", "completion", "format", "tall", "advantage"]


@pytest.mark.parametrize("groups", [2, 0])
def test_a_table_of_completions_has_the_kept_samples_and_none_where_none_are_kept(
    tmp_path: Path, trackio: str, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    demo_model.save_policy(tmp_path / "model")
    write_data(CASE, tmp_path)
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    recorder = Recorder(1, Placement(0, 0, 1, 1), time())
    secret = {"name": "trackers", "key": "token"}
    job = tracked(
        tmp_path,
        samples=True,
        wandb=WANDB,
        trackio={"url": trackio, "project": "grpo", "tokenSecretRef": secret},
        tensorboard={"directory": str(tmp_path / "logs")},
    )
    tracking = tracking_of(job.tracking, job.job, None, config_of(job), recorder)
    case = replace(CASE, sample_groups=groups)
    story = train(case, tmp_path, 1, tracking=tracking)
    tracking.end(Result.SUCCEEDED)
    reports = recorder.progress.trackers
    assert [(report.lost_rows, report.problem) for report in reports] == [(0, "")] * 3
    kept = sorted(
        (step, group["prompt"], completion["completion"])
        for step, kept_groups in story.samples.items()
        for group in kept_groups
        for completion in group["completions"]
    )
    assert bool(kept) == bool(groups)
    tables = [json.loads(file.read_text()) for file in tmp_path.rglob("*.table.json")]
    assert all(table["columns"] == COLUMNS for table in tables)
    assert sorted(tuple(row[:3]) for table in tables for row in table["data"]) == kept
    of_trackio = read(TRACKIO_TABLES, TRACKIO_DIR=str(tmp_path / "trackio"))
    rows = [[row[name] for name in COLUMNS[:3]] for table in of_trackio for row in table["_value"]]
    assert sorted(map(tuple, rows)) == kept


@contextmanager
def refusing(status: int) -> Iterator[str]:
    """A server that answers everything with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [401, 404])
def test_wandb_that_refuses_says_why_and_not_with_which_key(tmp_path: Path, status: int) -> None:
    with refusing(status) as url:
        job = tracked(tmp_path, wandb=WANDB | {"url": url})
        with pytest.raises(TrackerFailed, match=str(status)) as failure:
            follow(job, "wandb", STEPS, "finished")
    assert TOKEN not in str(failure.value)


def test_all_trackers_at_once_change_no_digit_of_a_training(
    tmp_path: Path, mlflow: str, trackio: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_model.save_policy(tmp_path / "model")
    write_data(CASE, tmp_path)
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    without = train(CASE, tmp_path, 1)
    shutil.rmtree(tmp_path / "runs")
    recorder = Recorder(1, Placement(0, 0, 1, 1), time())
    secret = {"name": "trackers", "key": "token"}
    job = tracked(
        tmp_path,
        wandb=WANDB,
        mlflow={"url": mlflow, "experiment": "All"},
        trackio={"url": trackio, "project": "grpo", "tokenSecretRef": secret},
        tensorboard={"directory": str(tmp_path / "logs")},
    )
    tracking = tracking_of(job.tracking, job.job, None, config_of(job), recorder)
    with_all = train(CASE, tmp_path, 1, tracking=tracking)
    tracking.end(Result.SUCCEEDED)
    assert (with_all.logged, with_all.weights) == (without.logged, without.weights)
    reports = {report.name: report for report in recorder.progress.trackers}
    assert reports.keys() == {"wandb", "mlflow", "trackio", "tensorboard"}
    assert {report.lost_rows for report in reports.values()} == {0}
    assert {report.problem for report in reports.values()} == {""}
    ((_, _, status, _, losses),) = read(MLFLOW_RUNS, mlflow, "All")
    assert status == "FINISHED"
    assert dict(losses) == {step: row["loss"] for step, row in without.logged.items()}
