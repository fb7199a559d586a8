"""What is seen of jobs from their first look to their last: one group of sentences per file."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.golden import render
from tests.unit.operator_world import (
    GPU_PLAN,
    KILLED,
    NOW,
    SERVED_PLAN,
    TRAINERS,
    active_status,
    at,
    condition,
    make_child,
    make_engine,
    make_engines,
    make_job,
    make_pod,
    make_pull,
    make_seen,
    make_story,
    running,
    said,
    terminated,
)

Group = dict[str, Any]
"""What is seen, by a sentence about it."""
UNBOUND = [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]
BOUND = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(-50)}]
LOST = [{"type": "Ready", "status": "False"}]
TARGET = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]
QUOTA = 'FailedCreate: Error creating: pods "run-1-0-" is forbidden: exceeded quota: gpus'
HASH = f"sha256:{'0' * 64}"
CLAIM = {"checkpoint": {"volume": {"claimName": "runs", "subPath": "team"}, "everySteps": 10}}
CHECKPOINT = {
    "step": 40,
    "time": NOW - 100,
    "bytes": 2**30,
    "where": "/checkpoints/run-uid-of-run/attempt-1/step-40",
}
CLOCK = {"loading": 20, "proving": 2, "generating": 60, "scoring": 10, "training": 50, "saving": 5}
METRICS: dict[str, Any] = {
    "kl": 0.0132,
    "reward": 1.84,
    "loss": 0.02,
    "prompts": 990,
    "prompts_dropped": 110,
}
REVISIONS = {"model": "a" * 40, "dataset.fingerprint": "b" * 64}
GPU_JOB: dict[str, Any] = {"placement": {"accelerator": "GPU", "nodes": 2}, **CLAIM}
TELLS: dict[str, Any] = {
    "step": 50,
    "total_steps": 100,
    "stage": "Training",
    "seconds_per_step": 2.5,
    "metrics": METRICS,
    "memory": {"forward": 4 * 2**30, "device": 6 * 2**30, "host": 2 * 2**30},
    "revisions": REVISIONS,
    "checkpoint": CHECKPOINT,
    "account": {"clock": CLOCK, "sealed": CLOCK},
}


def _pending(index: int, **more: Any) -> Any:
    return make_pod(index, state={}, phase="Pending", **{"node": "", "conditions": UNBOUND, **more})


def _creating(index: int, reason: str = "ContainerCreating") -> Any:
    return make_pod(
        index, state={"waiting": {"reason": reason, "message": "back-off"}}, phase="Pending"
    )


def _starting(*pods: Any, ago: float = 10, spec: Any = None, **status: Any) -> Any:
    """Return a look at an attempt that was admitted so many seconds ago and has not run yet."""
    full = active_status(running=False, attemptStartTime=at(-ago)) | status
    return make_seen(make_job(spec, full), make_child(), *pods, ago=ago)


def _bound(ago: float) -> dict[str, Any]:
    """Return a status whose gang has had its nodes for so many seconds."""
    kinds = ("Admitted", "Scheduled")
    return {
        "conditions": [condition(kind, since=-ago) for kind in kinds]
        + [condition("Running", "False")]
    }


def _that(result: str, index: int = 0, code: int = 1, attempt: int = 1, **more: Any) -> Any:
    return make_pod(index, attempt, terminated(code, said(result, rank=index, **more)))


def _released(times: int) -> dict[str, Any]:
    ends = [
        {"attempt": 1 + one, "reason": "SchedulingTimeout", "endTime": at(-10)}
        for one in range(times)
    ]
    return {
        "attempt": times,
        "ends": ends,
        "conditions": [condition("Admitted", "False", "SchedulingTimeout")],
    }


def hub_wait(seconds: float) -> dict[str, Any]:
    """A report of rank 0 that has waited so long for the hub."""
    why = "huggingface.co: name resolution failed"
    wait = {"target": "Hub", "seconds": seconds, "why": why}
    return {"stage_seconds": seconds, "waiting": wait}


def starting() -> Group:
    """Attempts that don't run yet."""
    return {
        "a new job": make_seen(make_job()),
        "admitted, without a Job": make_seen(
            make_job(status=active_status(jobUid=None, running=False))
        ),
        "admitted long ago, without a Job": make_seen(
            make_job(status=active_status(jobUid=None, running=False, attemptStartTime=at(-301)))
        ),
        "no pods yet": _starting(ago=2),
        "pods are refused": replace(_starting(make_pod(0), ago=6), start_warning=QUOTA),
        "a pod finds no node": _starting(make_pod(0), _pending(1)),
        "a pod found no node in time": _starting(make_pod(0), _pending(1), ago=301),
        "nodes are made for the pods": _starting(
            _pending(0),
            _pending(1),
            ago=400,
            spec={
                "placement": {
                    "accelerator": "GPU",
                    "provisioning": "CreatePods",
                    "gpuProduct": "NVIDIA-L4",
                    "gpusPerNode": 4,
                    "nodes": 2,
                    "nodeSelector": {"pool": "l4"},
                }
            },
        ),
        "containers are made": _starting(_creating(0), _creating(1)),
        "an image can't be pulled": _starting(
            make_pod(0), _creating(1, "ImagePullBackOff"), ago=70, **_bound(65)
        ),
        "a volume can't be mounted": replace(
            _starting(make_pod(0), _creating(1), ago=70, **_bound(65)),
            start_warning="FailedMount: configmap not found",
        ),
        "containers did not start in time": _starting(
            make_pod(0), _creating(1), ago=9000, **_bound(8999)
        ),
        "all pods run": _starting(make_pod(0), make_pod(1)),
        "a gang was released": make_seen(make_job(status=_released(1))),
        "a gang was released twice, long ago": make_seen(
            make_job(status=_released(2)), now=NOW + 60
        ),
    }


