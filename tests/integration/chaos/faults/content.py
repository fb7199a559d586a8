"""Strangers' objects that look like ours, and statuses that this version can't read."""

import random
import time

from grpo_api.report.report import Result
from grpo_operator.records.names import (
    COMPONENT_RENDEZVOUS,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_UID,
    RENDEZVOUS_SERVICE,
    child_job,
)

from ..history import UNKNOWN_PHASE
from ..ledger import Deed, Entry
from ..trainer import container_status, said
from ..world import GRPOJOBS, JOBS, PODS, SERVICES, TEAMS, Object, World, quiet
from .base import Fault, name_of

WORDS = ("", "0", "1", "2", "-1", "abc", "007", "9" * 20, "9" * 63, "A.b-c_d", "NaN")


def _stray(world: World, chance: random.Random, job: Object, labels: dict[str, str]) -> str:
    """A pod that somebody made by hand; it goes later. Its name, or nothing."""
    team, name = job["metadata"]["namespace"], f"stray-{chance.randrange(10**6)}"
    body = {
        "metadata": {"name": name, "labels": {LABEL_JOB: job["metadata"]["name"], **labels}},
        "spec": {"containers": [{"name": "trainer", "image": "x"}]},
    }
    if not quiet(lambda: world.post(PODS, team, body)):
        return ""
    world.undo_after(
        chance.randint(2, 12), lambda: world.delete(PODS, team, name, gracePeriodSeconds=0)
    )
    return name


def strangers_pod(world: World, chance: random.Random) -> str:
    """A pod with a job's labels and any index and attempt."""
    if not (jobs := world.jobs()):
        return ""
    job = chance.choice(jobs)
    labels = {LABEL_INDEX: chance.choice(WORDS), LABEL_ATTEMPT: chance.choice(WORDS)}
    labels[LABEL_UID] = chance.choice((job["metadata"]["uid"], "x"))
    name = _stray(world, chance, job, labels)
    return (
        f"{name} of {name_of(job)}: {labels[LABEL_INDEX]!r}, {labels[LABEL_ATTEMPT]!r}"
        if name
        else ""
    )


def strangers_success(world: World, chance: random.Random) -> str:
    """A stranger's pod with all labels of rank 0 says that training is done."""
    found = world.some_gang(chance)
    if found is None:
        return ""
    job = found[0]
    labels = {
        LABEL_INDEX: "0",
        LABEL_ATTEMPT: str(job["status"]["attempt"]),
        LABEL_UID: job["metadata"]["uid"],
    }
    if not (name := _stray(world, chance, job, labels)):
        return ""
    how = said(Result.SUCCEEDED, step=999)
    status = {"status": container_status(how) | {"phase": "Succeeded"}}
    quiet(lambda: world.patch(PODS, job["metadata"]["namespace"], f"{name}/status", status))
    return f"{name} of {name_of(job)}"


def strangers_job(world: World, chance: random.Random) -> str:
    """A Job of the name that the next attempt would have."""
    if not (jobs := world.jobs("Queued", "Pending", "Running", "Suspended", "Starting")):
        return ""
    job = chance.choice(jobs)
    team = job["metadata"]["namespace"]
    name = child_job(job["metadata"]["name"], job.get("status", {}).get("attempt", 0) + 1)
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}
    body = {"metadata": {"name": name}, "spec": {"suspend": True, "template": template}}
    if not quiet(lambda: world.post(JOBS, team, body)):
        return ""
    # by its uid: the operator's own Job may bear the name by then
    uid = world.get(JOBS, team, name)["metadata"]["uid"]
    options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
    world.undo_after(
        chance.randint(2, 10), lambda: quiet(lambda: world.delete(JOBS, team, name, **options))
    )
    return f"{team}/{name}"


def strangers_service(world: World, chance: random.Random) -> str:
    """A Service of the name of ours, without our labels and leading to other pods; later deleted by
    its owner."""
    team = chance.choice(TEAMS)
    world.delete(SERVICES, team, RENDEZVOUS_SERVICE)
    spec = {"clusterIP": "None", "selector": {"app": "other"}, "ports": [{"port": 80}]}
    if not quiet(
        lambda: world.post(SERVICES, team, {"metadata": {"name": RENDEZVOUS_SERVICE}, "spec": spec})
    ):
        return ""
    world.undo_after(chance.randint(2, 10), lambda: _owner_deletes(world, team))
    return team


def _owner_deletes(world: World, team: str) -> None:
    found = [
        one for one in world.items(SERVICES, team) if one["metadata"]["name"] == RENDEZVOUS_SERVICE
    ]
    if found and found[0]["spec"].get("selector") == {"app": "other"}:
        world.delete(SERVICES, team, RENDEZVOUS_SERVICE)


def service_changed(world: World, chance: random.Random) -> str:
    """Somebody edits our Service: other pods, fewer labels."""
    team = chance.choice(TEAMS)
    labels = {LABEL_COMPONENT: chance.choice((None, "x", COMPONENT_RENDEZVOUS))}
    body = {"metadata": {"labels": labels}, "spec": {"selector": {"app": "other"}}}
    return team if quiet(lambda: world.patch(SERVICES, team, RENDEZVOUS_SERVICE, body)) else ""


def status_spoiled(world: World, chance: random.Random) -> str:
    """A newer version wrote a phase that this one doesn't know; somebody mends it later."""
    jobs = [
        one
        for one in world.jobs()
        if one.get("status", {}).get("phase") not in (None, UNKNOWN_PHASE)
    ]
    if not jobs:
        return ""
    job = chance.choice(jobs)
    metadata, known = job["metadata"], job["status"]["phase"]
    world.ledger.intend(
        Entry(metadata["uid"], job["status"].get("attempt", 0), Deed.SPOILED, at=time.time())
    )
    path = f"{metadata['name']}/status"

    def write(phase: str, **seen: str) -> bool:
        status = {"metadata": {"uid": metadata["uid"], **seen}, "status": {"phase": phase}}
        return quiet(lambda: world.patch(GRPOJOBS, metadata["namespace"], path, status))

    # what is put back later must be the word for the conditions that stay meanwhile
    if not write(UNKNOWN_PHASE, resourceVersion=metadata["resourceVersion"]):
        return ""
    world.undo_after(chance.randint(1, 6), lambda: write(known))
    return f"{name_of(job)} {known}"


FAULTS = (
    Fault("stranger's pod with a job's labels", 4, strangers_pod),
    Fault("stranger's pod says Succeeded", 3, strangers_success),
    Fault("stranger's Job of the next name", 3, strangers_job),
    Fault("stranger's Service of our name", 1, strangers_service),
    Fault("Service changed", 1, service_changed),
    Fault("status of a newer version", 3, status_spoiled),
)
