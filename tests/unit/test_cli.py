"""The command line without a cluster: files are read as kubectl reads them, objects rendered,
errors told in a line."""

import gc
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_cli.__main__ import main
from grpo_cli.cluster import kubectl
from grpo_cli.commands.logs import choose_pod
from grpo_cli.inputs.manifest import load_jobs
from grpo_cli.show.errors import ManifestError, NotYet
from grpo_cli.show.kubectl_yaml import KubectlDumper
from grpo_operator.records.names import LABEL_COMPONENT, LABEL_JOB
from tests.running_samples import HUB
from tests.samples import REMOVE, changed, job

CPU = changed(
    {
        "placement": {"accelerator": "CPU", "nodes": 2},
        "model.parameters": "77K",
        "image": "trainer:1",
    }
)


def write(folder: Path, *documents: dict[str, Any]) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.dump_all(documents, Dumper=KubectlDumper))
    return str(path)


def test_only_the_jobs_of_a_file_are_taken(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    assert [
        found["metadata"]["name"]
        for found in load_jobs(write(tmp_path, claim, job("a", CPU), job("b", CPU)))
    ] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: ConfigMap", "holds no GRPOJob"),
        ("kind: GRPOJob", "apiVersion is null; this version reads grpo.dev/v1alpha1"),
        ("apiVersion: grpo.dev/v1alpha1\nkind: GRPOJob", "has no spec"),
        ("a: [", "line 1, column 5: expected the node content"),
        ("kind: TrainJob\n---\nkind: Service", "holds no GRPOJob, but Service, TrainJob; "),
        pytest.param("[" * 9999, "nested too deeply", id="deep"),
    ],
)
def test_a_file_without_a_job_is_told_from_one(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError, match=says):
        load_jobs(str(path))


@pytest.mark.parametrize("command", ["plan", "render"])
@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (None, "the GRPOJob has no metadata.name"),
        ([], "the GRPOJob has no metadata.name"),
        ({}, "the GRPOJob has no metadata.name"),
        ({"name": 7}, "metadata.name is 7; it takes 1 to 52"),
        ({"name": "Not_a_name"}, 'metadata.name is "Not_a_name"'),
        ({"name": "a" * 53}, 'metadata.name is "a{53}"; it takes 1 to 52'),
        ({"name": "a", "namespace": 1}, "metadata.namespace is 1; put it in quotes"),
        ({"name": "a", "labels": ["x"]}, r'metadata.labels is \["x"\]'),
        ({"name": "a", "annotations": {"cost": 42}}, r"metadata.annotations.cost must .* \(got 42"),
        ({"name": "a", "labels": {"team": "my team"}}, r"metadata.labels.team must .* \(got \"my "),
        ({"name": "a", "labels": {"a/b/c": "d"}}, "metadata.labels.a/b/c must have a key such as"),
        ({"name": "a", "namespace": "My_NS"}, 'metadata.namespace is "My_NS"; it takes 1 to 63'),
    ],
)
def test_metadata_that_the_server_would_refuse_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, metadata: object, says: str
) -> None:
    assert main([command, "-f", write(tmp_path, job("a", CPU) | {"metadata": metadata})]) == 2
    assert re.search(rf"^grpo: .*job\.yaml: {says}", capsys.readouterr().err)


LOST = changed({"export": REMOVE}, CPU)


