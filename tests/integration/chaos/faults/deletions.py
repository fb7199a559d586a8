"""Objects that somebody deletes, with every propagation policy."""

import random
import time

from grpo_operator.records.names import RENDEZVOUS_SERVICE, child_job

from ..ledger import Deed, Entry
from ..population import draw_spec
from ..population import job as new_job
from ..world import GRPOJOBS, JOBS, PODS, SERVICES, TEAMS, Object, World, quiet
from .base import Fault, name_of

POLICIES = ("Background", "Foreground", "Orphan")


def _note(world: World, job: Object, deed: Deed) -> int:
    return world.ledger.intend(
        Entry(job["metadata"]["uid"], job["status"]["attempt"], deed, at=time.time())
    )


def pod_deleted(world: World, chance: random.Random) -> str:
    """With its grace or without."""
    found = world.some_gang(chance)
    if found is None:
        return ""
    job, pods = found
    pod, options = chance.choice(pods), chance.choice(({}, {"gracePeriodSeconds": 0}))
    number = _note(world, job, Deed.DISRUPTED)
    world.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], **options)
    world.ledger.done(number)
    return f"{name_of(pod)} {options}"


def all_pods_deleted(world: World, chance: random.Random) -> str:
    """The whole gang at once."""
    found = world.some_gang(chance)
    if found is None:
        return ""
    job, pods = found
    number = _note(world, job, Deed.DISRUPTED)
    for pod in pods:
        world.delete(
            PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], gracePeriodSeconds=0
        )
    world.ledger.done(number)
    return f"{name_of(job)}: {len(pods)}"


def child_deleted(world: World, chance: random.Random) -> str:
    """The attempt's Job."""
    found = world.some_gang(chance)
    if found is None:
        return ""
    job, policy = found[0], chance.choice(POLICIES)
    number = _note(world, job, Deed.JOB_DELETED)
    name = child_job(job["metadata"]["name"], job["status"]["attempt"])
    world.delete(JOBS, job["metadata"]["namespace"], name, propagationPolicy=policy)
    world.ledger.done(number)
    return f"{name} of {name_of(job)}, {policy}"


def job_deleted(world: World, chance: random.Random) -> str:
    """A GRPOJob, in any phase."""
    if not (jobs := world.jobs()):
        return ""
    job, policy = chance.choice(jobs), chance.choice(POLICIES)
    world.delete_job(job, policy, chance.randint(1, 8))
    return f"{name_of(job)} {job.get('status', {}).get('phase')}, {policy}"


def job_replaced(world: World, chance: random.Random) -> str:
    """Deleted, and at once created again, with the same spec or with another."""
    if not (jobs := world.jobs()):
        return ""
    job = chance.choice(jobs)
    metadata, policy = job["metadata"], chance.choice(("Background", "Orphan"))
    spec = job["spec"] if chance.random() < 0.5 else draw_spec(chance)
    world.delete_job(job, policy, chance.randint(1, 8))
    made = quiet(
        lambda: world.post(GRPOJOBS, metadata["namespace"], new_job(metadata["name"], spec))
    )
    return (
        f"{name_of(job)} {job.get('status', {}).get('phase')}, {policy}, "
        f"{'made again' if made else 'still there'}"
    )


def service_deleted(world: World, chance: random.Random) -> str:
    """The Service that ranks find each other by."""
    team = chance.choice(TEAMS)
    world.delete(SERVICES, team, RENDEZVOUS_SERVICE)
    return team


FAULTS = (
    Fault("pod deleted", 4, pod_deleted),
    Fault("all pods deleted", 2, all_pods_deleted),
    Fault("Job deleted", 4, child_deleted),
    Fault("GRPOJob deleted", 4, job_deleted),
    Fault("GRPOJob deleted and created again", 4, job_replaced),
    Fault("Service deleted", 2, service_deleted),
)
