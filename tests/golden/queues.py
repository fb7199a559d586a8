"""Jobs that wait for GPUs or for Kueue, and the objects that the operator makes of jobs with a
given plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.golden import render
from tests.golden.attempts import CLAIM, GPU_JOB, HASH
from tests.golden.layout import unlike
from tests.unit.kueue_world import (
    QUEUED,
    admitted,
    evicted,
    make_item,
    make_queued,
    make_workload,
    workload_condition,
)
from tests.unit.operator_world import (
    GPU_PLAN,
    PLAN,
    SERVED_GPU_PLAN,
    SERVED_PLAN,
    TRAINERS,
    active_status,
    at,
    condition,
    make_child,
    make_job,
    make_pod,
    make_seen,
    said,
    terminated,
)
from tests.unit.queue_world import cluster, gang, gpu_pod, job, own_pod
from tests.unit.test_operator_admission_quotas import GPU, quota
from tests.unit.test_operator_replanning import learned, ran_out

WAITS: dict[str, Any] = {"conditions": [condition("Admitted", "False", "WaitingForKueue")]}
DONE = {"attempt": 1, "conditions": [condition("Succeeded")]}
GPU_QUEUED = {"placement": {"accelerator": "GPU", "nodes": 2, "queueName": "team"}}
TENANT = {
    "labels": {
        "team": "rl",
        "kueue.x-k8s.io/queue-name": "team",
        "kueue.x-k8s.io/priority-class": "high",
    },
    "annotations": {"example.com/cost-centre": "42"},
}


def waiting() -> Any:
    """Jobs that ask for GPUs, and what follows from what is free."""
    mine, two = job("mine", gang(1, 4)), job("mine", gang(2, 4))
    older, holder = job("older", gang(1, 8), age=200), job("holder", gang(1, 8), active=True)
    engines, restarts = (
        job("mine", gang(1, 4, engines=2, per_engine=2)),
        job("mine", gang(2, 4), active=True),
    )
    own_pods = [own_pod(restarts, 4, name) for name in ("node-0", "node-1")]
    new = make_job(
        {"placement": {"accelerator": "GPU", "nodes": None}}, name="mine", uid="uid-mine"
    )
    urgent = job("mine", gang(1, 4), priorityClassName="urgent")
    cases: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
        "enough is free": (mine, (), cluster(8)),
        "a first plan": (new, (), cluster(8, 8)),
        "others hold it": (mine, (holder,), cluster(8, pods=[own_pod(holder, 8, "node-0")])),
        "foreign pods hold it": (mine, (), cluster(8, pods=[gpu_pod("foreign", 6)])),
        "half of the gang fits": (two, (), cluster(4)),
        "an older job is first": (mine, (older,), cluster(8)),
        "engines do not fit beside": (engines, (), cluster(6)),
        "engines fit beside": (engines, (), cluster(8)),
        "no node has GPUs": (new, (), cluster()),
        "a quota allows less": (mine, (), cluster(8, quotas={"team-a": (quota({GPU: "2"}),)})),
        "no such priority class": (urgent, (), cluster(8, priorities={"": 0, "low": -1})),
        "a restart": (restarts, (), cluster(4, 4, pods=own_pods)),
        "a restart whose node is lost": (restarts, (), cluster(4, pods=own_pods[:1])),
    }
    looks = {
        name: render.looked_at(make_seen(one), others, there)
        for name, (one, others, there) in cases.items()
    }
    short = {
        "out of memory, planned again": ran_out(),
        "out of memory after three new plans": ran_out(
            4, learned=learned(3), spec={"restarts": {"limit": 9}}
        ),
    }
    return looks | {
        name: render.looked_at(observation, snapshot=cluster(8))
        for name, observation in short.items()
    }


def kueue() -> Any:
    """Jobs that Kueue admits, by what it says of their Workload."""
    reserved: dict[str, Any] = {
        "conditions": [workload_condition("QuotaReserved", False, "Pending", "no quota is left")]
    }
    failed = (make_child(), make_pod(0, state=terminated(1, said("Error"))), make_pod(1))
    running, done = active_status(), {"status": DONE}
    cases: dict[str, tuple[dict[str, Any] | None, tuple[Any, ...], dict[str, Any]]] = {
        "no Workload yet": (None, (), {}),
        "it waits": ({}, (), {"status": WAITS}),
        "it waits for quota": (reserved, (), {"status": WAITS}),
        "it waits for checks": (
            {**admitted(workload_condition("Admitted", False)), "admission": None},
            (),
            {"status": WAITS},
        ),
        "it is admitted": (admitted(), (), {"status": WAITS}),
        "its gang runs": (admitted(), TRAINERS, {"status": running}),
        "its gang runs and is told ready": (
            admitted(workload_condition("PodsReady")),
            TRAINERS,
            {"status": running},
        ),
        "evicted while it runs": (evicted(), TRAINERS, {"status": running}),
        "evicted, and its gang has ended": (evicted(), (), {"status": WAITS}),
        "evicted as it failed": (evicted(), failed, {"status": running}),
        "its Workload is gone": (None, TRAINERS, {"status": running}),
        "its gang failed": (admitted(), failed, {"status": running}),
        "suspended": (admitted(), (), {"status": WAITS, "suspend": True}),
        "done": (admitted(), (), done),
        "done, with pods that run": (admitted(), TRAINERS, done),
    }
    looks = {}
    for name, (status, things, more) in cases.items():
        observation = make_queued(
            None if status is None else make_workload(status), *things, **more
        )
        looks[name] = render.write_to_workload(
            observation, None if status is None else make_item(status)
        )
    away = replace(make_queued(None, status=WAITS), kueue_problem="the operator may not see")
    moved = make_queued(
        make_workload({}), status=WAITS, placement={**QUEUED["placement"], "queueName": "other"}
    )
    wider = make_queued(make_workload({}), status={**WAITS, "attempt": 1})
    paused = make_workload(
        admitted(), spec={"active": False}, annotations={"grpo.dev/paused": "true"}
    )
    more = {
        "nobody can see its Workload": away,
        "it moved to another queue": moved,
        "its Workload is for other pods": wider,
        "suspended no more": make_queued(paused, status=WAITS),
        "two queues": make_seen(make_job(QUEUED, labels={"kueue.x-k8s.io/queue-name": "another"})),
    }
    return looks | {
        name: render.write_to_workload(observation, None) for name, observation in more.items()
    }


def workloads() -> Any:
    """The Workloads of jobs, and their pods where Kueue's answer puts them."""
    topology = {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}
    update = {
        "name": "trainer",
        "labels": {"x": "1"},
        "annotations": {"y": "2"},
        "nodeSelector": {"z": "3"},
    }
    checked = admitted(admissionChecks=[{"name": "nodes", "podSetUpdates": [update]}])
    on_cpus, on_gpus = (
        make_job(QUEUED),
        make_job({**GPU_QUEUED, "podTemplate": {"metadata": topology}}, **TENANT),
    )
    base = render.workload_for(on_cpus, PLAN)
    others = {
        "GPU of a tenant": render.workload_for(
            on_gpus, GPU_PLAN, 7, "WorkloadPriorityClass", "high"
        ),
        "GPU with engines": render.workload_for(
            make_job(GPU_QUEUED), SERVED_GPU_PLAN, 3, "PriorityClass", "low"
        ),
    }
    return {
        "CPU": base,
        **{name: unlike(one, base) for name, one in others.items()},
        "placed": render.placed_by_kueue(make_item(checked), on_cpus, PLAN, {"cloud/pool": "spot"}),
    }


