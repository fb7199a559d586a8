"""`grpo prefetch`: the Job that it makes, and how it follows one; a script stands in for kubectl
and the cluster."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.job import parse_spec
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import MESSAGE_CHARACTERS, Outcome, Result
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_cli.__main__ import main
from grpo_cli.cluster import job_pods, kubectl
from grpo_cli.commands import prefetch
from grpo_cli.commands.prefetch import hub_names, prefetch_job
from grpo_operator.records.names import LABEL_INDEX, LABEL_JOB, LABEL_MANAGED_BY
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.unit.operator_world import PODS

SPEC: dict[str, Any] = {
    "model": {
        "name": "team/model",
        "parameters": "1B",
        "cache": {"claimName": "hub", "subPath": "a"},
    },
    "dataset": {"name": "team/rows", "tokenSecretRef": {"name": "hub", "key": "rows"}},
    "rewards": [
        {"format": {"pattern": "a"}},
        {"model": {"name": "team/judge"}},
        {"model": {"name": "/rewards/2"}},
    ],
    "placement": {
        "gpus": {"min": 8},
        "nodeSelector": {"pool": "gpus"},
        "tolerations": [{"operator": "Exists"}],
    },
    "checkpoint": {"volume": {"claimName": "checkpoints"}},
    "env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}],
    "restarts": {"limit": 7},
    "resources": {"requests": {"memory": "1Ti"}},
    "podTemplate": {
        "spec": {
            "runtimeClassName": "nvidia",
            "imagePullSecrets": [{"name": "registry"}],
            "initContainers": [{"name": "check-gpus", "image": "check:1"}],
        }
    },
}
METADATA = {"namespace": "team-a", "name": "run"}


def made(**fields: Any) -> Any:
    return prefetch_job(METADATA, parse_spec({**SPEC, **fields}), PODS)


def test_its_pod_is_the_jobs_without_what_only_training_needs() -> None:
    pod = made()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "grpo_trainer.prefetch"]
    assert container["resources"] == {"requests": {"cpu": "1", "memory": str(2 * 2**30)}}
    assert {volume["name"] for volume in pod["volumes"]} == {
        "plan",
        "scratch",
        "shared-memory",
        "hub-cache",
    }
    variables = {one["name"]: one for one in container["env"]}
    assert variables["HF_ENDPOINT"]["value"] == "https://mirror.example"
    assert variables["GRPO_DATASET_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "hub",
        "key": "rows",
    }
    assert variables["HF_HUB_CACHE"]["value"] == "/hub-cache/hub"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert not {"initContainers", "runtimeClassName", "affinity"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"]


def test_its_pod_has_the_labels_that_a_policy_may_ask_for() -> None:
    labelled = METADATA | {"labels": {"cost-center": "17"}, "annotations": {"team": "a"}}
    template = prefetch_job(labelled, parse_spec(SPEC), PODS)["spec"]["template"]
    assert template["metadata"]["labels"]["cost-center"] == "17"
    assert template["metadata"]["annotations"]["team"] == "a"


def test_it_runs_where_the_job_s_pods_may() -> None:
    near = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    template = {"spec": {"affinity": {"nodeAffinity": nodes, "podAffinity": near}}}
    pod = made(podTemplate=template)["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gpus"}
    assert pod["affinity"] == {"nodeAffinity": nodes}
    keys = [one.get("key") for one in pod["tolerations"]]
    assert keys == [None, "nvidia.com/gpu", "amd.com/gpu"], (
        "the nodes of the job have GPUs, which keep others away"
    )


@pytest.mark.realtime
def test_it_goes_where_the_claim_of_its_cache_is(
    world: "World", capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"nodeName": "node-1", "volumes": [{"persistentVolumeClaim": {"claimName": "hub"}}]}
    claim = {"metadata": {"name": "hub"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    waits = pod("a", "Pending", conditions=[{"reason": "Unschedulable", "message": "no room"}])
    done = pod("a", "Succeeded", said(Result.SUCCEEDED, "done"))
    holder = {"metadata": {"name": "other-1-0"}, "spec": other}
    world.answers(
        [None, made(), ended("Complete")], [[waits], [done]], claims=[claim], holders=[holder]
    )
    assert command(world) == 0
    (created,) = world.created
    required = created["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert '"values": ["node-1"]' in json.dumps(required)
    told = (
        "Unschedulable: no room; it can run only beside claim hub, which pod other-1-0 has on "
        "node node-1"
    )
    assert capsys.readouterr().err == f"job run-prefetch: {told}\n"


def test_nothing_takes_it_for_a_gang() -> None:
    body = made()
    assert (body["metadata"]["name"], body["spec"]["backoffLimit"]) == ("run-prefetch", 7)
    for labels in (body["metadata"]["labels"], body["spec"]["template"]["metadata"]["labels"]):
        assert not {LABEL_MANAGED_BY, LABEL_JOB, LABEL_INDEX} & labels.keys()


def test_it_is_told_what_the_job_will_fetch_as_the_trainer_reads_it() -> None:
    annotations = made()["spec"]["template"]["metadata"]["annotations"]
    plan = TrainingPlan.model_validate_json(annotations[PLAN_ANNOTATION])
    spec = parse_spec(SPEC)
    assert (plan.model, plan.dataset, plan.rewards) == (spec.model, spec.dataset, spec.rewards)
    assert hub_names(spec) == ["team/model", "team/judge", "team/rows"]
    assert made() == made()


CLUSTER = """
import json, pathlib, sys
state = pathlib.Path({state!r})
asked = json.loads(state.read_text())
words = [one for one in sys.argv[1:] if not one.startswith("--")]
asked["log"].append(sys.argv[1:])
if words[:2] == ["get", "grpojobclasses.grpo.dev"]:
    print(json.dumps({{"items": []}}))
