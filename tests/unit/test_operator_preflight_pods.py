"""The Job of a preflight: what its pod has of the gang's, and which changes call for another."""

import json
from dataclasses import replace
from typing import Any

import pytest

from grpo_api.effective_spec import applied_class
from grpo_api.pods.platform import PlatformSpec
from grpo_api.text.contract import PLAN_ANNOTATION
from grpo_operator.admission.scheduler import Verdict, hold_until_checked
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.pods.pod_volumes import claims_of_pod
from grpo_operator.pods.preflight_job import preflight_digest, preflight_job
from grpo_operator.records.job_class import JobClasses, with_class
from grpo_operator.records.names import COMPONENT_PREFLIGHT, LABEL_COMPONENT
from grpo_operator.report.status import build_status, to_json
from tests.unit.operator_world import (
    GPU_PLAN,
    active_status,
    condition,
    make_seen,
    terminated,
)
from tests.unit.test_operator_evictions import DISK, MEMORY
from tests.unit.test_operator_preflight import (
    EVICTED,
    GPUS,
    ON,
    a_pod,
    child,
    digest_of,
    evicted,
    gpu_job,
    look,
    reported,
    seen,
)


@pytest.mark.parametrize(
    ("spec", "is_same"),
    [
        ({"suspend": True}, True),
        ({"restarts": {"limit": 9}}, True),
        ({"preflight": "Required"}, True),
        ({"placement": {"gpus": {"min": 4}}}, True),
        ({"resources": {"requests": {"memory": "9Gi"}}}, True),
        ({"dataset": {"name": "x/z"}}, False),
        ({"image": "mine:1"}, False),
        ({"placement": {"nodeSelector": {"a": "b"}}}, False),
        ({"env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}]}, False),
    ],
)
def test_only_what_is_checked_calls_for_another_check(spec: dict[str, Any], is_same: bool) -> None:
    assert (digest_of(gpu_job()) == digest_of(gpu_job(**spec))) is is_same


@pytest.mark.parametrize(
    ("platform", "is_same"),
    [
        ({"volumes": [{"name": "ca", "configMap": "proxy", "mountPath": "/etc/ca"}]}, False),
        ({"securityContext": {"runAsUser": 5}}, False),
        ({"resources": {"limits": {"rdma/hca": "1"}}, "gpuHourPrices": {"NVIDIA-L4": 1}}, True),
    ],
)
def test_what_a_class_gives_the_pod_calls_for_another_check(
    platform: dict[str, Any], is_same: bool
) -> None:
    """Such as the certificates of a proxy, by which the hub is reached."""
    spec = gpu_job().valid_spec
    given = spec.on_platform(PlatformSpec.model_validate(platform))
    digests = {preflight_digest(each, "trainer:1") for each in (spec, given)}
    assert (len(digests) == 1) is is_same


def test_what_has_passed_is_not_checked_again_while_its_class_is_away() -> None:
    """Such as a class that is replaced, or that nobody may list for a moment."""
    classes = JobClasses(by_name={"h100": applied_class("h100", 1, {"fixed": {"image": "x:1"}})})
    status: dict[str, Any] = {}
    for reported_by, known_classes in ((True, classes), (False, JobClasses()), (False, classes)):
        job = with_class(gpu_job(status, jobClassName="h100"), known_classes)
        things = (child(job), reported()) if reported_by else ()
        preflight = look(job, *things)
        assert preflight.check.has_passed
        status = to_json(
            build_status(seen(job, preflight), Decision(Action.QUEUE, "WaitingForGPUs"))
        )
    assert status["preflight"]["tries"] == 1


def job_body(unbound: Any = (), **spec: Any) -> dict[str, Any]:
    job = gpu_job(**spec)
    return preflight_job(job, job.valid_spec, None, ON, unbound)


@pytest.mark.parametrize(
    ("built_for", "image", "selected"),
    [
        (("amd64",), None, "amd64"),
        (("amd64", "arm64"), None, None),
        ((), None, None),
        (("amd64",), "own:1", None),
    ],
)
def test_it_goes_to_nodes_that_the_trainer_s_image_is_built_for(
    built_for: tuple[str, ...], image: str | None, selected: str | None
) -> None:
    """Beside x86 nodes with GPUs a cluster may have arm64 nodes without, which can't pull it."""
    job = gpu_job(image=image, placement={"nodeSelector": {"pool": "a"}})
    body = preflight_job(job, job.valid_spec, None, replace(ON, architectures=built_for))
    selector = body["spec"]["template"]["spec"]["nodeSelector"]
    assert (selector["pool"], selector.get("kubernetes.io/arch")) == ("a", selected)


CLAIMS: dict[str, Any] = {
    "checkpoint": {"volumeClaimTemplate": {"size": "1Gi"}},
    "model": {**GPUS["model"], "cache": {"claimName": "hub"}},
}


def test_its_pod_is_the_gang_s_without_gpus_and_without_what_makes_it_one_of_the_gang() -> None:
    init = {"name": "get", "resources": {"requests": {"cpu": "64"}}}
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"initContainers": [init]}}
    body = job_body(podTemplate=template, **CLAIMS)
    pod = body["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "grpo_trainer.preflight"]
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "2Gi"},
        "limits": {"cpu": "2", "memory": "4Gi"},
    }
    assert "ports" not in container
    (init_container,) = pod["spec"]["initContainers"]
    assert init_container["resources"] == container["resources"]
    labels = pod["metadata"]["labels"]
    assert labels["team"] == "a"
    assert labels["app.kubernetes.io/managed-by"] == "grpo-operator"
    assert labels[LABEL_COMPONENT] == COMPONENT_PREFLIGHT
    assert not {"grpo.dev/job-uid", "grpo.dev/attempt"} & labels.keys()
    assert not any(key.startswith("kueue") for key in (*labels, *body["metadata"]["labels"]))
    assert body["metadata"]["ownerReferences"][0]["uid"] == "uid-of-run"
    assert claims_of_pod(pod["spec"]) == ["hub", "run-checkpoints"]
    plan = json.loads(pod["metadata"]["annotations"][PLAN_ANNOTATION])
    assert plan["checkpointDirectory"].startswith("/checkpoints/run-")