def objects() -> Any:
    """The objects of jobs with a given plan, and those that all jobs of a namespace share."""
    ends = [
        {"attempt": one, "reason": "Error", "node": "node-1", "endTime": at(-90)} for one in (1, 2)
    ]
    status = active_status(
        3,
        ends=ends,
        avoidedNodes=["node-1"],
        rollbacks=[{"attempt": 1, "reason": "Diverged", "skipped": {"first": 7, "last": 9}}],
        revisions={"model": "a" * 40},
        resumeFrom={
            "grpoJob": "earlier",
            "uid": "uid-of-earlier",
            "claimName": "runs",
            "folder": "earlier-uid-of-earlier",
        },
    )
    later = make_job({**CLAIM, "resumeFrom": {"grpoJob": "earlier"}}, status, **TENANT)
    exported = make_job(
        {"model": {"name": "me/model", "parameters": "1B", "cache": {"claimName": "hub"}}, **CLAIM}
    )
    watcher = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    retained = {
        "checkpoint": {
            "volumeClaimTemplate": {"size": "1Gi", "retain": False, "storageClassName": "fast"}
        }
    }
    base = render.attempt(make_job(), SERVED_PLAN, 1)
    others = {
        "first attempt on GPUs, with engines": render.attempt(
            make_job(GPU_JOB), SERVED_GPU_PLAN, 1
        ),
        "later attempt": render.attempt(later, PLAN, 4),
        "a claim that goes with its job": render.attempt(make_job(retained), PLAN, 1),
        **render.helper_jobs(exported, PLAN),
    }
    return {
        "shared": render.shared_objects([watcher]),
        "first attempt, with engines": base,
        **{name: unlike(one, base) for name, one in others.items()},
    }


