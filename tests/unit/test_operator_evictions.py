"""A kubelet evicts a pod for memory or disk: the end teaches, names the field, and repeats no plan
more than once.

The texts are made as pkg/kubelet/eviction/helpers.go of Kubernetes 1.36 makes them.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.text.contract import SHARED_MEMORY_VOLUME
from grpo_api.text.quantity import format_bytes
from grpo_kube.objects.json_reader import JsonObject
from grpo_operator.admission.resume_plan import learning, reuse_plan
from grpo_operator.decide.decisions import Action
from grpo_operator.decide.observation import Observation
from grpo_operator.records.terminations import pod_termination
from tests.unit.operator_world import (
    active_status,
    judged,
    make_child,
    make_job,
    make_pod,
    make_seen,
    said,
    terminated,
)
from tests.unit.test_operator_replanning import SPEC, THERE, first_plan

BY_KUBELET = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
LIMIT_OF_VOLUME = 'Usage of EmptyDir volume "scratch-2" exceeds the limit "1Gi". '
LIMIT_OF_CONTAINER = 'Container trainer exceeded its local ephemeral storage limit "5Gi". '
LIMIT_OF_POD = (
    "Pod ephemeral local storage usage exceeds the total limit of containers 5368709120. "
)
REFUSED = "The node had condition: [MemoryPressure DiskPressure]. "


def low_on(resource: str, usages: dict[str, int] | None = None, pod: int = 0) -> str:
    """The kubelet's message; `usages` are bytes by container, `pod` those of pod-level requests."""
    text = f"The node was low on resource: {resource}. "
    text += "Threshold quantity: 100Mi, available: 52164Ki. "
    if pod:
        text += f"Pod run-1-0 was using {pod // 1024}Ki, request is 1Gi, has larger consumption of "
        text += f"{resource}. "
    for name, used in (usages or {}).items():
        text += f"Container {name} was using {used // 1024}Ki, request is 1Gi, has larger "
        text += f"consumption of {resource}. "
    return text


STATES: dict[str, dict[str, Any]] = {
    "killed": terminated(137),
    "stopped with a word": terminated(143, said("Preempted", step=7)),
    "never ran": {},
}
MEMORY = [
    low_on("memory"),
    low_on("memory", {"trainer": 3 << 30}),
    low_on("memory", {"sidecar": 3 << 30}),
    low_on("memory", pod=3 << 30),
]
DISK = [
    low_on("ephemeral-storage"),
    low_on("ephemeral-storage", {"trainer": 3 << 30}),
    low_on("inodes"),
    LIMIT_OF_VOLUME,
    LIMIT_OF_CONTAINER,
    LIMIT_OF_POD,
]
OTHERS = [low_on("pids"), REFUSED, "", "Pod was terminated in response to imminent node shutdown."]


