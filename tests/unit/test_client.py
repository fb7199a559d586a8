"""The Python client on a backend that pretends: waiting, watching, names and refusals."""

import fcntl
import inspect
import json
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from grpo.client import Event, GRPOClient, GRPOError, Job, JobFailed, LocalProcess
from grpo_api.job import parse_spec
from grpo_api.report.history import Row
from grpo_api.report.report import Outcome, Result
from grpo_api.status.status import GRPOJobStatus, Phase
from grpo_cli.inputs import manifest
from grpo_cli.show.errors import KubectlError, KubectlExitError
from grpo_planner.result.result import PlanResult
from tests.samples import SPEC, changed, job
from tests.stepped_clock import SteppedClock
from tests.unit.cli_world import Cluster

ROOT = Path(__file__).parents[2]
KUBEFLOW = {
    "train": (),
    "list_jobs": (),
    "get_job": ("name",),
    "get_job_logs": ("name", "follow"),
    "get_job_events": ("name",),
    "wait_for_job_status": ("name", "status", "timeout", "polling_interval"),
    "delete_job": ("name",),
}
"""Methods and arguments of TrainerClient, looked up in kubeflow/sdk."""


class Script:
    """A backend whose job goes through phases, one at each look."""

    def __init__(self, *phases: Phase, reason: str = "") -> None:
        self.phases = list(phases)
        self.reason = reason
        self.created: list[dict[str, Any]] = []

    def plan(self, job: manifest.Job) -> PlanResult:
        raise NotImplementedError

    def create(self, job: manifest.Job) -> str:
        self.created.append(manifest.document_of(job))
        return str(job.metadata["name"])

    def jobs(self) -> list[Job]:
        return [self.job("tiny")]

    def job(self, name: str) -> Job:
        phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
        outcome = Outcome(result=Result.BAD_INPUT, message="no column answer")
        status = GRPOJobStatus(
            phase=phase, reason=self.reason, outcome=outcome if phase == Phase.FAILED else None
        )
        return Job(name=name, namespace="n", uid="1", spec=parse_spec(SPEC), status=status)

    def log_lines(self, name: str, rank: int, *, follow: bool) -> Iterator[str]:
        yield f"{name} {rank} {follow}"

    def events(self, name: str) -> list[Event]:  # noqa: ARG002
        return []

    def rows(self, name: str, file: str) -> list[Row]:  # noqa: ARG002
        return [{"step": 1, "rolledBack": True}, {"step": 1}]

    def suspend(self, name: str) -> None: ...
    def resume(self, name: str) -> None: ...
    def retry(self, name: str) -> None: ...
    def export(self, name: str, folder: Path) -> None: ...
    def delete(self, name: str) -> None: ...


def client(*phases: Phase) -> GRPOClient:
    return GRPOClient(Script(*phases), clock=SteppedClock())


@pytest.mark.parametrize(("method", "arguments"), KUBEFLOW.items())
def test_the_client_has_the_names_of_kubeflows(method: str, arguments: tuple[str, ...]) -> None:
    assert set(arguments) <= inspect.signature(getattr(GRPOClient, method)).parameters.keys()


@pytest.mark.realtime
def test_the_client_of_a_cluster_needs_no_module_of_posix() -> None:
    program = "import sys; sys.modules['fcntl'] = None; from grpo.client import GRPOClient"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_type_checkers_of_users_read_the_types_of_the_client() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # PEP 561: they skip a package without this file
    for package in ("grpo", "grpo_api", "grpo_cli", "grpo_planner"):
        assert "py.typed" in project["tool"]["setuptools"]["package-data"][package]
        assert (ROOT / "operator" / package / "py.typed").is_file()


def test_waiting_returns_the_job_in_the_asked_phase() -> None:
    waiting = client(Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED)
    assert waiting.wait_for_job_status("tiny").phase == "Succeeded"
    early = client(Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED)
    assert early.wait_for_job_status("tiny", {"Running", "Succeeded"}).phase == "Running"