@pytest.mark.parametrize("command", ["plan", "render"])
def test_a_new_job_that_would_lose_its_model_is_refused_and_a_stored_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "-f", write(tmp_path, job("a", LOST))]) == 2
    assert (
        "a: spec: the trained model would be lost with its pods: set checkpoint.volume"
        in capsys.readouterr().err
    )
    metadata = {"namespace": "team", "name": "a", "uid": "uid-of-a"}
    stored = job("a", LOST) | {"metadata": metadata}
    assert main([command, "-f", write(tmp_path, stored)]) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "the trained model is not kept"),
        (
            {"export": REMOVE, "checkpoint.volume": {"claimName": "team", "subPath": "runs/[b]"}},
            "the trained model, 0.00 GiB, will be on claim team, folder runs/[b]/a-<uid>/export",
        ),
        (
            {"export": {"to": "Hub", "hub": HUB}, "checkpoint.volume": {"claimName": "team"}},
            (
                "will be on claim team, folder a-<uid>/export and on the hub, private repository "
                "team/out"
            ),
        ),
        (
            {
                "export.to": "Volume",
                "checkpoint.volumeClaimTemplate": {"size": "1Gi"},
                "adapter.use": "Always",
            },
            "the trained adapter, 0.00 GiB, will be on claim a-checkpoints, folder a-<uid>/export",
        ),
        (
            {"export": REMOVE, "checkpoint.store": {"url": "s3://bucket/runs"}},
            "the trained model, 0.00 GiB, will be at s3://bucket/runs/a-<uid>/export",
        ),
        ({"checkpoint.volume": {"claimName": "team"}}, "the trained model is not kept"),
        (
            {
                "export": REMOVE,
                "checkpoint.store": {"url": "s3://b/runs"},
                "model.parameters": "2B",
            },
            "on a pod's own disk, on their way: checkpoints and the export, up to 59.6 GiB",
        ),
        (
            {"export": {"to": "Hub", "hub": HUB}, "model.parameters": "2B"},
            "on a pod's own disk, on its way: the export, up to 7.5 GiB",
        ),
    ],
)
def test_the_plan_says_where_the_model_will_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    assert main(["plan", "-f", write(tmp_path, job("a", changed(changes, CPU)))]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


def test_labels_and_annotations_are_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = {
        "name": "a",
        "labels": {"team": "rl"},
        "annotations": {"note": "n", "grpo.dev/plan": "forged"},
    }
    assert (
        main(["render", "-n", "x", "-f", write(tmp_path, job("a", CPU) | {"metadata": metadata})])
        == 0
    )
    gang = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    template = gang["spec"]["template"]["metadata"]
    assert (gang["metadata"]["labels"]["team"], template["labels"]["team"]) == ("rl", "rl")
    assert gang["metadata"]["annotations"].pop("grpo.dev/spec")
    assert gang["metadata"]["annotations"] == {"note": "n"}
    assert template["annotations"]["note"] == "n"
    assert template["annotations"]["grpo.dev/plan"] != "forged"


def test_ctrl_c_while_reading_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdin, "read", interrupted)
    assert main(["plan", "-f", "-"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ManifestError, match=r"nowhere\.yaml"):
        load_jobs("nowhere.yaml")


def test_render_prints_what_the_operator_creates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = changed({"checkpoint": {"volumeClaimTemplate": {"size": "1Gi"}}}, CPU)
    assert main(["render", "-f", write(tmp_path, job("first", spec)), "-n", "team"]) == 0
    service, claim, gang = yaml.safe_load_all(capsys.readouterr().out)
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert (claim["kind"], claim["metadata"]["name"]) == (
        "PersistentVolumeClaim",
        "first-checkpoints",
    )
    assert (gang["kind"], gang["metadata"]["name"], gang["metadata"]["namespace"]) == (
        "Job",
        "first-1",
        "team",
    )
    assert gang["spec"]["completions"] == 2
    assert gang["spec"]["template"]["spec"]["containers"][0]["image"] == "trainer:1"
    carried = json.loads(gang["spec"]["template"]["metadata"]["annotations"][PLAN_ANNOTATION])
    assert TrainingPlan.model_validate(carried).job.name == "first"


def test_render_shows_where_another_jobs_checkpoints_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "render",
                "-n",
                "team",
                "-f",
                write(tmp_path, job("next", changed({"resumeFrom": {"grpoJob": "first"}}, CPU))),
            ]
        )
        == 0
    )
    gang = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    claims = [
        volume.get("persistentVolumeClaim")
        for volume in gang["spec"]["template"]["spec"]["volumes"]
    ]
    assert {"claimName": "first-checkpoints"} in claims
    plan = json.loads(gang["spec"]["template"]["metadata"]["annotations"][PLAN_ANNOTATION])
    assert plan["resumeFrom"].startswith("/resume/first-")


def test_render_plans_a_gpu_job_on_the_gpus_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, job("big", changed({"model.parameters": "8B", "adapter.use": "Never"})))
    assert main(["render", "-f", path]) == 2
    assert "which GPUs?" in capsys.readouterr().err
    assert main(["render", "-f", path, "--gpus", "1xTesla-T4"]) == 5
    assert "grpo: big: " in capsys.readouterr().err
    assert main(["render", "-f", path, "-n", "a", "--gpus", "2x8xNVIDIA-H100-80GB-HBM3"]) == 0
    gang = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    container = gang["spec"]["template"]["spec"]["containers"][0]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= 1


