"""Jobs as processes of this machine: the digits of a pod on CPUs, and the notebook of the
examples."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from examples.demo.prepare import make_files
from grpo.client import GRPOClient, LocalProcess
from grpo_api.job import parse_spec
from grpo_api.plan.plan import Rendezvous
from grpo_api.report.report import Outcome
from grpo_api.text.contract import API_VERSION, KIND, REWARD_MOUNT_ENV, THREADS_ENV
from grpo_cli.__main__ import main
from grpo_cli.cluster.delivery_pod import build_attempt
from grpo_operator.pods.manifests import training_plan
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from harness.controlplane import free_port
from tests.support.ranks import demo_model
from tests.support.ranks.pods import Gang
from tests.trainer.example_jobs import REPOSITORY

STEPS = 3
REWARD = """
def digits(completions, **_):
    return [sum(letter.isdigit() for letter in completion) / 8 for completion in completions]
"""
DIGITS = ("step", "reward", "kl", "loss", "grad_norm", "entropy")


def job(name: str, processes: int) -> dict[str, Any]:
    """A job as the API server has it."""
    spec = {
        "model": {"name": "/models/model", "parameters": "84K", "volume": {"claimName": "files"}},
        "dataset": {"files": {"volume": {"claimName": "files"}, "paths": ["prompts.jsonl"]}},
        "rewards": [{"python": {"function": "judge:digits", "configMap": {"name": "judge"}}}],
        "training": {
            "beta": 0.04,
            "learningRate": 1e-3,
            "numGenerations": 4,
            "promptsPerStep": 2,
            "maxSteps": STEPS,
            "maxCompletionLength": 8,
        },
        "placement": {"accelerator": "CPU", "nodes": processes},
        "resources": {"requests": {"cpu": str(1)}},
        "checkpoint": {"everySteps": STEPS, "volume": {"claimName": "checkpoints"}},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


class Run(NamedTuple):
    """A job that has run here."""

    client: GRPOClient
    name: str
    folder: Path
    files: Path


def make_files_of_job(folder: Path) -> Path:
    """The folder of the job's claim `files`: a tiny model, and prompts."""
    files = folder / "files"
    demo_model.save_policy(files / "model")
    rows = [json.dumps({"prompt": f"say {number}"}) for number in range(10)]
    (files / "prompts.jsonl").write_text("\n".join(rows))
    return files


def run_by_client(folder: Path, processes: int) -> Run:
    """Train on a tiny model to the end."""
    files = make_files_of_job(folder)
    backend = LocalProcess(
        folder / "runs", volumes={"files": files}, config_maps={"judge": {"judge.py": REWARD}}
    )
    client = GRPOClient(backend)
    name = client.train(job("tiny", processes))
    client.wait_for_job_status(name, timeout=400, polling_interval=0.2)
    return Run(client, name, folder, files)


def run_by_command(folder: Path) -> Run:
    """The same by `grpo run --local`, of a file that has the ConfigMap, too."""
    files, runs, file = make_files_of_job(folder), folder / "runs", folder / "job.yaml"
    judge = {"kind": "ConfigMap", "metadata": {"name": "judge"}, "data": {"judge.py": REWARD}}
    file.write_text(yaml.safe_dump_all([judge, job("tiny", 1)]))
    given = ["run", "-f", str(file), "--local", "--folder", str(runs)]
    assert main([*given, "--volume", f"files={files}"]) == 0
    return Run(GRPOClient(LocalProcess(runs)), "tiny", folder, files)


def outcome_of_pods(run: Run, processes: int) -> tuple[Outcome, list[dict[str, Any]]]:
    """The same job as the operator plans it, in pods; with the steps that rank 0 has logged."""
    spec = parse_spec(job(run.name, processes)["spec"], creating=True)
    plan = plan_job(spec, Inventory(reports_disk=True)).chosen
    assert plan is not None
    metadata = {"name": run.name, "namespace": "default", "uid": "0"}
    wanted = training_plan(build_attempt(metadata, spec, plan, 1, None))
    rewards = run.folder / "rewards"
    (rewards / "0").mkdir(parents=True)
    (rewards / "0/judge.py").write_text(REWARD)
    checkpoints = run.folder / "pods-checkpoints"
    here = {
        "model": spec.model.model_copy(update={"name": str(run.files / "model")}),
        "rendezvous": Rendezvous(address="127.0.0.1", port=free_port()),
        "checkpoint_directory": str(checkpoints),
    }
    environment = {REWARD_MOUNT_ENV: str(rewards), THREADS_ENV: "1"}
    plan_here = wanted.model_copy(update=here)
    with Gang(plan_here, run.files, run.folder / "pods", environment=environment) as gang:
        assert gang.wait() == [0] * processes, gang.log()[-4000:]
        lines = (checkpoints / "attempt-1/metrics.jsonl").read_text().splitlines()
        return gang.outcome(), [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with one process."""
    return run_by_command(tmp_path_factory.mktemp("local"))


def digits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the same job gives on the same machine."""
    return [{key: row[key] for key in DIGITS} for row in rows]


def require_same_digits(run: Run, processes: int) -> None:
    outcome, steps = outcome_of_pods(run, processes)
    exported = run.client.get_job(run.name).status.export
    assert exported is not None
    assert outcome.export is not None
    assert digits(run.client.history(run.name)) == digits(steps)
    assert exported.weights_hash == outcome.export.weights_hash


@pytest.mark.realtime
def test_a_local_run_trains_the_same_digits_as_a_pod(run: Run) -> None:
    assert len(run.client.history(run.name)) == STEPS
    require_same_digits(run, 1)


@pytest.mark.slow
@pytest.mark.realtime
def test_two_local_processes_train_the_same_digits_as_two_pods(tmp_path: Path) -> None:
    require_same_digits(run_by_client(tmp_path, 2), 2)


@pytest.mark.realtime
def test_the_client_shows_a_local_run(run: Run, tmp_path: Path) -> None:
    client, name = run.client, run.name
    (shown,) = client.list_jobs()
    assert (shown.name, shown.phase, shown.status.attempt) == (name, "Succeeded", 1)
    assert shown.status.progress is not None
    assert shown.status.progress.summary == f"{STEPS}/{STEPS}"
    assert [event.reason for event in client.get_job_events(name)] == ["Succeeded"]
    assert any('"step": 3' in line for line in client.get_job_logs(name, follow=True))
    (sample, *_) = client.samples(name)
    assert len(sample["groups"][0]["completions"]) == 4
    file = tmp_path / "calibration.yaml"
    assert main(["calibrate", str(run.folder / "runs"), "--to", str(file)]) == 0
    assert '"source": "local/tiny"' in file.read_text()
    model = client.export(name, tmp_path / "model")
    assert (model / "model.safetensors").is_file()


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[Path]:
    """The folder of the examples, where the tiny model is on the volume already."""
    shutil.copy(REPOSITORY / "examples/quickstart.yaml", tmp_path)
    shutil.copy(REPOSITORY / "examples/notebook.ipynb", tmp_path)
    shutil.copytree(make_files() / "model", tmp_path / "grpo-runs/_volumes/quickstart/model")
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.mark.slow
@pytest.mark.realtime
def test_the_notebook_runs_from_the_first_cell_to_the_last(examples: Path) -> None:
    notebook = json.loads((examples / "notebook.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert (examples / "my-model/model.safetensors").is_file()
