"""A small world for the operator's unit tests: API objects as the server would send them, and what
is seen of them.

A test states only what it is about. Everything goes through the real record parsers.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import Outcome, Progress
from grpo_api.spec.generation import EnginePlan
from grpo_api.status.status import GRPOJobStatus
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, seconds, timestamp
from grpo_operator.decide.decisions import Decision, Limits
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation, Pull, Silence, observe
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.names import (
    ANNOTATION_SPEC,
    ANNOTATION_WORKLOAD,
    COMPONENT_ENGINE,
    COMPONENT_TRAINER,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_CONTROLLER,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_UID,
    engine_job,
)
from grpo_operator.records.parsing import grpojob_record, job_record, pod_record
from grpo_operator.records.records import GRPOJobRecord, JobRecord, PodRecord
from grpo_operator.report.status import build_status, to_json

NOW = seconds("2026-11-21T12:00:00Z") or 0.0
KEY = ObjectKey("team-a", "run")
UID = "uid-of-run"
LIMITS = Limits()
PODS = PodDefaults(image="trainer:1")

Thing = JobRecord | PodRecord

SPEC: dict[str, Any] = {
    "model": {"name": "/models/tiny", "parameters": "77K"},
    "dataset": {"name": "x/y"},
    "rewards": [{"format": {"pattern": "a.*"}}],
    "placement": {"accelerator": "CPU", "nodes": 2},
}

PLAN = ExecutionPlan(
    strategy="Clone",
    method="Full",
    accelerator="CPU",
    nodes=2,
    micro_batch=1,
    gradient_accumulation=1,
    steps_per_generation=1,
    dtype="float32",
    save_every_steps=10,
    reason="two nodes",
)

GPU_PLAN = PLAN.model_copy(
    update={
        "accelerator": "GPU",
        "gpus": 8,
        "nodes": 2,
        "gpus_per_node": 4,
        "processes_per_node": 4,
        "gpu_product": "NVIDIA-H100-80GB-HBM3",
        "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "host_memory_bytes": 2**30,
    }
)

ENGINE = EnginePlan(
    kind="Servers", replicas=2, gpus_per_replica=0, memory_share=0.4, max_model_length=64,
    max_sequences=8,
    host_memory_bytes=2**30,
)  # fmt: skip
GPU_ENGINE = ENGINE.model_copy(
    update={
        "gpus_per_replica": 2,
        "tensor_parallel": 2,
        "gpu_product": "NVIDIA-L4",
        "gpu_hour_price": 0.5,
        "node_selector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    }
)
SERVED_PLAN = PLAN.model_copy(update={"engine": ENGINE})
SERVED_GPU_PLAN = GPU_PLAN.model_copy(update={"engine": GPU_ENGINE})


def at(offset: float) -> str:
    """The timestamp `offset` seconds after NOW."""
    return timestamp(NOW + offset)


def condition(
    kind: str, status: str = "True", reason: str = "Because", since: float = -60
) -> dict[str, Any]:
    """A condition of a GRPOJob, as stored."""
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": at(since),
    }


def job_object(
    spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    """A GRPOJob as the API server sends it; `spec` is merged into SPEC one level deep, `meta` into
    its metadata."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in SPEC.items()}
    for key, value in (spec or {}).items():
        merged[key] = {**merged[key], **value} if isinstance(merged.get(key), dict) else value
    metadata = {
        "namespace": KEY.namespace,
        "name": KEY.name,
        "uid": UID,
        "resourceVersion": "10",
        "generation": 1,
        "creationTimestamp": at(-3600),
        **meta,
    }
    return {"metadata": metadata, "spec": merged, "status": status or {}}


def make_job(
    spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **meta: Any
) -> GRPOJobRecord:
    """The record of job_object."""
    return grpojob_record(job_object(spec, status, **meta))


def active_status(
    attempt: int = 1, plan: ExecutionPlan = PLAN, running: bool = True, **more: Any
) -> dict[str, Any]:
    """The status of a job whose attempt was admitted a minute ago and has its Job."""
    return {
        "attempt": attempt,
        "plan": plan.model_dump(mode="json", by_alias=True, exclude_none=True),
        "attemptStartTime": at(-60),
        "startTime": at(-60),
        "jobUid": f"job-{attempt}",
        "conditions": [
            condition("Admitted", reason="Admitted"),
            condition("Running", str(running)),
        ],
        **more,
    }