def test_waiting_ends_with_the_failure_and_its_message() -> None:
    with pytest.raises(JobFailed, match="tiny is Failed: no column answer"):
        client(Phase.RUNNING, Phase.FAILED).wait_for_job_status("tiny")
    with pytest.raises(JobFailed, match="tiny is Succeeded"):
        client(Phase.SUCCEEDED).wait_for_job_status("tiny", {"Running"})


def test_waiting_ends_at_its_timeout() -> None:
    with pytest.raises(TimeoutError, match="tiny is Running after 10 s, not Succeeded"):
        client(Phase.RUNNING).wait_for_job_status("tiny", timeout=10)
    refused = GRPOClient(Script(Phase.PENDING, reason="InvalidSpec"), clock=SteppedClock())
    with pytest.raises(TimeoutError, match=r"tiny is Pending \(InvalidSpec\) after 10 s"):
        refused.wait_for_job_status("tiny", timeout=10)


def test_waiting_and_watching_outlive_a_restart_of_the_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silences, answer = iter([False, True, True, False, False]), Script.job

    def job(script: Script, name: str) -> Job:
        if next(silences, True):
            raise KubectlExitError("connection refused")
        return answer(script, name)

    monkeypatch.setattr(Script, "job", job)
    watched = client(Phase.RUNNING, Phase.FAILED).watch("tiny")
    assert [job.phase for job in watched] == ["Running", "Failed"]
    silences = iter([False, True, True, False])
    assert client(Phase.RUNNING, Phase.SUCCEEDED).wait_for_job_status("tiny").phase == "Succeeded"
    silences = iter([False])
    with pytest.raises(TimeoutError, match="tiny is Running after 10 s"):
        client(Phase.RUNNING).wait_for_job_status("tiny", timeout=10)
    with pytest.raises(KubectlError, match="connection refused"):
        client(Phase.RUNNING).wait_for_job_status("tiny")


@pytest.mark.parametrize(
    ("metadata", "created"),
    [
        ({"generateName": "run-"}, {"generateName": "run-"}),
        ({"generateName": "run-", "name": "tiny"}, {"name": "tiny"}),
        ({"generateName": "", "name": "tiny"}, {"generateName": "", "name": "tiny"}),
    ],
)
def test_a_job_may_leave_its_name_to_the_api_server(
    metadata: dict[str, Any], created: dict[str, Any]
) -> None:
    script = Script(Phase.PENDING)
    GRPOClient(script).train(job("tiny", SPEC) | {"metadata": metadata})
    assert script.created[0]["metadata"] == created
    known = manifest.read_job(job("tiny", SPEC) | {"metadata": metadata})
    local = [manifest.with_own_name(known).metadata for _ in range(9)]
    assert len({made["name"] for made in local}) == (1 if "name" in metadata else 9)
    assert all(made["name"].startswith(("run-", "tiny")) for made in local)
    assert not any("generateName" in made for made in local)


@pytest.mark.parametrize("prefix", ["Run-", "-run", 7, "a" * 48, "run.", ["run"]])
def test_a_prefix_that_makes_no_name_is_refused(prefix: Any) -> None:
    with pytest.raises(GRPOError, match=r"metadata\.generateName is .*; it takes 1 to 47 small"):
        client(Phase.PENDING).train(job("tiny", SPEC) | {"metadata": {"generateName": prefix}})


@pytest.mark.parametrize("status", [{"Complete"}, set(), None, 5, {"Running", None}, [["Failed"]]])
def test_a_phase_that_does_not_exist_is_refused(status: Any) -> None:
    with pytest.raises(GRPOError, match="it takes Failed, Pending, Queued"):
        client(Phase.RUNNING).wait_for_job_status("tiny", status)


def test_one_phase_is_waited_for_as_a_text() -> None:
    assert client(Phase.PENDING, Phase.RUNNING).wait_for_job_status("tiny", "Running").phase
    with pytest.raises(GRPOError, match="status is \\['running'\\]; it takes Failed"):
        client(Phase.RUNNING).wait_for_job_status("tiny", "running")