elif words[0] == "get" and words[1] == "jobs":
    print(json.dumps({{"items": [asked["jobs"][0]] if asked["jobs"][0] else []}}))
    asked["jobs"] = asked["jobs"][1:] or asked["jobs"]
elif words[0] == "get" and words[1] == "persistentvolumeclaims":
    print(json.dumps({{"items": asked["claims"]}}))
elif words[0] == "get" and any("spec.nodeName" in one for one in sys.argv):
    print(json.dumps({{"items": asked["holders"]}}))
elif words[0] == "get" and words[1] == "events":
    print(json.dumps({{"items": []}}))
elif words[0] == "get":
    print(json.dumps({{"items": asked["pods"][0]}}))
    asked["pods"] = asked["pods"][1:] or asked["pods"]
elif words[0] == "create":
    asked["created"].append(json.loads(sys.stdin.read()))
    print(json.dumps(asked["created"][-1]))
elif words[0] == "logs":
    print("log of", words[1])
state.write_text(json.dumps(asked))
"""


class World:
    """What the stand-in for kubectl answers, one after the other, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state.json"
        (folder / "kubectl.py").write_text(CLUSTER.format(state=str(self._state)))
        self.folder = folder

    def answers(
        self, jobs: list[Any], pods: list[list[Any]], claims: Any = (), holders: Any = ()
    ) -> None:
        state = {
            "jobs": jobs,
            "pods": pods,
            "created": [],
            "log": [],
            "claims": claims,
            "holders": holders,
        }
        self._state.write_text(json.dumps(state))

    def asked(self, word: str) -> list[list[str]]:
        return [line for line in json.loads(self._state.read_text())["log"] if word in line]

    @property
    def created(self) -> list[Any]:
        found: list[Any] = json.loads(self._state.read_text())["created"]
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {tmp_path}/kubectl.py")
    monkeypatch.setattr(job_pods, "SYSTEM_CLOCK", SteppedClock())
    (tmp_path / "job.yaml").write_text(manifest())
    return World(tmp_path)


def manifest(namespace: str = "team-a", **fields: Any) -> str:
    metadata = {"name": "run", "namespace": namespace}
    body = {
        "apiVersion": "grpo.dev/v1alpha1",
        "kind": "GRPOJob",
        "metadata": metadata,
        "spec": {**SPEC, **fields},
    }
    return yaml.safe_dump(body)


def ended(kind: str, body: Any = None) -> Any:
    return {**(body or made()), "status": {"conditions": [{"type": kind, "status": "True"}]}}


def pod(
    name: str, phase: str, message: str = "", created: str = "2026-01-01T00:00:00Z", **status: Any
) -> Any:
    state = {"terminated": {"message": message}} if message else {}
    status = {"phase": phase, "containerStatuses": [{"state": state}], **status}
    return {"metadata": {"name": name, "creationTimestamp": created}, "status": status}


def said(result: Result, message: str) -> str:
    return Outcome(result=result, message=message).model_dump_json()


def command(world: World, *more: str) -> int:
    return main(
        ["prefetch", "-f", str(world.folder / "job.yaml"), "--trainer-image", "trainer:1", *more]
    )


def test_a_later_job_without_a_cache_is_refused_before_the_first_one_s_is_filled(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    second = manifest(model={"name": "team/model", "parameters": "1B"})
    text = f"{manifest()}---\n{second.replace('name: run', 'name: second')}"
    (world.folder / "job.yaml").write_text(text)
    assert command(world) == 2
    assert "second: spec.model.cache is unset" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["prefetch"], ["preflight", "--in-cluster"]])