def make_child(attempt: int = 1, owner: str = UID, **more: Any) -> JobRecord:
    """The record of child_object."""
    return job_record(child_object(attempt, owner, **more))


def child_object(attempt: int = 1, owner: str = UID, **more: Any) -> dict[str, Any]:
    """The Indexed Job of an attempt; keywords: created, deleting, ended, ended_at, spent, uid,
    job, name, suspended, workload (empty: the operator admitted it, and not Kueue), version (of
    the spec)."""
    ended = more.get("ended")
    status: dict[str, Any] = {"startTime": at(-50)} | (
        {"failedIndexes": more["spent"]} if "spent" in more else {}
    )
    if ended:
        over = {"type": ended, "status": "True", "reason": more.get("reason", "")}
        status["conditions"] = [
            over | ({"lastTransitionTime": at(more["ended_at"])} if "ended_at" in more else {})
        ]
    job = more.get("job", KEY.name)
    name = more.get("name", f"{job}-{attempt}")
    meta: dict[str, Any] = {
        "namespace": KEY.namespace,
        "name": name,
        "uid": more.get("uid", f"job-{attempt}"),
        "resourceVersion": "11",
        "creationTimestamp": at(more.get("created", -50)),
        "labels": {LABEL_JOB: job, LABEL_UID: owner, LABEL_ATTEMPT: str(attempt)},
        "ownerReferences": [{"controller": True, "uid": owner}],
    }
    if more.get("version"):
        meta["annotations"] = {ANNOTATION_SPEC: more["version"]}
    if more.get("deleting"):
        meta["deletionTimestamp"] = at(0)
    annotations = {ANNOTATION_WORKLOAD: more.get("workload", "run")}
    template = {"metadata": {"annotations": annotations}}
    spec = {"template": template, "suspend": more.get("suspended", False)}
    return {"metadata": meta, "spec": spec, "status": status}


def terminated(code: int, message: str = "", reason: str = "", clock: float = 0) -> dict[str, Any]:
    """A container state: ended, says a kubelet whose clock is off by so many seconds."""
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": message,
            "finishedAt": at(clock),
        }
    }


def said(result: str, **more: Any) -> str:
    """A termination message with an Outcome."""
    return Outcome.model_validate({"result": result, **more}).model_dump_json()


def make_pod(
    index: int = 0, attempt: int = 1, state: dict[str, Any] | None = None, **more: Any
) -> PodRecord:
    """The record of pod_object."""
    return pod_record(pod_object(index, attempt, state, **more))


