"""A pod as processes of this machine: what they see of it, and what is refused because only a
cluster has it."""

import fcntl
import json
import signal
import subprocess
import sys
from errno import ENOSPC
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path, PurePath
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_api.job import parse_spec
from grpo_api.report.report import Progress
from grpo_api.status.status import Phase
from grpo_api.text.contract import THREADS_ENV
from grpo_cli.__main__ import main
from grpo_cli.cluster.delivery_pod import build_attempt
from grpo_cli.commands.run import _run_job, step_line
from grpo_cli.inputs.manifest import Job, document_of, load_specs
from grpo_cli.local import attempt_state, local_runs
from grpo_cli.local.local_pod import ClaimFolder, LocalPod, local_plan, local_pod, local_spec
from grpo_cli.show.errors import NotYet, OptionError
from grpo_operator.pods.manifests import Attempt, plan_json, training_plan
from grpo_operator.pods.preflight_job import CPU_PLAN
from tests.class_samples import job_class
from tests.samples import changed, job
from tests.stepped_clock import SteppedClock

FILES: dict[str, Any] = {
    "model": {"name": "/models/tiny", "parameters": "77K", "volume": {"claimName": "files"}},
    "dataset": {"files": {"configMap": {"name": "rows"}, "paths": ["a.jsonl"]}},
    "checkpoint": {"volume": {"claimName": "runs", "subPath": "grpo"}},
}
CONFIG_MAPS = {"rows": {"a.jsonl": "{}"}}


def attempt(changes: dict[str, Any]) -> Attempt:
    spec = local_spec("tiny", parse_spec(changed(changes)), None, None)
    metadata = {"name": "tiny", "namespace": "local", "uid": "1"}
    return build_attempt(metadata, spec, CPU_PLAN, 1, None)


def pod(changes: dict[str, Any], variables: dict[str, str] | None = None) -> LocalPod:
    return local_pod(attempt(changes), CONFIG_MAPS, variables or {})


def test_a_process_sees_the_claims_and_config_maps_of_the_pod() -> None:
    trainer = pod({**FILES, "resources": {"requests": {"cpu": "2"}}}).trainer
    assert trainer.mounts == {
        "/models": ClaimFolder("files"),
        "/data": {"a.jsonl": "{}"},
        "/checkpoints": ClaimFolder("runs", "grpo"),
    }
    assert trainer.command == [sys.executable, "-m", "grpo_trainer"]
    assert trainer.environment[THREADS_ENV] == "2"
    assert not {"HOME", "HF_HOME", "GRPO_PLAN"} & trainer.environment.keys()


def test_the_plan_names_the_places_of_this_machine() -> None:
    mounts = pod(FILES).trainer.mounts
    plan = local_plan(training_plan(attempt(FILES)), mounts, PurePath("/runs/mounts"), 4711)
    assert plan.model.name == "/runs/mounts/models/tiny"
    assert plan.checkpoint_directory == "/runs/mounts/checkpoints/tiny-1"
    assert (plan.rendezvous.address, plan.rendezvous.port) == ("127.0.0.1", 4711)


def test_a_hub_model_keeps_its_name_and_a_run_without_checkpoints_gets_a_folder() -> None:
    mounts = pod({}).trainer.mounts
    plan = local_plan(training_plan(attempt({})), mounts, PurePath("/runs/mounts"), 1)
    assert plan.model.name == "meta-llama/Llama-3.2-1B-Instruct"
    assert plan.checkpoint_directory == "/runs/mounts/checkpoints/tiny-1"


def test_a_model_in_a_folder_of_this_machine_is_read_there() -> None:
    folder = {"model": {"name": "/models/mine", "parameters": "77K"}}
    mounts = pod(folder).trainer.mounts
    plan = local_plan(training_plan(attempt(folder)), mounts, PurePath("/runs/mounts"), 1)
    assert plan.model.name == "/models/mine"


def test_a_relative_folder_is_that_of_the_first_attempt_wherever_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    spec = attempt({"model": {"name": "models/mine", "parameters": "77K"}}).spec
    assert spec.model.name == str(tmp_path / "models" / "mine")


def test_the_init_container_of_the_quickstart_runs_with_this_python() -> None:
    documents = yaml.safe_load_all(
        (Path(__file__).parents[2] / "examples/quickstart.yaml").read_text()
    )
    spec = next(one["spec"] for one in documents if one["kind"] == "GRPOJob")
    metadata = {"name": "quickstart", "namespace": "local", "uid": "1"}
    made = build_attempt(
        metadata, local_spec("quickstart", parse_spec(spec), None, None), CPU_PLAN, 1, None
    )
    (container,) = local_pod(made, {"quickstart": {}}, {}).init_containers
    assert container.command == [sys.executable, "-m", "grpo_trainer.quickstart", "/quickstart"]
    assert container.mounts == {"/quickstart": ClaimFolder("quickstart")}


