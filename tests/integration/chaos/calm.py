"""After the storm: all faults are over; every job must get to its end, and nothing be left of
any."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime

from grpo_api.text.contract import GROUP, PLAN_ANNOTATION
from grpo_operator.records.names import LABEL_ATTEMPT, LABEL_JOB, LABEL_UID, RENDEZVOUS_SERVICE
from harness.client import ApiStatusError
from harness.programs.patience import Patience

from .trainer import succeed
from .world import (
    ALL_GRPOJOBS,
    CLAIMS,
    EVENTS,
    GRPOJOBS,
    JOBS,
    NODES,
    PODS,
    SERVICES,
    Object,
    World,
    live,
    quiet,
)

SETTLE_SECONDS = 90.0
"""What the operator and the controllers get for it: the longest pause between attempts, and two
busy cores."""
POLL_SECONDS = 0.3
MOST_CHILDREN = 2
"""The current attempt's Job, and the last one for its logs."""
WAITS = ("WaitingForGPUs", "WaitingInQueue")


def restore(world: World) -> None:
    """Ends all faults, and waits until the operator and the nodes are there."""
    _until(world, lambda: _calmed(world))
    world.proxy.spoil, world.proxy.lost = None, lambda _: False
    # their garbage collector may lose track of owners that were deleted just after an API server's
    # end
    world.cluster.control_plane.restart_controllers()
    world.operators.revive()
    world.operators.wait_ready()
    _until(world, lambda: _all_ready(world))


def _calmed(world: World) -> list[str]:
    world.undo_all()
    return []


def _all_ready(world: World) -> list[str]:
    """What is wrong with the nodes."""
    wrong = []
    for node in world.items(NODES):
        conditions = node["status"].get("conditions", [])
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        if not ready or node["spec"].get("taints"):
            wrong.append(f"node {node['metadata']['name']} is not usable")
    return wrong


def _until(
    world: World, problems: Callable[[], list[str]], seconds: float = SETTLE_SECONDS
) -> list[str]:
    """Look again and again until there is no problem, and return the last ones when time is up.

    An operator that loses its Lease ends, and its kubelet starts it again. On a busy machine both
    replicas may lose it once the faults are over: without a kubelet nobody would lead from then on.
    """
    patience = Patience(seconds)
    while True:
        world.operators.revive()
        try:
            found = problems()
        except ApiStatusError as error:  # of an API server that has just come back
            found = [str(error)]
        if not found or patience.is_over:
            return found
        time.sleep(POLL_SECONDS)


def settled(world: World) -> list[str]:
    """Every job has ended, runs whole, is paused, or waits for a reason that is true."""

    def unsettled() -> list[str]:
        for job in world.jobs("Running"):
            # the API server did not take the word of a later rank: training that is done ends on
            # all of them
            if any(pod["status"].get("phase") == "Succeeded" for pod in world.pods_of(job)):
                succeed(world, job)
        return [
            wrong
            for job in world.jobs()
            if (wrong := _unsettled(world, job) or _crowded(world, job))
        ]

    return [f"no job is lost: {one}" for one in _until(world, unsettled)]


def _crowded(world: World, job: Object) -> str:
    """What is left of attempts that are not to run: pods of any, Jobs of more than the last two."""
    attempt, uid, team = (
        job["status"].get("attempt", 0),
        job["metadata"]["uid"],
        job["metadata"]["namespace"],
    )
    pods = world.items(PODS, team, f"?labelSelector={LABEL_UID}={uid},{LABEL_ATTEMPT}!={attempt}")
    alive = [
        _name(pod)
        for pod in pods
        if live(pod) and PLAN_ANNOTATION in pod["metadata"].get("annotations", {})
    ]
    owned = [
        child
        for child in world.items(JOBS, team, f"?labelSelector={LABEL_UID}={uid}")
        if _owned(child, uid)
    ]
    if alive or len(owned) > MOST_CHILDREN:
        return (
            f"{_told(job)}: left of earlier attempts: {alive}, Jobs "
            f"{[_name(child) for child in owned]}"
        )
    return ""


def _owned(child: Object, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in child["metadata"].get("ownerReferences", []))


