"""What of a spec may change, by the job's state, judged by the real API server: every field, in
every state.

The rule is one CEL expression with a message that names the fields; only the server can say what it
does with both.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.immutability import ALWAYS, NEVER, WHILE_STOPPED
from harness.access import CommandError
from harness.client import ApiClient, ApiStatusError
from harness.fixtures import AnyCluster
from tests.integration.operator_bench import GRPOJOBS, MERGE
from tests.samples import REMOVE, SPEC, changed, job

HTTP = {
    "http": {
        "url": "http://judge.svc:8000/score",
        "tokenSecretRef": {"name": "judge", "key": "token"},
    }
}
BASE = changed(
    {
        "rewards": [{"accuracy": {"score": 2.0}}, HTTP, {"python": {"function": "a:b"}}],
        "image": "trainer:1",
        "model.chatTemplateKwargs": {"enable_thinking": False, "tags": [1]},
    }
)
"""The job that is changed."""

TRAINED: list[tuple[str, object]] = [
    ("model.name", "other/model"),
    ("model.revision", "v2"),
    ("model.tokenSecretRef", {"name": "hub", "key": "token"}),
    ("model.chatTemplate", "{{ messages[0].content }}"),
    ("model.chatTemplateKwargs", {"enable_thinking": True, "tags": [1]}),
    ("model.chatTemplateKwargs", {"enable_thinking": False, "tags": [2]}),
    ("model.chatTemplateKwargs", REMOVE),
    ("generation.stop", ["</answer>"]),
    ("dataset.config", "socratic"),
    ("training.beta", 0.5),
    ("reference.strategy", "Clone"),
    ("adapter.use", "Never"),
    ("adapter.learningRate", 1e-5),
    ("checkpoint.volume", {"claimName": "c"}),
    ("checkpoint.keep", 7),
    ("resumeFrom", {"grpoJob": "earlier"}),
    ("placement.accelerator", "CPU"),
    ("rewards", [{"accuracy": {}}]),
    ("rewards.0.weight", 3),
    ("rewards.0.name", "other"),
    ("rewards.0.accuracy.timeoutSeconds", 7),
    ("rewards.1.http.batchSize", 7),
    ("rewards.2.python.function", "a:c"),
    ("rewards.2.python.configMap", {"name": "c"}),
]
"""Changes of what is trained."""
STOPPED: list[tuple[str, object]] = [
    ("image", "trainer:2"),
    ("image", REMOVE),
    ("model.cache", {"claimName": "hub"}),
    ("imagePullPolicy", "Always"),
    ("command", ["python", "-m", "grpo_acceptance"]),
    ("env", [{"name": "A", "value": "b"}]),
    ("envFrom", [{"secretRef": {"name": "s"}}]),
    ("resources.limits", {"memory": "1Gi"}),
    ("sharedMemory", "1Gi"),
    ("volumeMounts", [{"name": "more", "mountPath": "/more"}]),
    ("podTemplate.spec.runtimeClassName", "nvidia"),
    ("podTemplate.metadata.labels", {"team": "rl"}),
    ("placement.nodes", 3),
    ("placement.gpus", {"max": 8}),
    ("placement.gpuProduct", "NVIDIA-L4"),
    ("placement.nodeSelector", {"pool": "a"}),
    ("placement.tolerations", [{"operator": "Exists"}]),
    ("placement.allowSlow", True),
    ("placement.queueName", "team"),
    ("placement.priorityClassName", "high"),
    ("generation.engine", "Transformers"),
    ("generation.servers", {"replicas": 2}),
    ("generation.tensorParallel", 2),
    ("generation.sequencesAtATime", 4),
    ("guard.maxKL", 3),
    ("export", REMOVE),
    ("guard.hangTimeoutSeconds", 60),
    ("guard.onDivergence", "Rollback"),
    ("guard.stopOn", ["NoSignal"]),
    ("rewards.1.http.url", "https://other.svc/score"),
    ("rewards.1.http.timeoutSeconds", 7),
    ("rewards.1.http.batchTimeoutSeconds", 7),
    ("rewards.1.http.tokenSecretRef", REMOVE),
    ("rewards.0.maxFailureShare", 1),
    ("rewards.1.maxFailureShare", 1),
]
"""Changes of how it runs."""
ANY_TIME: list[tuple[str, object]] = [
    ("suspend", True),
    ("retry", 1),
    ("restarts.limit", 9),
    ("preflight", "Required"),
    ("jobClassName", "h100"),
    ("tracking", {"mlflow": {"url": "https://mlflow.example"}}),
    ("samples", {"groups": 0}),
    ("activeDeadlineSeconds", 60),
    ("ttlSecondsAfterFinished", 60),
]


def condition(kind: str) -> dict[str, str]:
    return {
        "type": kind,
        "status": "True",
        "reason": "Because",
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    }


STATES: dict[str, tuple[bool, dict[str, Any]]] = {
    "new": (False, {}),
    "queued": (False, {"attempt": 0, "conditions": []}),
    "running": (False, {"attempt": 2, "conditions": [condition("Running")]}),
    "bare": (False, {"attempt": 1}),
    "suspended": (True, {"attempt": 2, "conditions": [condition("Suspended")]}),
    "failed": (False, {"attempt": 2, "conditions": [condition("Failed")]}),
    "succeeded": (False, {"attempt": 2, "conditions": [condition("Succeeded")]}),
}
"""Whether spec.suspend is true, and the status."""
EACH_FIELD = ("queued", "running", "failed")
"""A state of each answer. The others have every field in `make test-all`, and changes of several
fields in `make test`."""
LABELLED = {"labels": {"team": "rl"}}


@pytest.fixture(scope="module", params=list(STATES))
def state(crd_cluster: AnyCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The API server has a job of that name in that state."""
    name = str(request.param)
    suspended, status = STATES[name]
    more = {"podTemplate": {"spec": {"volumes": [{"name": "more", "emptyDir": {}}]}}}
    crd_cluster.kubectl(
        "create",
        "-f",
        "-",
        input=json.dumps(job(name, changed({"suspend": suspended, **more}, BASE))),
    )
    patch = json.dumps({"status": status})
    crd_cluster.kubectl(
        "patch", "grpojob", name, "--subresource=status", "--type=merge", "-p", patch
    )
    yield name
    crd_cluster.kubectl("delete", "grpojob", name)