def going_on() -> Group:
    """Attempts that run."""
    known = {"spec": CLAIM, "status": active_status()}
    gpu = active_status(plan=GPU_PLAN)
    problem = {**TELLS, "checkpoint_problem": "No space left on device"}
    far_apart = GPU_PLAN.model_copy(update={"link_bytes_per_second": 280_000_000_000})
    tcp = {**TELLS, "metrics": {**METRICS, "allreduce_bytes_per_second": 2.5e9}}
    served = active_status(plan=SERVED_PLAN)
    engines = (make_engines(spent="1"), make_engine(0), make_engine(1, state=KILLED))
    return {
        "without news": running(),
        "rank 0 tells": make_seen(make_job(**known), *TRAINERS, pull=make_pull(**TELLS)),
        "rank 0 tells of GPUs": make_seen(
            make_job(GPU_JOB, gpu),
            make_child(),
            *(make_pod(one, conditions=BOUND) for one in (0, 1)),
            pull=make_pull(**TELLS),
        ),
        "rank 0 fetches": make_seen(
            make_job(**known), *TRAINERS, pull=make_pull(stage="Loading", fetched_bytes=5)
        ),
        "no checkpoint can be written": make_seen(
            make_job(**known), *TRAINERS, pull=make_pull(**problem)
        ),
        "the network is slow": make_seen(
            make_job(GPU_JOB, active_status(plan=far_apart)),
            make_child(),
            *(make_pod(one, conditions=BOUND) for one in (0, 1)),
            pull=make_pull(**tcp),
        ),
        "rank 0 is silent": make_seen(make_job(**known), *TRAINERS, silence=render.silence(30)),
        "rank 0 is silent for minutes": make_seen(
            make_job(CLAIM, active_status(progress={"attempt": 1, "step": 7})),
            *TRAINERS,
            silence=render.silence(121),
        ),
        "rank 0 waits for the hub": make_seen(
            make_job(**known), *TRAINERS, pull=make_pull(stage="WaitingForHub", **hub_wait(84))
        ),
        "rank 0 has waited for the hub too long": make_seen(
            make_job(**known), *TRAINERS, pull=make_pull(stage="WaitingForHub", **hub_wait(184))
        ),
        "no step for longer than allowed": make_seen(
            make_job(**known), *TRAINERS, pull=make_pull(still=4000, stage="Training", step=7)
        ),
        "a node is away": running(make_pod(0), make_pod(1, conditions=LOST)),
        "engines run": make_seen(
            make_job(status=served), *TRAINERS, make_engines(), make_engine(0), make_engine(1)
        ),
        "an engine is lost": make_seen(make_job(status=served), *TRAINERS, *engines),
        "engines have no Job": make_seen(make_job(status=served), *TRAINERS),
        "the spec can't be read any more": make_seen(
            make_job({"later": 1}, active_status()), *TRAINERS
        ),
        "the deadline is near": make_seen(
            make_job({"activeDeadlineSeconds": 100}, active_status(activeSeconds=30)), *TRAINERS
        ),
        "the deadline is over": make_seen(
            make_job({"activeDeadlineSeconds": 100}, active_status(activeSeconds=41)), *TRAINERS
        ),
        "suspended": make_seen(make_job({"suspend": True}, active_status()), *TRAINERS),
    }