def _unsettled(world: World, job: Object) -> str:
    """What is not as it should be; empty when all is well."""
    status, spec, generation = job.get("status", {}), job["spec"], job["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        return f"{_told(job)}: generation {generation}, observed {status.get('observedGeneration')}"
    running = [
        pod for pod in world.pods_of(job) if live(pod) and pod["status"].get("phase") == "Running"
    ]
    reason = next(
        (one["reason"] for one in status.get("conditions", []) if one["type"] == "Admitted"), ""
    )
    impossible = bool(spec["placement"].get("nodeSelector"))
    expected = {
        "Succeeded": not running,
        "Failed": not running,
        "Suspended": bool(spec.get("suspend")) and not running,
        "Running": not spec.get("suspend")
        and len(running) == (status.get("plan") or {}).get("nodes"),
        "Queued": (reason in WAITS or impossible) and not running,
        "Pending": bool(impossible or status.get("avoidedNodes")) and not running,
        "Starting": impossible and not running,
    }
    if expected.get(status.get("phase", ""), False):
        return ""
    return f"{_told(job)}: {len(running)} pods run"


def _told(job: Object) -> str:
    """A job with all that its status says."""
    status, metadata = job.get("status", {}), job["metadata"]
    messages = [
        f"{one['type']}={one['status']} {one['message'][:150]!r}"
        for one in status.get("conditions", [])
    ]
    attempt = f"attempt {status.get('attempt', 0)} of {metadata['uid'][:8]}"
    return (
        f"{metadata['namespace']}/{metadata['name']}, {attempt}, is {status.get('phase')}: "
        f"{'; '.join(messages)}"
    )


def drained(world: World) -> list[str]:
    """Lets every job that runs succeed and resumes what is paused, until all have ended but those
    that can't run."""

    def left() -> list[str]:
        found = [
            job
            for job in world.jobs()
            if not _over(job) and not job["spec"]["placement"].get("nodeSelector")
        ]
        for job in found:
            if job["spec"].get("suspend"):
                _pause(world, job, False)
            elif (
                job.get("status", {}).get("avoidedNodes")
                and job["status"].get("phase") != "Running"
            ):
                _pause(
                    world, job, True
                )  # what users do when a node works again that the job keeps away from
            elif job.get("status", {}).get("phase") == "Running":
                succeed(world, job)
        return [_told(job) for job in found]

    return [f"no job is lost: {one}" for one in _until(world, left)]


def _over(job: Object) -> bool:
    return job.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _pause(world: World, job: Object, suspend: bool) -> None:
    metadata = job["metadata"]
    quiet(
        lambda: world.patch(
            GRPOJOBS, metadata["namespace"], metadata["name"], {"spec": {"suspend": suspend}}
        )
    )


def ends_without_event(world: World, since: float) -> list[str]:
    """Every job that has ended since that unix time, when nothing disturbed the operator, has an
    event that says so. An operator that ends between a status and its event disturbs it."""

    def silent() -> list[str]:
        undisturbed = max(since, world.operators.started_at)
        events = {(one["involvedObject"].get("uid"), one["reason"]) for one in world.all_of(EVENTS)}
        ended = [job for job in world.jobs("Succeeded", "Failed") if _ended_at(job) > undisturbed]
        return [
            _told(job)
            for job in ended
            if (job["metadata"]["uid"], _final(job)["reason"]) not in events
        ]

    return [f"no event tells of the end: {one}" for one in _until(world, silent)]


def _final(job: Object) -> Object:
    conditions = job["status"]["conditions"]
    found: Object = next(one for one in conditions if one["type"] == job["status"]["phase"])
    return found


def _ended_at(job: Object) -> float:
    return datetime.fromisoformat(job["status"]["completionTime"]).timestamp()


def deleted(world: World) -> list[str]:
    """Deletes all jobs, and returns what is left of them."""
    for job in world.items(ALL_GRPOJOBS):
        metadata = job["metadata"]
        world.delete(
            GRPOJOBS, metadata["namespace"], metadata["name"], propagationPolicy="Background"
        )
    return [f"nothing is left over: {one}" for one in _until(world, lambda: list(_left(world)))]


def _left(world: World) -> Iterator[str]:
    yield from (f"GRPOJob {_name(one)}" for one in world.items(ALL_GRPOJOBS))
    for kind, path in (("Job", JOBS), ("pod", PODS)):
        for one in world.all_of(path):
            # who deletes a Job without its pods keeps those that have ended: nobody else owns them
            kept = kind == "pod" and not live(one) and not one["metadata"].get("ownerReferences")
            if LABEL_JOB in one["metadata"].get("labels", {}) and not kept:
                yield f"{kind} {_name(one)} {one['status'].get('phase', '')}"
    for one in world.all_of(CLAIMS):
        # one that is to be retained has no owner
        if one["metadata"].get("ownerReferences"):
            yield f"claim {_name(one)}"
    for one in world.all_of(SERVICES):
        ours = any(key.startswith(GROUP) for key in one["metadata"].get("labels", {}))
        if ours and one["metadata"]["name"] != RENDEZVOUS_SERVICE:
            yield f"Service {_name(one)}"


def _name(one: Object) -> str:
    return f"{one['metadata'].get('namespace', '')}/{one['metadata']['name']}"