def test_a_folder_is_read_as_kubectl_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, written in (("a.yaml", "first"), ("b.yml", "second"), ("c.json", "third")):
        (tmp_path / name).write_text(json.dumps(job(written, CPU)))
    (tmp_path / "notes.txt").write_text("no: [YAML")
    assert [found["metadata"]["name"] for found in load_jobs(str(tmp_path))] == [
        "first",
        "second",
        "third",
    ]
    (tmp_path / "c.json").write_text("{")
    assert main(["plan", "-f", str(tmp_path)]) == 2
    assert f"grpo: {tmp_path / 'c.json'}: " in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", "/nowhere.yaml"]) == 2
    assert capsys.readouterr().err == "grpo: /nowhere.yaml: No such file or directory\n"
    assert main(["init", "--from-trl", "/nowhere.py"]) == 2
    assert capsys.readouterr().err == "grpo: /nowhere.py: No such file or directory\n"
    assert main(["plan", "job.yaml"]) == 2
    assert "write `grpo plan -f job.yaml`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["plan", "render", "preflight", "prefetch", "submit", "run", "reward test rows.jsonl"]
)
def test_several_files_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.split(), "-f", "a.yaml", "-f", "b.yaml"]) == 2
    assert capsys.readouterr().err == (
        "grpo: -f a.yaml -f b.yaml: name one file or folder, or pipe all to -\n"
    )


@pytest.mark.realtime
@pytest.mark.parametrize(("context", "namespace"), [("team", "team"), ("", "default")])
def test_render_takes_the_namespace_of_the_context(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    context: str,
    namespace: str,
) -> None:
    (tmp_path / "kubectl.py").write_text(f"print({context!r})")
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {tmp_path}/kubectl.py")
    path = write(tmp_path, job("first", CPU))
    assert main(["render", "-f", path]) == 0
    objects = yaml.safe_load_all(capsys.readouterr().out)
    assert {one["metadata"]["namespace"] for one in objects} == {namespace}


def test_every_problem_of_a_file_is_told_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = changed({"training.beta": -1, "training.numGenerations": 1}, CPU)
    path = write(tmp_path, job("wrong", spec), job("right", CPU), job("too", spec))
    assert main(["render", "-f", path]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(" (got")[0] for line in shown.err.splitlines()] == [
        f"grpo: {path}: {name}: spec.training.{problem}"
        for name in ("wrong", "too")
        for problem in (
            "beta: must be at least 0",
            "numGenerations: must be at least 2",
        )
    ]


@pytest.mark.realtime
def test_without_kubectl_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "E1127 14:38:42.868205   13794 memcache.go:265] connection refused\n"
    (tmp_path / "kubectl.py").write_text(f"raise SystemExit({f'{log}{log}refused'!r})")
    (tmp_path / "silent.py").write_text("raise SystemExit(3)")
    for program, says in {
        "no-such-kubectl": "no-such-kubectl: .*; install kubectl or set KUBECTL to it",
        "'kubectl": "KUBECTL is no command line: No closing quotation",
        f"{sys.executable} {tmp_path}/kubectl.py": "refused",
        f"{sys.executable} {tmp_path}/silent.py": ".* ended with exit code 3",
    }.items():
        monkeypatch.setenv("KUBECTL", program)
        assert main(["status", "a"]) == 4
        assert re.fullmatch(f"grpo: {says}\n", capsys.readouterr().err)


NEWER = job("a", CPU) | {
    "metadata": {"namespace": "n", "name": "a"},
    "status": {"phase": "Dreaming"},
}


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("prints", "says"),
    [
        ("Unable to connect", "printed no JSON object: 'Unable to connect"),
        ("[]", "printed no JSON object"),
        ("\udcff", "printed no JSON object"),
        (
            json.dumps(NEWER),
            "a was written by another version of the operator: status.phase: Input should be",
        ),
    ],
)
def test_an_answer_that_is_none_is_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prints: str,
    says: str,
) -> None:
    output = prints.encode(errors="surrogateescape")
    (tmp_path / "kubectl.py").write_text(f"import sys; sys.stdout.buffer.write({output!r})")
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {tmp_path}/kubectl.py")
    assert main(["status", "a"]) == 4
    assert says in capsys.readouterr().err