def test_waiting_ends_where_a_job_says_nothing_and_no_time_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TimeoutError):
        client(Phase.RUNNING, Phase.SUCCEEDED).wait_for_job_status("tiny", timeout=0)
    monkeypatch.setattr(Job, "message", "")
    with pytest.raises(JobFailed, match="tiny is Failed: it left no outcome; read its log"):
        client(Phase.FAILED).wait_for_job_status("tiny")


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5", None])
def test_a_time_that_nobody_can_wait_is_refused(seconds: Any) -> None:
    waiting = client(Phase.RUNNING)
    with pytest.raises(GRPOError, match=r"^timeout is .*; it takes seconds, 0 or more"):
        waiting.wait_for_job_status("tiny", timeout=seconds)
    with pytest.raises(GRPOError, match=r"^polling_interval is .*; it takes seconds"):
        waiting.wait_for_job_status("tiny", polling_interval=seconds)
    with pytest.raises(GRPOError, match=r"^polling_interval is .*; it takes seconds"):
        list(waiting.watch("tiny", polling_interval=seconds))


def test_a_long_pause_outlasts_no_timeout() -> None:
    clock = SteppedClock()
    waiting = GRPOClient(Script(Phase.RUNNING), clock=clock)
    began_at = clock.now()
    with pytest.raises(TimeoutError):
        waiting.wait_for_job_status("tiny", timeout=10, polling_interval=60)
    assert clock.now() == began_at + 10


def test_watching_yields_changes_only_up_to_the_end() -> None:
    watched = client(Phase.PENDING, Phase.PENDING, Phase.RUNNING, Phase.RUNNING, Phase.FAILED)
    assert [job.phase for job in watched.watch("tiny")] == ["Pending", "Running", "Failed"]


def test_a_spec_of_the_contract_and_an_object_are_the_same_job() -> None:
    backend = Script(Phase.PENDING)
    starting = GRPOClient(backend)
    assert starting.train(parse_spec(SPEC), name="tiny") == "tiny"
    assert starting.train(job("other", SPEC), name="tiny") == "tiny"
    assert backend.created == [job("tiny", SPEC)] * 2


def test_a_job_may_have_the_types_of_a_notebook() -> None:
    backend = Script(Phase.PENDING)
    fields = {
        "training.numGenerations": np.int64(8),
        "training.maskTruncatedCompletions": np.bool_(True),
        "training.learningRate": np.float64(1e-6),
        "adapter.targetModules": ("q_proj", "v_proj"),
        "model.name": Path("/models/tiny"),
    }
    GRPOClient(backend).train(job("tiny", changed(fields)))
    made = backend.created[0]["spec"]
    assert made["adapter"]["targetModules"] == ["q_proj", "v_proj"]
    assert made["model"]["name"] == "/models/tiny"
    assert made["training"]["numGenerations"] == 8
    with pytest.raises(GRPOError, match=r"spec.adapter.targetModules: must be a list"):
        GRPOClient(backend).train(job("tiny", changed({"adapter.targetModules": {"q_proj"}})))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (job("tiny", changed({"training.learningRate": "fast"})), "spec.training.learningRate"),
        (job("Tiny", SPEC), 'metadata.name is "Tiny"; it takes 1 to'),
        (job("tiny", changed({"training.learnigRate": 1.0})), "learnigRate"),
        ({"spec": SPEC}, "apiVersion is null"),
    ],
)
def test_a_wrong_job_is_refused_by_its_path(document: dict[str, Any], message: str) -> None:
    with pytest.raises(GRPOError) as refused:
        client(Phase.PENDING).train(document)
    assert message in str(refused.value)


@pytest.mark.parametrize("wrong", ["job.yaml", Path("job.yaml"), [job("tiny", SPEC)], None])
def test_what_is_no_job_is_refused_with_what_is(wrong: Any) -> None:
    for start in (client(Phase.PENDING).train, client(Phase.PENDING).plan):
        with pytest.raises(GRPOError, match=r"such as load_jobs\(file\)\[0\]"):
            start(wrong)
    with pytest.raises(GRPOError, match=r"has no metadata.name"):
        client(Phase.PENDING).train(job("tiny", SPEC) | {"metadata": ["tiny"]}, name="tiny")