def test_no_pod_is_made_of_an_image_that_nobody_has_named(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    def kubectl_answer(line: list[str], _: str | None = None) -> str:
        assert "create" not in line
        return json.dumps({"items": []})

    monkeypatch.setattr(kubectl, "_run", kubectl_answer)
    assert main([*words, "-f", str(world.folder / "job.yaml")]) == 2
    assert "run: spec.image is unset: name the trainer's image" in capsys.readouterr().err


@pytest.mark.realtime
def test_a_job_is_made_and_followed_to_its_end(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = pod(
        "a", "Pending", conditions=[{"reason": "Unschedulable", "message": "no node has room"}]
    )
    first = pod("a", "Failed", said(Result.ERROR, "no answer"))
    second = pod(
        "b",
        "Succeeded",
        said(Result.SUCCEEDED, "in the cache: team/model"),
        created="2026-01-01T00:01:00Z",
    )
    world.answers(
        [None, made(), made(), made(), ended("Complete")],
        [[waits], [waits], [first], [second, first]],
    )
    assert command(world) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "job run-prefetch: pod a",
        "job run-prefetch: pod b",
        "in the cache: team/model",
    ]
    assert err.splitlines() == ["job run-prefetch: Unschedulable: no node has room"]
    body = made()
    del body["metadata"]["namespace"]
    assert world.created == [body]
    assert all("--namespace=team-a" in line for line in world.asked("create"))
    assert [line[-1] for line in world.asked("logs")] == ["a", "b"]


@pytest.mark.realtime
def test_one_that_is_at_work_is_followed_and_one_that_has_ended_made_anew(world: World) -> None:
    done = [[pod("a", "Succeeded", said(Result.SUCCEEDED, "done"))]]
    world.answers([made(), ended("Complete")], done)
    assert command(world) == 0
    assert (world.created, world.asked("delete")) == ([], [])
    world.answers([ended("Failed"), made(), ended("Complete")], done)
    assert command(world) == 0
    assert (len(world.created), len(world.asked("delete"))) == (1, 1)


@pytest.mark.realtime
def test_a_failure_is_told_with_the_last_pods_words(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.answers(
        [None, ended("Failed")],
        [[pod("a", "Failed", said(Result.BAD_INPUT, "spec.model.name: no such"))]],
    )
    assert command(world) == 1
    assert capsys.readouterr().err == "spec.model.name: no such\n"


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("fields", "jobs", "ends"),
    [
        (
            {"model": {"name": "team/model", "parameters": "1B"}},
            [None],
            (2, "spec.model.cache is unset"),
        ),
        (
            {},
            [made(dataset={"name": "team/others"})],
            (5, "is fetching what an earlier version of the spec"),
        ),
        ({}, [None, None], (5, "job run-prefetch was deleted")),
        (
            {
                "model": {**SPEC["model"], "name": "/models/m"},
                "dataset": {"files": {"configMap": {"name": "rows"}, "paths": ["a.jsonl"]}},
                "rewards": [{"format": {"pattern": "a"}}],
            },
            [None],
            (0, "run: nothing to fetch"),
        ),
    ],
)
def test_what_cannot_be_fetched_is_a_sentence(
    world: World,
    capsys: pytest.CaptureFixture[str],
    fields: Any,
    jobs: list[Any],
    ends: tuple[int, str],
) -> None:
    (world.folder / "job.yaml").write_text(manifest(**fields))
    world.answers(jobs, [[]])
    assert command(world) == ends[0]
    assert ends[1] in "".join(capsys.readouterr())


def test_a_file_of_several_namespaces_needs_one(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "job.yaml").write_text(f"{manifest()}\n---\n{manifest('team-b')}")
    world.answers([None], [[]])
    assert command(world) == 2
    assert "has jobs of several namespaces: team-a, team-b" in capsys.readouterr().err


TEXT = st.text(max_size=200)
STATE = st.fixed_dictionaries(
    {},
    optional={
        "waiting": st.fixed_dictionaries({}, optional={"message": TEXT, "reason": TEXT}),
        "terminated": st.fixed_dictionaries({}, optional={"message": TEXT}),
    },
)
STATUS = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        "conditions": st.none()
        | st.lists(
            st.fixed_dictionaries({}, optional={"reason": TEXT, "message": TEXT}), max_size=3
        ),
        "containerStatuses": st.none()
        | st.lists(st.fixed_dictionaries({}, optional={"state": STATE}), max_size=3),
    },
)


@settings(max_examples=cases(100))
@given(statuses=st.lists(STATUS, max_size=4), end=st.sampled_from(["Complete", "Failed"]))
def test_whatever_pods_say_an_end_is_told(statuses: list[Any], end: str) -> None:
    pods = [
        {"metadata": {"name": f"p-{number}"}, "status": status}
        for number, status in enumerate(statuses)
    ]
    assert prefetch._print_end(end, pods) == (0 if end == "Complete" else 1)
    assert all(isinstance(prefetch._has_log(one), bool) for one in pods)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(kubectl, "newest_warning", lambda *_: "")
        assert isinstance(job_pods.waiting_message(Namespace(), "run", pods), str)


@settings(max_examples=cases(50))
@given(message=st.text(max_size=MESSAGE_CHARACTERS))
def test_an_outcomes_message_is_told_as_it_is(message: str) -> None:
    assert prefetch._last_message(pod("a", "Failed", said(Result.ERROR, message))) == message
