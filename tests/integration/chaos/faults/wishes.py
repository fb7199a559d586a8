"""What users and administrators change: pauses, limits, deadlines, priorities, quotas, and foreign
pods on the GPUs."""

import random
import time

from ..ledger import Deed, Entry
from ..world import ALL_GRPOJOBS, GRPOJOBS, PODS, QUOTAS, TEAMS, Object, World, quiet
from .base import Fault, name_of

QUOTA = "chaos"


def _some_job(world: World, chance: random.Random) -> Object | None:
    jobs = world.jobs("Pending", "Queued", "Starting", "Running", "Restarting", "Suspended")
    return chance.choice(jobs) if jobs else None


def _edit(world: World, job: Object, spec: Object) -> bool:
    metadata = job["metadata"]
    return quiet(
        lambda: world.patch(GRPOJOBS, metadata["namespace"], metadata["name"], {"spec": spec})
    )


def suspended(world: World, chance: random.Random) -> str:
    """A user's pause, which ends later."""
    job = _some_job(world, chance)
    if job is None:
        return ""
    # the attempt may be one further by the time that the operator sees it
    for attempt in range(
        job.get("status", {}).get("attempt", 0), job.get("status", {}).get("attempt", 0) + 2
    ):
        world.ledger.intend(Entry(job["metadata"]["uid"], attempt, Deed.SUSPENDED, at=time.time()))
    if not _edit(world, job, {"suspend": True}):
        return ""
    if chance.random() < 0.8:
        world.undo_after(chance.randint(1, 8), lambda: _edit(world, job, {"suspend": False}))
    return name_of(job)


def restarts_limited(world: World, chance: random.Random) -> str:
    """Another limit of restarts."""
    job, limit = _some_job(world, chance), chance.choice((0, 1, 2, 5, 50))
    return (
        f"{name_of(job)}: {limit}"
        if job and _edit(world, job, {"restarts": {"limit": limit}})
        else ""
    )


def deadline_set(world: World, chance: random.Random) -> str:
    """A deadline, maybe one that is over already, or none any more."""
    job, seconds = _some_job(world, chance), chance.choice((None, 1, 15, 3600))
    return (
        f"{name_of(job)}: {seconds}"
        if job and _edit(world, job, {"activeDeadlineSeconds": seconds})
        else ""
    )


def quota_changed(world: World, chance: random.Random) -> str:
    """A quota appears or shrinks, and goes later."""
    team = chance.choice(TEAMS)
    hard = chance.choice(
        ({"pods": "0"}, {"pods": "2"}, {"requests.nvidia.com/gpu": "0"}, {"count/jobs.batch": "1"})
    )
    body = {"metadata": {"name": QUOTA}, "spec": {"hard": hard}}
    if not quiet(lambda: world.post(QUOTAS, team, body)) and not quiet(
        lambda: world.patch(QUOTAS, team, QUOTA, body)
    ):
        return ""
    world.undo_after(chance.randint(2, 12), lambda: world.delete(QUOTAS, team, QUOTA))
    return f"{team}: {hard}"


def gpus_taken(world: World, chance: random.Random) -> str:
    """A notebook takes GPUs, and gives them back later."""
    team, gpus, name = (
        chance.choice(TEAMS),
        chance.choice((1, 2, 4)),
        f"notebook-{chance.randrange(10**6)}",
    )
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}}
    body = {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "x", "resources": resources}]},
    }
    if not quiet(lambda: world.post(PODS, team, body)):
        return ""
    world.undo_after(
        chance.randint(3, 15), lambda: world.delete(PODS, team, name, gracePeriodSeconds=0)
    )
    return f"{team}/{name}: {gpus}"


def annotated(world: World, chance: random.Random) -> str:
    """Labels and annotations of any content."""
    jobs = [one for one in world.items(ALL_GRPOJOBS) if "deletionTimestamp" not in one["metadata"]]
    if not jobs:
        return ""
    job = chance.choice(jobs)
    noise = "".join(chance.choices('{}"\\\x7f\n\u202e\U0001f525abc', k=chance.choice((0, 1, 500))))
    keys = (
        "note",
        "kueue.x-k8s.io/queue-name",
        "grpo.dev/attempt",
        "batch.kubernetes.io/job-completion-index",
    )
    body: Object = {"metadata": {"annotations": {chance.choice(keys): noise}}}
    body["metadata"]["labels"] = {
        chance.choice(("team", "grpo.dev/job-uid")): chance.choice(("", "x", "9" * 63))
    }
    metadata = job["metadata"]
    done = quiet(lambda: world.patch(GRPOJOBS, metadata["namespace"], metadata["name"], body))
    return name_of(job) if done else ""


def retried(world: World, chance: random.Random) -> str:
    """A user starts a failed job again."""
    if not (jobs := world.jobs("Failed")):
        return ""
    job = chance.choice(jobs)
    return name_of(job) if _edit(world, job, {"retry": job["spec"].get("retry", 0) + 1}) else ""


FAULTS = (
    Fault("failed job retried", 3, retried),
    Fault("suspended", 4, suspended),
    Fault("restart limit changed", 3, restarts_limited),
    Fault("deadline changed", 2, deadline_set),
    Fault("quota changed", 4, quota_changed),
    Fault("GPUs taken by a foreign pod", 3, gpus_taken),
    Fault("labels and annotations of any content", 2, annotated),
)