def test_a_run_consists_of_the_steps_that_were_not_rolled_back() -> None:
    assert client(Phase.RUNNING).history("tiny") == [{"step": 1}]


def test_a_job_of_another_namespace_is_not_started_where_its_name_would_not_be_found() -> None:
    elsewhere = job("tiny", SPEC)
    elsewhere["metadata"]["namespace"] = "team-b"
    with Cluster(None).as_kubectl(), pytest.raises(GRPOError, match=r"namespace='team-b'\)"):
        GRPOClient().train(elsewhere)


def test_a_model_goes_into_a_new_or_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = tmp_path / "model", tmp_path / "copy"
    model.mkdir()
    folder.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.setattr(LocalProcess, "export_folder", lambda *_: model)
    client = GRPOClient(LocalProcess(tmp_path / "runs"))
    assert (client.export("job", folder) / "config.json").is_file()
    with pytest.raises(GRPOError, match="name a new folder"):
        client.export("job", folder)


METHODS = (
    "get_job", "get_job_events", "wait_for_job_status", "history", "samples", "suspend", "resume",
    "retry", "delete_job",
)  # fmt: skip


@pytest.mark.parametrize("name", ["none", "", "..", "a" * 300, "a\0b", None, 5])
def test_a_name_without_a_run_is_a_sentence(name: Any, tmp_path: Path) -> None:
    client = GRPOClient(LocalProcess(tmp_path))
    calls = [getattr(client, method) for method in METHODS]
    calls += [lambda name: list(client.get_job_logs(name))]
    calls += [lambda name: client.export(name, tmp_path / "model")]
    for call in calls:
        with pytest.raises(GRPOError, match="there are: none"):
            call(name)


def test_a_model_that_can_not_be_copied_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalProcess, "export_folder", lambda *_: tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(GRPOError, match=r"can't be copied to .*/file/model: Not a directory"):
        GRPOClient(LocalProcess(tmp_path)).export("tiny", tmp_path / "file" / "model")


def local_run(folder: Path) -> Path:
    """Folder of a run whose first attempt has not begun."""
    home = folder / "run"
    home.mkdir()
    document = {"metadata": {"name": "run", "namespace": "local", "uid": "1"}, "spec": SPEC}
    (home / "job.json").write_text(json.dumps(document))
    return home