def pod_object(
    index: int = 0, attempt: int = 1, state: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A pod; without `state` it runs. Keywords: phase, node, deleted, conditions, reason,
    message, owner, by (empty: an orphan; None: made by hand), arrived (at its kubelet, by that
    one's clock)."""
    state = {"running": {}} if state is None else state
    phase = more.get("phase")
    ended = state.get("terminated")
    if phase is None and ended:
        phase = "Failed" if ended["exitCode"] else "Succeeded"
    elif phase is None:
        phase = "Running"
    owner = more.get("owner", UID)
    meta: dict[str, Any] = {
        "namespace": KEY.namespace,
        "name": more.get("name", f"{KEY.name}-{attempt}-{index}-abcde"),
        "uid": more.get("uid", f"pod-{attempt}-{index}"),
        "resourceVersion": "12",
        "labels": {
            LABEL_JOB: KEY.name,
            LABEL_UID: owner,
            LABEL_ATTEMPT: str(attempt),
            LABEL_INDEX: str(index),
            LABEL_COMPONENT: more.get("component", COMPONENT_TRAINER),
        },
    }
    by = more.get("by", f"job-{attempt}")
    if by is not None:
        meta["labels"][LABEL_CONTROLLER] = f"job-{attempt}"
    if by:
        meta["ownerReferences"] = [{"controller": True, "uid": by}]
    if more.get("deleted"):
        meta |= {"deletionTimestamp": at(0), "deletionGracePeriodSeconds": 30}
    status: dict[str, Any] = {
        "phase": phase,
        "podIP": "10.0.0.7",
        "conditions": more.get("conditions", []),
    }
    if state:
        status["containerStatuses"] = [{"name": "trainer", "state": state}]
    if "arrived" in more:
        status["startTime"] = at(more["arrived"])
    status |= {name: more[name] for name in ("reason", "message") if name in more}
    node = more.get("node", f"node-{index}")
    return {"metadata": meta, "spec": {"nodeName": node}, "status": status}


def make_engines(attempt: int = 1, **more: Any) -> JobRecord:
    """The Job of an attempt's engines; keywords as of make_child."""
    return make_child(attempt, name=engine_job(KEY.name, attempt), uid=f"engines-{attempt}", **more)


def make_engine(
    index: int = 0, attempt: int = 1, state: dict[str, Any] | None = None, **more: Any
) -> PodRecord:
    """An engine's pod; `life` tells several of one index apart, other keywords are those of
    make_pod."""
    name = f"{engine_job(KEY.name, attempt)}-{index}-{more.pop('life', 'abcde')}"
    more = {"by": f"engines-{attempt}", "node": f"engine-{index}", **more}
    return make_pod(
        index, attempt, state, component=COMPONENT_ENGINE, name=name, uid=f"pod-{name}", **more
    )


TRAINERS: tuple[Thing, ...] = (make_child(), make_pod(0), make_pod(1))
KILLED = terminated(137, reason="OOMKilled")


def make_seen(
    job: GRPOJobRecord,
    *things: Thing,
    pull: Pull | None = None,
    silence: Silence | None = None,
    now: float = NOW,
    ago: float = 10,
) -> Observation:
    """What the operator sees of a job and its children, all of which it first saw so many seconds
    ago."""
    return make_story(job, (ago, things), now=now, pull=pull, silence=silence)


def make_story(
    job: GRPOJobRecord,
    *looks: tuple[float, Iterable[Thing]],
    pull: Pull | None = None,
    silence: Silence | None = None,
    now: float = NOW,
) -> Observation:
    """What is seen now, after looks so many seconds ago; the last look's things are those of now,
    too."""
    first_seen_tracker = FirstSeenTracker()
    for ago, things in (*looks, (0.0, looks[-1][1])):
        children = [thing for thing in things if isinstance(thing, JobRecord)]
        pods = [thing for thing in things if isinstance(thing, PodRecord)]
        seen = observe(
            job,
            children,
            pods,
            now=now - ago,
            at=Observed(NOW - ago),
            first_seen_tracker=first_seen_tracker,
        )
    current = pull if pull and pull.progress.attempt == job.status.attempt else None
    return replace(seen, pull=current, silence=silence)


def running(*things: Thing, ago: float = 10, **status: Any) -> Observation:
    """What is seen of an active job of two pods; without further arguments both run."""
    things = things or (make_pod(0), make_pod(1))
    child = () if any(isinstance(thing, JobRecord) for thing in things) else (make_child(),)
    return make_seen(make_job(status=active_status(**status)), *child, *things, ago=ago)


def judged(observation: Observation, limits: Limits = LIMITS) -> Decision:
    """What the policies decide."""
    return decide(observation, limits)


def make_pull(ago: float = 1, attempt: int = 1, still: float = 1, **more: Any) -> Pull:
    """An answer of rank 0, `ago` seconds old, whose step and stage were first seen `still` seconds
    ago."""
    progress = Progress(attempt=attempt, last_step_time=NOW - 1, **more)
    return Pull(progress, Observed(NOW - ago), Observed(NOW - still))


def after(observation: Observation, decision: Decision) -> GRPOJobStatus:
    """The status that the decision leads to."""
    return build_status(observation, decision)


def stored(job: GRPOJobRecord, status: GRPOJobStatus, **edit: Any) -> GRPOJobRecord:
    """The job as it is after the status was written, and after an edit of its spec; None removes a
    field."""
    spec = (
        {}
        if job.spec is None
        else job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    spec |= edit
    spec = {name: value for name, value in spec.items() if value is not None}
    return make_job(spec, to_json(status), generation=job.generation + bool(edit))


def of_type(status: GRPOJobStatus, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    found = next(c for c in status.conditions if c.type == kind)
    return found.status, found.reason, found.message