def pod(attempt: int | str, index: int) -> dict[str, Any]:
    labels = {
        "grpo.dev/attempt": str(attempt),
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    return {"metadata": {"name": f"p-{attempt}-{index}", "labels": labels}}


PODS = [pod(1, 0), pod(1, 1), pod(2, 0), pod("latest", 0), {"metadata": {"name": "stranger"}}]


@pytest.mark.parametrize(
    ("attempt", "index", "name"), [(None, 0, "p-2-0"), (None, 1, "p-1-1"), (1, 0, "p-1-0")]
)
def test_logs_come_from_the_rank_of_the_attempt(attempt: int | None, index: int, name: str) -> None:
    assert choose_pod(PODS, attempt, index) == name


def test_logs_of_a_pod_that_is_not_there_say_which_are() -> None:
    with pytest.raises(
        NotYet,
        match=r"attempt 2 on node 1 .* there are: attempt 1 node 0, attempt 1 node 1, attempt 2",
    ):
        choose_pod(PODS, 2, 1)
    with pytest.raises(NotYet, match="there are: none"):
        choose_pod([], None, 0)


LOGS = """
import json, sys
words = sys.argv[1:]
if words[0] == "get":
    print(json.dumps(json.loads(OBJECTS)[words[1]]))
else:
    if not HAS_LOGS:
        sys.exit("container trainer is waiting to start: ContainerCreating")
    line = {"time": "2026-01-31T12:00:00Z", "level": "info", "message": "a"}
    print("[pod/p-2-0/trainer] " + json.dumps(line))
    print("[pod/p-2-1/trainer] from a library", " ".join(words))
"""
"""A kubectl with one job, whose logs have two lines."""


def use_logs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, has_logs: bool, events: Sequence[Any] = ()
) -> None:
    """Make kubectl one with a job of two attempts."""
    seen = job("a", CPU) | {"metadata": {"namespace": "n", "name": "a"}}
    gang = [pod(1, 0), pod(2, 0), pod(2, 1)]
    for one in gang:
        one["metadata"]["labels"] |= {LABEL_JOB: "a", LABEL_COMPONENT: "trainer"}
    objects = json.dumps(
        {
            kubectl.RESOURCE: seen,
            "pods": {"items": gang},
            "pod": gang[1],
            "events": {"items": list(events)},
        }
    )
    program = f"OBJECTS, HAS_LOGS = {objects!r}, {has_logs}\n{LOGS}"
    (folder / "kubectl.py").write_text(program)
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {folder}/kubectl.py")


@pytest.mark.realtime
@pytest.mark.parametrize("output", ["text", "json"])
def test_logs_of_a_pod_that_does_not_start_say_what_keeps_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
) -> None:
    message = 'MountVolume.SetUp failed: configmap "rewards" not found\x1b[2J'
    events = [
        {"reason": "FailedScheduling", "message": "x", "lastTimestamp": "2026-01-31T11:00:00Z"},
        {"reason": "FailedMount", "message": message, "lastTimestamp": "2026-01-31T12:00:00Z"},
    ]
    use_logs(monkeypatch, tmp_path, has_logs=False, events=events)
    assert main(["logs", "a", "-o", output]) == 1
    shown = capsys.readouterr().err
    assert 'p-2-0: FailedMount: MountVolume.SetUp failed: configmap "rewards" not found' in shown
    assert "\x1b" not in shown


@pytest.mark.realtime
def test_logs_of_all_ranks_are_those_of_one_attempt_with_the_pods_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_logs(monkeypatch, tmp_path, has_logs=True)
    assert main(["logs", "a", "--all-ranks", "--since", "10m"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "p-2-0 12:00:00 info    a"
    assert second.startswith("p-2-1 from a library")
    for flag in ("attempt=2", "job-name=a", "component=trainer", "--since=10m", "--prefix"):
        assert flag in second


@pytest.mark.realtime
def test_logs_whose_reader_goes_end_as_a_pipe_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_logs(monkeypatch, tmp_path, has_logs=True)
    program = tmp_path / "kubectl.py"
    dies = "    import os, signal\n    os.kill(os.getpid(), signal.SIGPIPE)\n    line = {"
    restored = "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
    program.write_text(restored + program.read_text().replace("    line = {", dies))
    assert main(["logs", "a", "-o", "json"]) == 141


def test_no_garbage_collection_of_a_command_walks_through_what_it_imported() -> None:
    gc.unfreeze()
    assert main(["gpus"]) == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