@pytest.mark.parametrize(
    ("placement", "processes"),
    [
        ({"accelerator": "CPU", "nodes": 2, "processesPerNode": 3}, 6),
        ({"accelerator": "CPU"}, 1),
        ({"gpus": {"min": 8, "max": 8}}, 1),
    ],
)
def test_a_local_gang_has_the_processes_of_a_cpu_job(
    placement: dict[str, Any], processes: int
) -> None:
    spec = attempt({"placement": placement}).spec
    assert spec.placement.accelerator == "CPU"
    assert (spec.placement.nodes, spec.placement.processes_per_node) == (1, processes)


SECRET = {"name": "hub", "key": "token"}
MOUNT = {
    "volumeMounts": [{"name": "code", "mountPath": "/opt/code"}],
    "podTemplate.spec.volumes": [{"name": "code", "emptyDir": {}}],
}
INIT = {"name": "fetch", "image": "alpine:3", "command": ["sh", "-c", "true"]}
STORE = {"store": {"url": "s3://bucket/runs"}}


@pytest.mark.parametrize(
    ("changes", "path", "fix"),
    [
        ({"model.tokenSecretRef": SECRET}, "HF_TOKEN", "set HF_TOKEN in this shell"),
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": SECRET}}]}, "A", "set A in this"),
        ({"envFrom": [{"secretRef": {"name": "keys"}}]}, "spec.envFrom", "leave it out"),
        ({"model.image": {"reference": "r/model:1"}}, "/models", "use a claim"),
        ({"dataset": {**FILES["dataset"], "files": {"configMap": {"name": "no"}, "paths": ["a"]}}},
         "ConfigMap no", "put it into the job's file"),
        ({"checkpoint": STORE}, "spec.checkpoint.store", "set spec.checkpoint.volume"),
        ({"rewards": [{"http": {"url": "http://judge.team.svc:80/x"}}]},
         "spec.rewards[0].http.url", "kubectl port-forward"),
        ({"command": ["bash", "run.sh"]}, "spec.command", "begin it with python"),
        (MOUNT, "spec.volumeMounts", "leave it out"),
        ({"podTemplate.spec.initContainers": [INIT]},
         "spec.podTemplate.spec.initContainers[fetch]", "leave the container out"),
    ],
)  # fmt: skip
def test_what_only_a_cluster_has_is_refused_with_path_and_fix(
    changes: dict[str, Any], path: str, fix: str
) -> None:
    with pytest.raises(OptionError) as refused:
        pod(changes)
    assert path in str(refused.value)
    assert fix in str(refused.value)
    assert all(len(problem) <= 300 for problem in refused.value.problems)


def test_a_value_of_a_secret_is_taken_from_the_shell() -> None:
    assert (
        "HF_TOKEN"
        not in pod({"model.tokenSecretRef": SECRET}, {"HF_TOKEN": "x"}).trainer.environment
    )
    service = {"rewards": [{"http": {"url": "http://localhost:8000/x"}}]}
    assert pod(service).trainer.mounts.keys() == {"/checkpoints"}


def test_run_without_local_names_kubectl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job("tiny", changed({}))))
    assert main(["run", "-f", str(file)]) == 2
    assert f"kubectl apply -f {file}" in capsys.readouterr().err
    assert main(["run", "-f", str(file), "--local", "--volume", "files"]) == 2
    assert "--volume is 'files'; write it as CLAIM=FOLDER" in capsys.readouterr().err
    assert main(["run", "-f", str(file), "--local", "--steps", "0"]) == 2
    assert "--steps is 0; it takes 1 or more" in capsys.readouterr().err
    assert main(["run", "-f", str(file), "--local", "--volume", f"files={tmp_path}/no"]) == 2
    assert "is no folder; make it first" in capsys.readouterr().err


NODES = {"accelerator": "CPU", "nodes": 4, "processesPerNode": 32}


@pytest.mark.parametrize(
    ("placement", "processes", "number"),
    [(NODES, None, "128"), ({}, 0, "0"), ({}, -1, "-1"), ({}, 1000, "1000"), ({}, "2", "'2'")],
)
def test_a_gang_beyond_one_machine_is_refused(
    placement: dict[str, Any], processes: Any, number: str
) -> None:
    spec = parse_spec(changed({"placement": placement}))
    with pytest.raises(OptionError, match=f"gang of tiny has {number} processes; .* 1 to 64"):
        local_spec("tiny", spec, processes, None)


