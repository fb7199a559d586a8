"""A queue of GPU jobs for unit tests: jobs, nodes, pods, and what a pass makes of them.

The jobs have a plan from an earlier attempt (kept_plan), so that the queue is tested without the
planner's choice.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_api.plan.plan import ExecutionPlan
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.objects.times import Observed, ProcessClock
from grpo_operator.admission.inventory import node_facts, pod_facts
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.admission.queue import AdmissionQueue
from grpo_operator.admission.scheduler import CycleInput, Verdict, schedule
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker, release_age
from grpo_operator.decide.restarts import pausing
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.records import GRPOJobRecord
from tests.unit.operator_world import (
    GPU_ENGINE,
    GPU_PLAN,
    LIMITS,
    NOW,
    active_status,
    at,
    condition,
    make_job,
    make_seen,
)
from tests.unit.test_operator_inventory import GFD, node, pod

GPUS = {"placement": {"accelerator": "GPU"}}


def gang(
    nodes: int, per_node: int, engines: int = 0, per_engine: int = 0, product: str = ""
) -> ExecutionPlan:
    """A plan of so many pods with so many GPUs each, and of engines of their own, with GPUs of the
    same product."""
    plan = GPU_PLAN.model_copy(
        update={"gpus": nodes * per_node, "nodes": nodes, "gpus_per_node": per_node}
    )
    if not engines:
        return plan
    own = {
        "replicas": engines,
        "gpus_per_replica": per_engine,
        "gpu_product": product or plan.gpu_product,
        "node_selector": {"nvidia.com/gpu.product": product or plan.gpu_product},
    }
    return plan.model_copy(update={"engine": GPU_ENGINE.model_copy(update=own)})


def job(
    name: str, plan: ExecutionPlan, age: float = 100, active: bool = False, **placement: Any
) -> GRPOJobRecord:
    """A job that has run before, and runs again (active) or waits."""
    status = active_status(plan=plan, progress={"step": 5, "totalSteps": 9})
    if not active:
        status["conditions"] = [condition("Admitted", "False", "WaitingForGPUs")]
    spec = {"placement": {"accelerator": "GPU", "nodes": None, **placement}}
    record = make_job(spec, status, name=name, uid=f"uid-{name}", creationTimestamp=at(-age))
    assert record.spec is not None
    return record


def cluster(*sizes: int, pods: Any = (), **more: Any) -> Snapshot:
    """Nodes node-0, node-1, … with that many GPUs, and pods on them."""
    nodes = []
    for number, size in enumerate(sizes):
        item = node({**GFD, "nvidia.com/gpu.count": str(size)}, {"nvidia.com/gpu": str(size)})
        item["metadata"] = {**item["metadata"], "name": f"node-{number}"}
        nodes.append(node_facts(item))
    return Snapshot(
        nodes=tuple(nodes), gpu_pods=tuple(one for one in map(pod_facts, pods) if one), **more
    )


def gpu_pod(name: str, gpus: int, on: str = "node-0", **labels: str) -> Any:
    return pod(name, {"nvidia.com/gpu": str(gpus)}, node=on, labels=labels)


def own_pod(of: GRPOJobRecord, gpus: int, on: str, attempt: int = 1, engine: bool = False) -> Any:
    labels = {
        "grpo.dev/job-name": of.name,
        "grpo.dev/job-uid": of.uid,
        "grpo.dev/attempt": str(attempt),
    }
    name = f"{of.name}-{attempt}-engine-0" if engine else f"{of.name}-{attempt}-0"
    made = gpu_pod(name, gpus, on, **labels, **({"grpo.dev/component": "engine"} if engine else {}))
    made["metadata"]["ownerReferences"] = [
        {"controller": True, "kind": "Job", "uid": f"job-{attempt}"}
    ]
    return made


def judged(jobs: list[GRPOJobRecord], snapshot: Snapshot, **more: Any) -> Mapping[str, Verdict]:
    """The verdicts of one pass, by uid."""
    asked = CycleInput(
        jobs=tuple(jobs),
        snapshot=snapshot,
        limits=LIMITS,
        default_image="trainer:1",
        pauses={one.uid: pausing(one, release_age(one, NOW), LIMITS) for one in jobs},
        **more,
    )
    return schedule(asked, Plans()).verdicts


def passed(jobs: list[GRPOJobRecord], snapshot: Snapshot) -> dict[str, tuple[bool, str]]:
    """Admitted, and the reason, by name of the waiting job."""
    found = judged(jobs, snapshot)
    return {
        one.name: (found[one.uid].admitted, found[one.uid].reason)
        for one in jobs
        if one.uid in found
    }


class Jobs(list[GRPOJobRecord]):
    """All GRPOJobs."""

    requeue_after: float | None = None

    def get(self, key: ObjectKey) -> GRPOJobRecord | None:
        return next((job for job in self if job.key == key), None)


def queue(
    jobs: list[GRPOJobRecord], snapshot: Snapshot, image: str = "trainer:1"
) -> AdmissionQueue:
    """A queue that has noticed the jobs."""

    def tell(keys: Iterable[ObjectKey], *, slow: bool = False) -> None:
        """Nobody listens."""

    source = jobs if isinstance(jobs, Jobs) else Jobs(jobs)
    found = AdmissionQueue(
        source,
        lambda: snapshot,
        tell,
        limits=LIMITS,
        pods=PodDefaults(image=image),
        clock=ProcessClock(lambda: NOW, lambda: Observed(NOW)),
        first_seen_tracker=FirstSeenTracker(),
    )
    for one in jobs:
        found.record_job(one.key, one)
    return found


ASKED = Decision(Action.ADMIT, "OutOfMemory", "CUDA out of memory", counted=True)


async def answered(
    jobs: list[GRPOJobRecord],
    snapshot: Snapshot,
    one: GRPOJobRecord,
    decision: Decision | None = None,
) -> Decision:
    """What a job is answered after a pass."""
    there = queue(jobs, snapshot)
    await there.run_cycle()
    found = await there.answer(make_seen(one), decision or ASKED)
    assert found is not None
    return found


def packs(pods: list[tuple[str, int]], room: dict[str, int], avoid: dict[str, set[str]]) -> bool:
    """Whether the pods (gang, GPUs) fit, those of a gang on nodes of their own; engines, of gang
    "", anywhere."""
    if not pods:
        return True
    (uid, width), rest = pods[0], pods[1:]
    return any(
        packs(
            rest,
            {**room, name: free - width},
            {**avoid, uid: {*avoid.get(uid, ()), name}} if uid else avoid,
        )
        for name, free in room.items()
        if free >= width and name not in avoid.get(uid, ())
    )