def change(api: ApiClient, name: str, *changes: tuple[str, object], **more: Any) -> str:
    """What the server says to these changes, dry run; empty when it takes them."""
    path = f"{GRPOJOBS.format('default')}/{name}"
    found = api.get(path)
    found["spec"] = changed(dict(changes), found["spec"])
    try:
        api.request("PUT", f"{path}?dryRun=All&fieldValidation=Strict", found | more)
    except ApiStatusError as error:
        return str(error)
    return ""


def blamed(path: str) -> str:
    """The path that a message names for a change."""
    return (
        "spec.placement.accelerator"
        if path == "placement.accelerator"
        else f"spec.{path.split('.', maxsplit=1)[0]}"
    )


def expected(state: str, path: str, value: object) -> str:
    """What the answer must hold; empty for a change that is taken."""
    if state in ("new", "queued") or (path, value) in ANY_TIME:
        return ""
    if (path, value) in TRAINED:
        return "can't change once the job has started, since it is what is trained"
    return (
        ""
        if state in ("suspended", "failed")
        else "can change only while the job is suspended or has failed"
    )


def _id(part: object) -> str:
    return "removed" if part is REMOVE else str(part)[:40]


@pytest.mark.parametrize(
    "state",
    [pytest.param(name, marks=() if name in EACH_FIELD else pytest.mark.slow) for name in STATES],
    indirect=True,
)
@pytest.mark.parametrize(("path", "value"), TRAINED + STOPPED + ANY_TIME, ids=_id)
def test_every_field_changes_only_when_it_may(
    api: ApiClient, state: str, path: str, value: object
) -> None:
    answer, wanted = change(api, state, (path, value)), expected(state, path, value)
    assert wanted in answer
    assert bool(wanted) == bool(answer), answer
    if wanted:
        assert blamed(path) in answer.partition(wanted)[2]


def test_all_wrong_fields_are_named_at_once(api: ApiClient, state: str) -> None:
    answer = change(
        api, state, ("model.name", "other"), ("training.beta", 0.5), ("image", "trainer:2")
    )
    assert ("spec.model spec.training;" in answer) == (state not in ("new", "queued")), answer
    answer = change(api, state, ("image", "trainer:2"), ("guard.maxKL", 3), ("restarts.limit", 5))
    wanted = expected(state, "image", "trainer:2")
    assert (f"{wanted}: spec.image spec.guard; set spec.suspend to true first" in answer) == bool(
        wanted
    ), answer


