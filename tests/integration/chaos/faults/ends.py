"""Training that ends badly: what trainers report, what kernels and kubelets do, and words that
can't be believed."""

import json
import random
import time

from grpo_api.report.report import Result
from grpo_api.report.root_cause import DIVERGED

from ..ledger import Deed, Entry
from ..trainer import End, end, rank_of, said
from ..world import PODS, Object, World, quiet
from .base import Fault, name_of

REPORTED = (
    Result.OUT_OF_MEMORY, Result.ERROR, Result.ERROR, Result.HANG, Result.REWARD_ERROR,
    Result.RENDEZVOUS_TIMEOUT,
)  # fmt: skip
PERMANENT = (Result.BAD_INPUT, Result.WEIGHTS_DIFFER)
SKEWS = (0.0, 0.0, 5.0, -5.0, 600.0, -600.0)
"""Seconds by which nodes' clocks are off."""


def _one(world: World, chance: random.Random, how: End) -> str:
    """Ends one pod of some gang."""
    found = world.some_gang(chance)
    if found is None:
        return ""
    job, pods = found
    pod = chance.choice(pods)
    lagging = chance.random() < 0.2
    if not end(world, job, pod, how, lagging=lagging):
        return ""
    if lagging:
        _catch_up(world, chance, pod, how)
    return (
        f"{name_of(job)} attempt {job['status']['attempt']} rank {rank_of(pod)}: {how.result} "
        f"{how.skew:+.0f} s"
    )


def _catch_up(world: World, chance: random.Random, pod: Object, how: End) -> None:
    """The kubelet tells of the pod's phase a moment after the container's."""
    metadata, phase = pod["metadata"], "Failed" if how.code else "Succeeded"
    path, status = f"{metadata['name']}/status", {"status": {"phase": phase}}
    world.undo_after(
        chance.randint(1, 3),
        lambda: quiet(lambda: world.patch(PODS, metadata["namespace"], path, status)),
    )


def trainer_failed(world: World, chance: random.Random) -> str:
    """A rank reports what happened, and its node's clock may be off."""
    result = chance.choice(REPORTED)
    how = said(result, message="as chance would have it")
    return _one(
        world, chance, End(result, how.code, message=how.message, skew=chance.choice(SKEWS))
    )


def trainer_gave_up(world: World, chance: random.Random) -> str:
    """What the same input would give again."""
    return _one(world, chance, said(chance.choice(PERMANENT), message="no use trying again"))


def trainer_diverged(world: World, chance: random.Random) -> str:
    """On some generation, which a job may go on without."""
    first = chance.randrange(10**6)
    on = {"first": first, "last": first + chance.randrange(3)}
    return _one(
        world,
        chance,
        said(chance.choice(sorted(DIVERGED)), message="the loss is nan", divergedOn=on),
    )


def trainer_preempted(world: World, chance: random.Random) -> str:
    """The trainer was told to end and says so."""
    return _one(world, chance, said(Result.PREEMPTED, message="SIGTERM"))


def container_died(world: World, chance: random.Random) -> str:
    """No word of the trainer: the kernel, a signal, or exit code 0 out of nowhere."""
    ends = (
        End(Result.OUT_OF_MEMORY, 137, reason="OOMKilled"), End(Result.ERROR, 139),
        End(Result.ERROR, 1),
        End(Result.ERROR, 0), End(Result.OUT_OF_MEMORY, 40), End(Result.HANG, 41),
    )  # fmt: skip
    chosen = chance.choice(ends)
    return _one(
        world,
        chance,
        End(chosen.result, chosen.code, reason=chosen.reason, skew=chance.choice(SKEWS)),
    )


def several_ranks_failed(world: World, chance: random.Random) -> str:
    """One rank is the cause and the others lose their connections."""
    found = world.some_gang(chance)
    if found is None or len(found[1]) < 2:
        return ""
    job, pods = found
    chance.shuffle(pods)
    cause = chance.choice(REPORTED)
    for position, pod in enumerate(pods):
        result = cause if position == 0 else Result.ERROR
        told = said(
            result,
            message="the cause" if position == 0 else "connection closed by peer",
            rank=rank_of(pod),
        )
        end(
            world, job, pod, End(result, told.code, message=told.message, skew=chance.choice(SKEWS))
        )
    return f"{name_of(job)}: {cause} of {len(pods)}"