def evicted(message: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    status = {"phase": "Failed", "reason": "Evicted", "message": message, **more}
    if state:
        status["containerStatuses"] = [{"name": "trainer", "state": state}]
    return status


@pytest.mark.parametrize("conditions", [[], [BY_KUBELET]], ids=["limit", "pressure"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_each_text_of_the_kubelet_has_its_result(
    state: dict[str, Any], conditions: list[Any]
) -> None:
    expected = [("OutOfMemory", MEMORY), ("OutOfDisk", DISK), ("", OTHERS)]
    for result, messages in expected:
        for message in messages:
            end = pod_termination(JsonObject(evicted(message, state, conditions=conditions)))
            assert end is not None
            if not result:
                assert end.outcome.result not in ("OutOfMemory", "OutOfDisk"), message
                continue
            assert (end.outcome.result, end.disrupted) == (result, False), message
            assert message.strip()[:60] in end.outcome.message
            assert "Evicted" in end.reasons


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (LIMIT_OF_VOLUME, "emptyDir.sizeLimit of the volume scratch-2"),
        (LIMIT_OF_VOLUME.replace("scratch-2", SHARED_MEMORY_VOLUME), "spec.sharedMemory"),
        (LIMIT_OF_CONTAINER, "spec.resources.limits.ephemeral-storage"),
        (LIMIT_OF_POD, "spec.resources.limits.ephemeral-storage"),
        (low_on("ephemeral-storage"), "spec.resources.requests.ephemeral-storage"),
    ],
)
def test_a_shortage_of_disk_names_the_field_to_raise(message: str, field: str) -> None:
    end = pod_termination(JsonObject(evicted(message, terminated(137))))
    assert end is not None
    assert field in end.outcome.message.rpartition("Raise")[2]


@given(used=st.integers(1 << 20, 1 << 45))
def test_the_memory_that_the_container_used_is_read(used: int) -> None:
    used = used // 1024 * 1024
    end = pod_termination(JsonObject(evicted(low_on("memory", {"trainer": used}), {})))
    assert end is not None
    assert end.outcome.shortage is not None
    assert end.outcome.shortage.allocated_bytes == used


@given(message=st.text(max_size=200), word=st.sampled_from(["", "low on resource: memory", "Pod "]))
def test_any_text_of_a_kubelet_gives_an_end(message: str, word: str) -> None:
    end = pod_termination(JsonObject(evicted(word + message, {})))
    assert end is not None


@pytest.mark.parametrize("result", ["Succeeded", "BadInput", "OutOfMemory"])
def test_a_trainer_that_says_its_own_end_is_believed(result: str) -> None:
    state = terminated(0, said(result))
    end = pod_termination(JsonObject(evicted(low_on("ephemeral-storage"), state)))
    assert end is not None
    assert end.outcome.result == result


def evicted_gang(
    message: str, attempt: int = 1, spec: dict[str, Any] | None = None, **status: Any
) -> Observation:
    """A gang of one pod on GPUs that its kubelet has evicted."""
    plan = status.pop("plan", None) or first_plan()
    job = make_job({**SPEC, **(spec or {})}, active_status(attempt, plan, **status))
    pod = make_pod(0, attempt, terminated(137), phase="Failed", reason="Evicted", message=message)
    return make_seen(job, make_child(attempt), pod)


def test_after_an_eviction_for_memory_the_next_plan_requests_more() -> None:
    before = first_plan().host_memory_bytes
    used = before + (1 << 30)
    seen = evicted_gang(low_on("memory", {"trainer": used}))
    decision = judged(seen)
    assert (decision.action, decision.reason, decision.counted) == (
        Action.ADMIT,
        "OutOfMemory",
        True,
    )
    assert decision.learned is not None
    answer = reuse_plan(learning(seen.job, decision.learned), THERE)
    assert answer is not None
    assert answer.chosen is not None
    assert answer.chosen.host_memory_bytes > used
    asked = format_bytes(answer.chosen.host_memory_bytes)
    assert "of host memory per pod instead of" in answer.chosen.changes[-1], asked


def test_a_request_of_the_spec_is_tried_twice_and_then_the_end_says_what_to_set() -> None:
    spec = {"resources": {"requests": {"memory": "64Gi"}}, "restarts": {"limit": 9}}
    first = judged(evicted_gang(low_on("memory", {"trainer": 65 << 30}), spec=spec))
    assert first.action is Action.ADMIT
    assert first.learned is not None
    learned = json.loads(first.learned.model_dump_json(by_alias=True, exclude_none=True))
    message = low_on("memory", {"trainer": 66 << 30})
    second = judged(evicted_gang(message, attempt=2, spec=spec, learned=learned))
    assert (second.action, second.reason) == (Action.FAIL, "OutOfMemory")
    assert second.message.startswith("out of memory after the same plan twice, the last Full DDP")
    assert ": the kubelet evicted" in second.message
    assert "set spec.resources.limits.memory and requests to it" in second.message


def test_a_shortage_of_disk_is_tried_twice() -> None:
    spec = {"restarts": {"limit": 9}}
    first = judged(evicted_gang(LIMIT_OF_CONTAINER, spec=spec))
    assert (first.action, first.reason, first.counted) == (Action.ADMIT, "OutOfDisk", True)
    end = {"attempt": 1, "reason": "OutOfDisk", "counted": True, "endTime": "2026-11-21T11:00:00Z"}
    second = judged(evicted_gang(LIMIT_OF_CONTAINER, attempt=2, spec=spec, ends=[end]))
    assert (second.action, second.reason) == (Action.FAIL, "OutOfDisk")
    assert "out of disk twice in a row" in second.message
    assert "spec.resources.limits.ephemeral-storage" in second.message
    assert "spec.model.cache" in second.message


def test_the_users_rule_for_evictions_comes_first() -> None:
    rules = [{"action": "RestartUncounted", "onReasons": ["Evicted"]}]
    end = {"attempt": 1, "reason": "OutOfDisk", "counted": True, "endTime": "2026-11-21T11:00:00Z"}
    spec = {"restarts": {"rules": rules}}
    decision = judged(evicted_gang(LIMIT_OF_CONTAINER, attempt=2, spec=spec, ends=[end]))
    assert (decision.action, decision.counted) == (Action.ADMIT, False)