def screens() -> Any:
    """What `grpo status` and the operator's /metrics show of jobs."""
    export = {
        "to": "Volume",
        "path": "pvc://runs/export",
        "format": "Model",
        "bytes": 2**30,
        "weightsHash": HASH,
    }
    outcome = {"result": "Hang", "rank": 3, "step": 12, "message": "stood still"}
    outcome["standstill"] = {"silentSeconds": 1800, "frames": ["train (train.py:7)"]}
    usage = {
        "asOf": at(0),
        "gpuSeconds": {"training": 3000, "lost": 600},
        "heldGpuSeconds": 3600,
        "effective": "83.3%",
    }
    shown: dict[str, Any] = {
        "phase": "Running",
        "progress": {
            "step": 50,
            "totalSteps": 100,
            "percent": 50,
            "summary": "50/100",
            "eta": "2m5s",
        },
        "metrics": {
            "kl": "0.0132",
            "reward": "1.84",
            "phaseSeconds": {"generate": "1.2", "backward": "2.5"},
        },
        "memory": {
            "predictedBytes": 5 * 2**30,
            "measuredBytes": 4 * 2**30,
            "ratio": "1.250",
            "phases": {},
        },
        "checkpoint": {"step": 40, "time": at(-100), "bytes": 2**30, "where": "pvc://runs/step-40"},
        "usage": {**usage, "queuedSeconds": 100, "cost": 1.5},
        "ends": [{"attempt": 1, "reason": "OutOfMemory", "counted": True, "endTime": at(-900)}],
        "rollbacks": [{"attempt": 1, "reason": "Diverged", "skipped": {"first": 7, "last": 9}}],
        "avoidedNodes": ["node-1"],
        "pods": [{"name": "run-2-0-abcde", "index": 0, "node": "node-0", "phase": "Running"}],
        "restarts": 1,
    }
    live = make_job(GPU_JOB, active_status(2, SERVED_GPU_PLAN, **shown))
    ended = {
        "completionTime": at(-60),
        "conditions": [condition("Failed", reason="Hang")],
        "phase": "Failed",
    }
    over = make_job(
        GPU_JOB,
        active_status(2, GPU_PLAN) | shown | ended | {"outcome": outcome, "export": export},
        name="over",
    )
    new = make_job(name="new")
    return {
        "grpo status": {
            name: render.screen(one) for name, one in (("live", live), ("over", over), ("new", new))
        },
        "/metrics": render.metrics_page([live, over, new]),
    }


def cases() -> dict[str, Callable[[], Any]]:
    """Return what renders each group, by the file's path without its suffix."""
    return {
        "status/waiting": waiting,
        "status/kueue": kueue,
        "objects/workloads": workloads,
        "objects/attempts": objects,
        "screens": screens,
        "story": partial(render.story, 0),
        "status/base-plan": render.base_plan,
    }