CONFIG_MAP = "---\napiVersion: v1\nkind: ConfigMap\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a ConfigMap has no metadata.name"),
        ("metadata: []", "a ConfigMap has no metadata.name"),
        ("metadata: {name: 5}", "a ConfigMap has no metadata.name"),
        ("metadata: {name: m}\ndata: text", 'ConfigMap m is "text"; it takes file names'),
        ("metadata: {name: m}\ndata: {a: 5}", "a of ConfigMap m is 5; it takes the file's text"),
        ("metadata: {name: m}\ndata: {../a: x}", 'ConfigMap m has the file "../a"; its name'),
        ("metadata: {name: m}\ndata: {..: x}", 'ConfigMap m has the file ".."; its name'),
    ],
)
def test_a_config_map_that_the_api_server_refuses_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    says: str,
) -> None:
    text = yaml.safe_dump(job("tiny", changed({}))) + CONFIG_MAP + text
    monkeypatch.setattr("sys.stdin", StringIO(text))
    assert main(["run", "-f", "-", "--local", "--folder", str(tmp_path / "runs")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("source", ["-", "folder"])
def test_config_maps_of_standard_input_and_of_a_folder_are_mounted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
) -> None:
    texts = {
        "job.yaml": yaml.safe_dump(job("tiny", changed(FILES))),
        "rows.yml": f"{CONFIG_MAP}metadata: {{name: rows}}\ndata: {{a.jsonl: '{{}}'}}",
    }
    (tmp_path / "folder").mkdir()
    for file, text in texts.items():
        (tmp_path / "folder" / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", StringIO("".join(texts.values())))
    monkeypatch.setattr(local_runs, "require_trainer", lambda: None)
    monkeypatch.setattr(local_runs, "_require_memory", lambda *_: None)

    def read_mounts(*_: object, **__: object) -> None:
        raise NotYet((tmp_path / "tiny/mounts/data/a.jsonl").read_text())

    monkeypatch.setattr(local_runs, "_free_port", lambda: 1)
    monkeypatch.setattr("subprocess.Popen", read_mounts)
    assert main(["run", "-f", source, "--local", "--folder", str(tmp_path)]) == 5
    assert capsys.readouterr().err == "grpo: {}\n"


@pytest.mark.parametrize("command", ["plan", "render", "submit", "run", "preflight", "prefetch"])
def test_an_empty_name_of_a_file_is_not_the_folder_of_the_shell(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("tiny", changed({}))))
    monkeypatch.chdir(tmp_path)
    assert main([command, "-f", ""]) == 2
    assert "-f names no file" in capsys.readouterr().err


def test_a_job_has_its_class_but_not_what_only_pods_get(tmp_path: Path) -> None:
    documents = [
        job_class("team", {"fixed": {"env": [{"name": "TEAM", "value": "a"}]}}),
        job("tiny", changed({**FILES, "jobClassName": "team"})),
    ]
    documents[0]["spec"]["platform"] = {"resources": {"limits": {"rdma/hca": 8}}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    (with_class,) = load_specs(str(file))
    runs = local_runs.LocalRuns(tmp_path / "runs")
    spec = runs._spec_of(with_class)
    assert [(one.name, one.value) for one in spec.env] == [("TEAM", "a")]
    assert not spec.platform.resources.limits
    alone = with_class._replace(classes=())
    with pytest.raises(OptionError, match=r"is team: give its file by --class FILE, or job_class"):
        runs.plan(alone)
    by_file = local_runs.LocalRuns(tmp_path / "runs", job_class=file)
    assert by_file._spec_of(alone) == spec


def test_a_model_beyond_this_machines_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "require_trainer", lambda: None)
    file = tmp_path / "job.yaml"
    huge = changed({"model": {"name": "/srv/huge", "parameters": "9000B"}})
    file.write_text(yaml.safe_dump(job("huge", huge)))
    folder = tmp_path / "runs"
    assert main(["run", "-f", str(file), "--local", "--folder", str(folder)]) == 2
    assert "spec.model.name is /srv/huge, whose training" in capsys.readouterr().err
    assert not folder.exists()


def runs_with_a_job(
    tmp_path: Path, changes: dict[str, Any] | None = None
) -> tuple[local_runs.LocalRuns, Attempt]:
    """Local runs with the job `tiny`, and its first attempt, which is not started."""
    runs, first = local_runs.LocalRuns(tmp_path), attempt(changes or {})
    document = document_of(Job({"name": "tiny", "namespace": "local", "uid": "1"}, first.spec))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "job.json").write_text(json.dumps(document))
    return runs, first


def test_an_attempt_that_another_process_starts_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, first = runs_with_a_job(tmp_path)

    def start_again() -> int:
        with pytest.raises(NotYet, match="tiny is being started by another process"):
            runs._start(first, pod({}))
        with pytest.raises(NotYet, match="tiny has no attempt yet: it is being started"):
            runs.resume("tiny")
        return 1

    monkeypatch.setattr(local_runs, "_free_port", start_again)
    monkeypatch.setattr(attempt_state, "SYSTEM_CLOCK", SteppedClock())
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: SimpleNamespace(pid=1))
    runs._start(first, pod({}))