def lying_outcome(world: World, chance: random.Random) -> str:
    """A success of another attempt, or numbers that nobody can believe."""
    found = world.some_gang(chance)
    if found is None:
        return ""
    job, pods = found
    pod = min(pods, key=rank_of)
    attempt = job["status"]["attempt"]
    lies = (
        (None, {"result": "Succeeded", "attempt": attempt + 98}),
        (Result.SUCCEEDED, {"result": "Succeeded", "step": 10**23, "totalSteps": -4}),
        (
            Result.SUCCEEDED,
            {
                "result": "Succeeded",
                "step": -1,
                "rank": 10**30,
                "metrics": {"kl": "NaN", "": 1e999},
            },
        ),
        (
            Result.SUCCEEDED,
            {"result": "Succeeded", "message": "\u202e\U0001f4a5 \x00\x1b[31m" * 40},
        ),
        (Result.ERROR, {"result": "Error", "step": 2**63, "message": "x" * 3072}),
        (None, {"result": "Draining"}),
        (None, {"result": ["Succeeded"], "step": 3}),
    )
    result, told = chance.choice(lies)
    code = 0 if "Succeeded" in str(told["result"]) else 1
    if not end(world, job, pod, End(result, code, message=json.dumps(told))):
        return ""
    return f"{name_of(job)} attempt {attempt}: {str(told)[:80]}"


def garbage_outcome(world: World, chance: random.Random) -> str:
    """4 KB of anything."""
    alphabet = '{}[]":,0123456789abcdef\\ \n\u00e9\u4e2d\U0001f525'
    noise = "".join(chance.choices(alphabet, k=chance.choice((1, 200, 4096))))
    code = chance.choice((0, 1, 2, 137, 255))
    return _one(world, chance, End(None if code != 1 else Result.ERROR, code, message=noise))


def _disrupt(world: World, chance: random.Random, status: Object) -> str:
    found = world.some_gang(chance)
    if found is None:
        return ""
    job, pods = found
    pod = chance.choice(pods)
    entry = Entry(
        job["metadata"]["uid"],
        job["status"]["attempt"],
        Deed.DISRUPTED,
        at=time.time(),
        rank=rank_of(pod),
    )
    number = world.ledger.intend(entry)
    metadata = pod["metadata"]
    if not quiet(
        lambda: world.patch(
            PODS, metadata["namespace"], f"{metadata['name']}/status", {"status": status}
        )
    ):
        return ""
    world.ledger.done(number)
    return f"{name_of(job)} attempt {job['status']['attempt']} {metadata['name']}"


def pod_evicted(world: World, chance: random.Random) -> str:
    """The kubelet lacked memory or disk."""
    status = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "the node was low on memory",
        "containerStatuses": [],
    }
    return _disrupt(world, chance, status)


def pod_refused(world: World, chance: random.Random) -> str:
    """The kubelet refuses what the scheduler gave it, as a broken GPU plugin makes it."""
    message = "Allocate failed due to no healthy devices present"
    status = {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": message,
        "containerStatuses": [],
    }
    return _disrupt(world, chance, status)


def pod_preempted(world: World, chance: random.Random) -> str:
    """The scheduler wanted its place: a condition first, then the deletion."""
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "preempted",
    }
    told = _disrupt(world, chance, {"conditions": [target]})
    if told:
        namespace, pod = told.split("/")[0], told.split()[-1]
        quiet(lambda: world.delete(PODS, namespace, pod))
    return told


FAULTS = (
    Fault("trainer failed", 8, trainer_failed),
    Fault("trainer gave up for good", 1, trainer_gave_up),
    Fault("trainer diverged", 4, trainer_diverged),
    Fault("trainer preempted", 2, trainer_preempted),
    Fault("container died without a word", 5, container_died),
    Fault("several ranks failed", 4, several_ranks_failed),
    Fault("lying outcome", 5, lying_outcome),
    Fault("garbage outcome", 3, garbage_outcome),
    Fault("pod evicted", 2, pod_evicted),
    Fault("pod refused by its node", 2, pod_refused),
    Fault("pod preempted", 2, pod_preempted),
)