@pytest.mark.parametrize(
    "status",
    [None, {"attempt": 0}, {"conditions": []}, {"attempt": 9, "restarts": 9}],
    ids=["null", "zero", "no-conditions", "other"],
)
def test_a_status_in_the_request_gets_nobody_round_it(
    api: ApiClient, state: str, status: object
) -> None:
    answer = change(api, state, ("training.beta", 0.5), status=status)
    assert ("since it is what is trained: spec.training" in answer) == (
        state not in ("new", "queued")
    )


def test_several_random_changes_are_judged_as_each_alone(
    api: ApiClient, state: str, chance: Any
) -> None:
    for _ in range(6):
        picked = chance.sample(TRAINED + STOPPED + ANY_TIME, chance.randint(2, 5))
        paths = [path for path, _ in picked]
        if any(a != b and a.startswith(b.split(".")[0]) for a in paths for b in paths):
            continue
        answer = change(api, state, *picked)
        wanted = {expected(state, *one) for one in picked} - {""}
        trained = [one for one in wanted if "what is trained" in one]
        assert bool(answer) == bool(wanted), (picked, answer)
        assert all(one in answer for one in trained or wanted), (picked, answer)


def test_metadata_changes_in_every_state(api: ApiClient, state: str) -> None:
    assert (
        change(
            api,
            state,
            metadata=api.get(f"{GRPOJOBS.format('default')}/{state}")["metadata"] | LABELLED,
        )
        == ""
    )


def test_no_field_is_forgotten() -> None:
    named = {path.split(".")[0] for path, _ in TRAINED + STOPPED + ANY_TIME} | set(NEVER)
    assert named >= {field.alias for field in GRPOJobSpec.model_fields.values()}
    assert {path.split(".")[0] for path, _ in STOPPED} == {*WHILE_STOPPED, "model"}
    assert {path.split(".")[0] for path, _ in ANY_TIME} == set(ALWAYS)


def test_who_manages_a_job_is_fixed_from_its_creation(api: ApiClient, state: str) -> None:
    assert "can't change" in change(api, state, ("managedBy", "example.com/dispatcher"))


@pytest.fixture
def started(crd_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """The API server with a GRPOJob `started` whose second attempt has been committed."""
    crd_cluster.kubectl("create", "-f", "-", input=json.dumps(job("started", SPEC)))
    patch(crd_cluster, {"status": {"attempt": 2, "restarts": 1}}, "--subresource=status")
    yield crd_cluster
    crd_cluster.kubectl("delete", "grpojob", "started")


def patch(server: AnyCluster, change: dict[str, Any], *flags: str) -> str:
    return server.kubectl(
        "patch", "grpojob", "started", "--type=merge", "-p", json.dumps(change), *flags
    )


@pytest.mark.parametrize(
    "status", [{"attempt": 1}, {"attempt": None}, None], ids=["lower", "removed", "no-status"]
)
def test_the_attempt_never_goes_back(started: AnyCluster, status: object) -> None:
    with pytest.raises(CommandError) as caught:
        patch(started, {"status": status}, "--subresource=status")
    assert "status.attempt" in caught.value.stderr
    assert "may only grow" in caught.value.stderr
    patch(started, {"status": {"attempt": 3}}, "--subresource=status")


def test_a_write_of_the_status_changes_no_spec(api: ApiClient, state: str) -> None:
    """The rule does not look at the spec then."""
    path = f"{GRPOJOBS.format('default')}/{state}"
    before = api.get(path)["spec"]
    sent = {"spec": {"training": {"beta": 0.5}, "image": "trainer:2"}, "status": {"restarts": 5}}
    found = api.request("PATCH", f"{path}/status?dryRun=All", sent, MERGE)
    assert found["status"]["restarts"] == 5
    assert found["spec"] == before


def test_a_status_that_kueue_copies_from_another_cluster_may_begin_anew(
    crd_cluster: AnyCluster,
) -> None:
    copied = job("started", {**SPEC, "managedBy": "kueue.x-k8s.io/multikueue"})
    crd_cluster.kubectl("create", "-f", "-", input=json.dumps(copied))
    try:
        for attempt in (2, 1, None):
            patch(crd_cluster, {"status": {"attempt": attempt}}, "--subresource=status")
    finally:
        crd_cluster.kubectl("delete", "grpojob", "started")


def test_a_retry_counter_never_goes_back(api: ApiClient, state: str) -> None:
    path = f"{GRPOJOBS.format('default')}/{state}"
    api.request("PATCH", path, {"spec": {"retry": 3}}, MERGE)
    assert change(api, state, ("retry", 4)) == ""
    for lower in (2, REMOVE):
        assert "can't be lowered" in change(api, state, ("retry", lower))