def results() -> Group:
    """Attempts whose rank 0 ended with each of the results that a trainer may report, and what it
    says then."""
    detail: dict[str, dict[str, Any]] = {
        "Succeeded": {"export": {"to": "Volume", "path": "/checkpoints/run-uid-of-run/export",
        "format": "Model",
                                 "bytes": 2**30, "weights_hash": HASH}, "account": {"clock": CLOCK,
                                 "sealed": CLOCK}},
        "OutOfMemory": {"shortage": {"phase": "backward", "allocated_bytes": 80 * 2**30,
        "requested_bytes": 2**30}},
        "Hang": {"standstill": {"silent_seconds": 1800, "frames": ["train (train.py:7)"]}},
        "Diverged": {"diverged_on": {"first": 7, "last": 7}},
    }  # fmt: skip
    looks = {}
    for result in render.results():
        more: dict[str, Any] = {
            "step": 12,
            "total_steps": 100,
            "metrics": {"kl": 0.5},
            "message": "what happened",
            "attempt": 1,
        }
        pod = _that(
            result, code=0 if result == "Succeeded" else 1, **more, **detail.get(result, {})
        )
        job = make_job({**CLAIM, "resources": {"limits": {"memory": "2Gi"}}}, active_status())
        looks[result] = make_seen(job, make_child(), pod, make_pod(1))
    return looks


RULES: list[dict[str, Any]] = [
    {"action": "Fail", "onExitCodes": {"operator": "In", "values": [3]}},
    {"action": "RestartUncounted", "onResults": ["RewardError"]},
]


FAILED_ATTEMPT = {
    "attempt": 1,
    "reason": "Error",
    "counted": True,
    "runningSeconds": 5,
    "node": "node-0",
    "endTime": at(-90),
}


def ends() -> Group:
    """Attempts that ended in other ways."""
    ruled = make_job({"restarts": {"rules": RULES}}, active_status())
    again = active_status(3, ends=[FAILED_ATTEMPT, {**FAILED_ATTEMPT, "attempt": 2}], restarts=2)
    rollback = {"guard": {"onDivergence": "Rollback"}}
    diverged = _that("Diverged", diverged_on={"first": 7, "last": 7}, message="the loss is nan")
    killed = make_pod(0, state=terminated(137, reason="OOMKilled"))
    limit = make_job(status=active_status(4, restarts=3))
    deleted = make_pod(1, deleted=True)
    return {
        "the kernel killed a pod for its memory": running(killed, make_pod(1)),
        "a crash": running(make_pod(0, state=terminated(139)), make_pod(1)),
        "exit code 0 without an outcome": running(
            make_pod(0, state=terminated(0)), make_pod(1, state=terminated(0))
        ),
        "an error that may be a symptom": running(_that("Error"), make_pod(1), ago=1),
        "two errors": running(_that("Error"), _that("OutOfMemory", 1)),
        "a preemption": running(
            _that("Error"), make_pod(1, state=terminated(143), conditions=TARGET)
        ),
        "an eviction": running(
            make_pod(0), make_pod(1, state={}, phase="Failed", reason="Evicted")
        ),
        "a deletion before an error": make_story(
            make_job(status=active_status()),
            (8, (make_child(), make_pod(0), deleted)),
            (5, (make_child(), _that("Error"), deleted)),
        ),
        "a lost node": running(_that("Error"), make_pod(1, conditions=LOST)),
        "the Job was deleted": make_seen(
            make_job(status=active_status()), make_pod(0), make_pod(1)
        ),
        "the Job failed and its pods are gone": make_seen(
            make_job(status=active_status()),
            make_child(ended="Failed", reason="BackoffLimitExceeded"),
        ),
        "the Job failed and its pods seem to run": make_seen(
            make_job(status=active_status()),
            make_child(ended="Failed", reason="BackoffLimitExceeded"),
            *TRAINERS[1:],
        ),
        "a rule says Fail": make_seen(
            ruled, make_child(), make_pod(0, state=terminated(3)), make_pod(1)
        ),
        "a rule says RestartUncounted": make_seen(
            ruled, make_child(), _that("RewardError"), make_pod(1)
        ),
        "a pause before the next attempt": make_seen(
            make_job(status=again),
            make_child(3),
            make_pod(0, 3, terminated(1)),
            make_pod(1, 3),
            ago=3,
        ),
        "the same node twice": make_seen(
            make_job(status=again),
            make_child(1),
            make_child(3),
            make_pod(0, 3, terminated(1)),
            make_pod(1, 3),
            ago=60,
        ),
        "the restart limit": make_seen(
            limit, make_child(4), _that("Error", attempt=4), make_pod(1, 4)
        ),
        "a rollback": make_seen(
            make_job(rollback, active_status()), make_child(), diverged, make_pod(1)
        ),
        "an engine's end before the gang runs": make_seen(
            make_job(status=active_status(plan=SERVED_PLAN, running=False) | _bound(60)),
            *TRAINERS,
            make_engines(),
            make_engine(0),
            make_engine(1, state=KILLED),
        ),
    }