def test_a_run_that_another_process_deletes_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = GRPOClient(LocalProcess(tmp_path))
    names, status = LocalProcess.names, GRPOJobStatus(phase=Phase.FAILED)

    def delete_after(answer: Any) -> Any:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return answer

    for call in (client.get_job, client.history, client.get_job_events, client.delete_job):
        local_run(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(LocalProcess, "names", lambda runs: delete_after(names(runs)))
            with pytest.raises(GRPOError, match=r"no job run in .*; there are: none"):
                call("run")
    monkeypatch.setattr("grpo_cli.local.local_runs.read_status", lambda _: delete_after(status))
    local_run(tmp_path)
    assert client.get_job_events("run") == []
    local_run(tmp_path)
    with pytest.raises(GRPOError, match="no job run"):
        list(client.get_job_logs("run"))


def test_a_run_whose_first_attempt_has_not_begun_is_a_sentence(tmp_path: Path) -> None:
    client = GRPOClient(LocalProcess(tmp_path))
    local_run(tmp_path)
    for call in (client.history, client.samples, lambda name: client.export(name, tmp_path / "x")):
        with pytest.raises(GRPOError, match="run has no attempt yet"):
            call("run")


def test_a_run_that_is_being_started_is_read_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = GRPOClient(LocalProcess(tmp_path))
    write = Path.write_text

    def write_slowly(file: Path, text: str, **options: Any) -> int:
        file.touch()
        assert client.list_jobs() == []
        return write(file, text, **options)

    monkeypatch.setattr("grpo_cli.local.local_runs.require_trainer", lambda: None)
    monkeypatch.setattr("grpo_cli.local.local_runs._require_memory", lambda *_: None)
    monkeypatch.setattr(LocalProcess, "_start", lambda *_: None)
    monkeypatch.setattr(Path, "write_text", write_slowly)
    assert client.train(job("tiny", SPEC)) == "tiny"


def test_ctrl_c_in_an_init_container_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = {"name": "prepare", "command": ["python", "-c", "pass"]}
    template = {"podTemplate": {"spec": {"initContainers": [container]}}}
    monkeypatch.setattr("grpo_cli.local.local_runs.require_trainer", lambda: None)
    monkeypatch.setattr("grpo_cli.local.local_runs._require_memory", lambda *_: None)
    monkeypatch.setattr("subprocess.call", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        GRPOClient(LocalProcess(tmp_path)).train(job("tiny", SPEC | template))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_cut_off_or_that_another_version_wrote_is_a_sentence(tmp_path: Path) -> None:
    client = GRPOClient(LocalProcess(tmp_path))
    file = tmp_path / "run" / "job.json"
    file.parent.mkdir()
    metadata = {"name": "run", "namespace": "local", "uid": "1"}
    for spec, message in ((SPEC, "no attempt yet"), ({"newer": 1}, "another version")):
        file.write_text(json.dumps({"metadata": metadata, "spec": spec}))
        with pytest.raises(GRPOError, match=message):
            client.get_job("run")
        with pytest.warns(UserWarning, match=message):
            assert client.list_jobs() == []


def test_a_job_of_a_newer_operator_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = {"namespace": "n", "uid": "1"}
    items = [
        {"metadata": metadata | {"name": name}, "spec": SPEC, "status": {"phase": phase}}
        for name, phase in (("newer", "Hibernated"), ("known", "Running"))
    ]
    monkeypatch.setattr("grpo_cli.cluster.kubectl.get_json", lambda *_: {"items": items})
    with pytest.warns(UserWarning, match="newer.*status.phase"):
        assert [job.name for job in GRPOClient().list_jobs()] == ["known"]


def test_a_folder_with_the_name_of_a_job_is_not_taken_for_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}')
    monkeypatch.chdir(tmp_path)
    with Cluster(None).as_kubectl(), pytest.raises(GRPOError, match="not found"):
        GRPOClient().history("run")


def test_a_trainer_that_is_being_started_is_ended_as_soon_as_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "run"
    (home / "attempt-1").mkdir(parents=True)
    (home / "job.json").write_text("{}")
    signals = list[tuple[int, int]]()
    texts = iter(["", '{"pid": 4', '{"pid": 41, "port": 1}', ""])

    def starter_goes_on() -> None:
        (home / "attempt-1" / "process.json").write_text(next(texts))

    def kill(process_id: int, number: int) -> None:
        signals.append((process_id, number))
        lock.close()
        raise ProcessLookupError

    clock = SteppedClock(starter_goes_on)
    monkeypatch.setattr("grpo_cli.local.local_runs.SYSTEM_CLOCK", clock)
    monkeypatch.setattr("os.kill", kill)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        LocalProcess(tmp_path).suspend("run")
    assert signals == [(41, signal.SIGTERM)]


@pytest.mark.parametrize("seconds_to_die", [0.5, 60.0])
def test_a_run_is_deleted_only_after_the_end_of_its_trainer(
    seconds_to_die: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "run"
    (home / "attempt-1").mkdir(parents=True)
    (home / "job.json").write_text("{}")
    (home / "attempt-1" / "process.json").write_text('{"pid": 41, "port": 1}')
    kills = list[float]()

    def trainer_goes_on() -> None:
        if kills and clock.now() >= kills[0] + seconds_to_die:
            lock.close()

    clock = SteppedClock(trainer_goes_on)
    monkeypatch.setattr("grpo_cli.local.local_runs.SYSTEM_CLOCK", clock)
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("os.killpg", lambda *_: kills.append(clock.now()))
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if seconds_to_die > 30:
            with pytest.raises(GRPOError, match="the trainer of run does not end"):
                LocalProcess(tmp_path).delete("run")
        else:
            LocalProcess(tmp_path).delete("run")
        assert home.exists() is not lock.closed