def test_a_run_is_resumed_with_what_its_first_attempt_has_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "_free_port", lambda: 1)
    process = SimpleNamespace(pid=1, poll=lambda: 1)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: process)
    runs, first = runs_with_a_job(tmp_path, FILES)
    runs._start(first, pod(FILES))
    (mounted,) = (tmp_path / "tiny" / "mounts").rglob("a.jsonl")
    other_process = local_runs.LocalRuns(tmp_path)
    other_process.resume("tiny")
    assert runs.read_job("tiny").job.status.attempt == 2
    assert mounted.read_text() == "{}"
    # As in a pod, a ConfigMap that has changed since is what the next attempt sees.
    changed_rows = {"rows": {"a.jsonl": "[]"}, "other": {"b": ""}}
    local_runs.LocalRuns(tmp_path, config_maps=changed_rows).resume("tiny")
    assert mounted.read_text() == "[]"


class Report(BaseHTTPRequestHandler):
    """Answers as a trainer's rank 0."""

    def do_GET(self) -> None:
        """Send the progress of step 3."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(Progress(attempt=1, step=3).model_dump_json().encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.realtime
def test_a_run_s_progress_does_not_go_through_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    runs, first = runs_with_a_job(tmp_path)
    folder = tmp_path / "tiny" / "attempt-1"
    folder.mkdir()
    (folder / "plan.json").write_text(plan_json(training_plan(first)))
    with HTTPServer(("127.0.0.1", 0), Report) as server:
        (folder / "process.json").write_text(json.dumps({"pid": 1, "port": server.server_port}))
        Thread(target=server.handle_request, daemon=True).start()
        with (tmp_path / "tiny" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert runs.read_job("tiny").job.status.phase == Phase.RUNNING


def test_an_attempt_that_a_full_disk_cuts_off_before_its_plan_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, first = runs_with_a_job(tmp_path)
    process = SimpleNamespace(pid=1, poll=lambda: 1)
    monkeypatch.setattr(local_runs, "_free_port", lambda: 1)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: process)
    runs._start(first, pod({}))

    def full_disk(_: object) -> str:
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(local_runs, "plan_json", full_disk)
        with pytest.raises(OSError, match="No space left"):
            runs.resume("tiny")
    assert runs.read_job("tiny").job.status.attempt == 1
    runs.resume("tiny")
    assert runs.read_job("tiny").job.status.attempt == 2


def test_of_two_runs_of_a_name_that_start_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "require_trainer", lambda: None)
    # Another process starts the run while this one plans it.
    other = tmp_path / "tiny" / "mounts"
    monkeypatch.setattr(local_runs, "_require_memory", lambda *_: other.mkdir(parents=True))
    monkeypatch.setattr(local_runs.LocalRuns, "_start", lambda *_: None)
    with pytest.raises(OptionError, match="tiny is there already; choose another name"):
        local_runs.LocalRuns(tmp_path).create(Job({"name": "tiny"}, parse_spec(changed({}))))


def test_a_folder_that_can_not_be_made_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "require_trainer", lambda: None)
    monkeypatch.setattr(local_runs, "_require_memory", lambda *_: None)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="tiny can't be made: Not a directory; choose another"):
        local_runs.LocalRuns(tmp_path / "file").create(
            Job({"name": "tiny"}, parse_spec(changed({})))
        )


@pytest.mark.realtime
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_trainer_starts_leaves_no_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    runs, first = runs_with_a_job(tmp_path)
    start, children = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def interrupted_start(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        children.append(start(["sleep", "60"], **options))
        signal.raise_signal(number)
        return children[-1]

    monkeypatch.setattr("subprocess.Popen", interrupted_start)
    monkeypatch.setattr(runs, "create", lambda _: runs._start(first, pod({})))
    at_start = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, at_start)  # SIGHUP is ignored where nohup has started the tests
    try:
        with pytest.raises(KeyboardInterrupt):
            _run_job(runs, Job({"name": "tiny"}, first.spec))
        assert children[0].poll() == -signal.SIGTERM
    finally:
        children[0].kill()
        signal.signal(number, before)
    assert "tiny: stopping" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "as before the run"
    assert runs.read_job("tiny").job.status.phase == Phase.FAILED


def test_ctrl_c_before_a_run_has_begun_stays_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = local_runs.LocalRuns(tmp_path)
    monkeypatch.setattr(runs, "create", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        _run_job(runs, Job({"name": "tiny"}, parse_spec(changed({}))))


def test_a_step_is_a_line_of_the_numbers_that_it_has() -> None:
    row = {"step": 3, "kl": 0.00123456, "reward": 0.5, "loss": "nan", "other": 1}
    assert step_line(row) == "step 3  reward 0.5  kl 0.001235"