def finished() -> Group:
    """Jobs that have ended, wait for somebody's word, or are refused."""
    done = {
        "attempt": 1,
        "jobUid": "job-1",
        "completionTime": at(-100),
        "conditions": [condition("Succeeded")],
    }
    failed = active_status(2, restarts=2, completionTime=at(-100)) | {
        "conditions": [condition("Failed")]
    }
    step: dict[str, Any] = {"progress": {"step": 7, "totalSteps": 9}}
    earlier = {"name": "earlier", "uid": "uid-of-earlier"}
    follows = make_seen(make_job({"resumeFrom": {"grpoJob": "earlier"}}))
    suspended = {
        "attempt": 1,
        "conditions": [condition("Admitted", "False", "Suspended"), condition("Suspended")],
    }
    return {
        "done": make_seen(make_job(status=done)),
        "done, with a survivor": make_seen(
            make_job(status={**done, "conditions": [condition("Succeeded", since=-10)]}),
            make_child(),
            make_pod(1),
        ),
        "done, for a while": make_seen(make_job({"ttlSecondsAfterFinished": 130}, done)),
        "done, for too long": make_seen(make_job({"ttlSecondsAfterFinished": 99}, done)),
        "failed": make_seen(make_job(status=failed)),
        "failed, and to be tried again": make_seen(make_job({"retry": 1}, failed)),
        "suspended before it ran": make_seen(make_job({"suspend": True})),
        "suspended no more": make_seen(make_job(status=suspended)),
        "the job that it begins with is not there": follows,
        "the job that it begins with keeps nothing": replace(
            follows, source=make_job({}, active_status(**step), **earlier)
        ),
        "the job that it begins with has made no step": replace(
            follows, source=make_job(CLAIM, active_status(), **earlier)
        ),
        "the job that it begins with": replace(
            follows, source=make_job(CLAIM, active_status(**step, revisions=REVISIONS), **earlier)
        ),
        "a spec with two problems": make_seen(make_job({"rewards": [], "training": {"beta": -1}})),
        "a spec too big for an annotation": make_seen(
            make_job({"rewards": [{"format": {"pattern": "é" * 4000}} for _ in range(32)]})
        ),
    }


def cases() -> dict[str, Callable[[], Any]]:
    """Return what renders each group, by the file's path without its suffix."""
    groups = {
        "starting": starting,
        "running": going_on,
        "results": results,
        "ends": ends,
        "finished": finished,
    }
    return {f"status/{name}": partial(_looked_at, group) for name, group in groups.items()}


def _looked_at(group: Callable[[], Group]) -> Any:
    return {sentence: render.looked_at(observation) for sentence, observation in group().items()}