def test_a_claim_without_a_volume_is_not_bound_to_the_node_of_the_preflight() -> None:
    body = job_body({"hub", "run-checkpoints"}, **CLAIMS)
    assert claims_of_pod(body["spec"]["template"]["spec"]) == []
    plan = json.loads(body["spec"]["template"]["metadata"]["annotations"][PLAN_ANNOTATION])
    assert "checkpointDirectory" not in plan


@pytest.mark.parametrize(
    ("named", "scheduler"), [("volcano", "volcano"), (None, "default-scheduler")]
)
def test_a_pod_that_no_scheduler_reports_on_blocks_its_preflight(
    named: str | None, scheduler: str
) -> None:
    """The gang's pods would hold GPUs for as long as they may wait for their nodes."""
    job = gpu_job(**({"podTemplate": {"spec": {"schedulerName": named}}} if named else {}))
    pod = a_pod({}, phase="Pending", node="")
    assert look(job, child(job), pod, ago=59).check.reason == "Checking"
    check = look(job, child(job), pod, ago=61).check
    assert (check.reason, check.status.given_up) == ("PreflightBlocked", False)
    assert (
        f"scheduler {scheduler} has not reported on pod {pod['metadata']['name']}" in check.message
    )
    made_again = look(job, child(job), evicted(0), pod, ago=61).check
    assert made_again.reason == "Checking"


ENDS = {
    "its memory limit": a_pod(terminated(137, reason="OOMKilled")),
    **{
        text: a_pod(terminated(137), phase="Failed", reason="Evicted", message=text)
        for text in (*MEMORY, *DISK)
    },
}


@pytest.mark.parametrize("mode", ["Auto", "Required"])
@pytest.mark.parametrize("pod", ENDS.values(), ids=ENDS.keys())
def test_what_an_end_advises_for_the_gang_s_pods_is_not_advised_for_those_of_a_preflight(
    pod: dict[str, Any], mode: str
) -> None:
    job = gpu_job(preflight=mode)
    cause = look(job, child(job, ended="Failed"), pod).check.status.cause
    assert cause.startswith("the preflight ended without a report: the k")
    assert "spec.resources" not in cause


def test_a_check_that_fails_beside_an_injected_container_is_over() -> None:
    """Its pod runs on, so that its Job has no end, until its deadline of half an hour."""
    job = gpu_job()
    proxy = {"name": "proxy", "state": {"running": {}}}
    for state, disruption, reason in (
        (terminated(1, "No module named grpo_trainer.preflight"), [], "NotChecked"),
        (terminated(143), [EVICTED], "Checking"),
    ):
        pod = a_pod(state, phase="Running", conditions=disruption)
        pod["status"]["containerStatuses"].append(proxy)
        assert look(job, child(job), pod).check.reason == reason


@pytest.mark.parametrize(
    ("reason", "is_checked_again"),
    [("WaitingForHub", True), ("StartTimeout", True), ("SchedulingTimeout", False)],
)
def test_a_gang_that_met_what_a_preflight_meets_is_checked_before_it_holds_gpus_again(
    reason: str, is_checked_again: bool
) -> None:
    job = gpu_job()
    known = {"digest": digest_of(job), "tries": 1, "jobUid": "preflight-1", "report": {}}
    status = active_status(plan=GPU_PLAN, preflight=known)
    status["conditions"].append(condition("Checked", reason="Passed") | {"observedGeneration": 1})
    released = build_status(
        make_seen(gpu_job(status)), Decision(Action.RELEASE, reason, "it was released")
    )
    again = gpu_job(to_json(released))
    check = look(again).check
    assert (check.reason == "Checking") is is_checked_again
    paused = build_status(seen(again, look(again)), Decision(Action.WAIT))
    fits = Verdict(generation=1, plan=GPU_PLAN, admitted=True)
    held = hold_until_checked(gpu_job(to_json(paused)), fits, preflight=True)
    assert held.admitted is not is_checked_again
