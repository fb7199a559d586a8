"""Ends training as trainers and kubelets do: by what a pod's status says, written as the kubelet
writes it.

Nothing trains here. Each end is written into the ledger before it is done.
"""

import json
import random
import time
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Any

from grpo_api.report.report import EXIT_CODES, Result
from grpo_api.text.contract import CONTAINER
from grpo_operator.records.names import LABEL_INDEX

from .ledger import Deed, Entry
from .world import PODS, SILENT, Object, World, quiet

SUCCESS_SHARE = 0.12
"""Share of the running jobs that finish their training between two faults."""


@dataclass(frozen=True, slots=True)
class End:
    """How a container ends. `result` is what a reader can know of it; None for one that tells
    nothing."""

    result: Result | None
    code: int
    _: KW_ONLY
    message: str = ""
    reason: str = ""
    skew: float = 0.0
    """Seconds by which the node's clock is ahead."""


def said(result: Result, **more: Any) -> End:
    """An end with an outcome in its termination message."""
    return End(result, EXIT_CODES[result], message=json.dumps({"result": result, **more}))


def rank_of(pod: Object) -> int:
    """Its completion index."""
    return int(pod["metadata"].get("labels", {}).get(LABEL_INDEX, 0))


def end(world: World, job: Object, pod: Object, how: End, *, lagging: bool = False) -> bool:
    """Ends a pod's container; `lagging`: the pod's phase stays Running, as for a moment with a real
    kubelet."""
    if SILENT in pod["metadata"].get("annotations", {}):
        return False
    attempt = job["status"]["attempt"]
    entry = Entry(
        job["metadata"]["uid"],
        attempt,
        Deed.ENDED,
        at=time.time(),
        rank=rank_of(pod),
        result=how.result,
    )
    number = world.ledger.intend(entry)
    metadata = pod["metadata"]
    status = container_status(how) | (
        {} if lagging else {"phase": "Failed" if how.code else "Succeeded"}
    )
    # the uid lest another pod be met, though names of pods are hardly ever used twice
    body = {"metadata": {"uid": metadata["uid"]}, "status": status}
    ended = quiet(
        lambda: world.patch(PODS, metadata["namespace"], f"{metadata['name']}/status", body)
    )
    if ended:
        world.ledger.done(number)
    return ended


def container_status(how: End) -> Object:
    """What the kubelet writes of a container that has ended so."""
    at = datetime.fromtimestamp(time.time() + how.skew, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    reason = how.reason or ("Error" if how.code else "Completed")
    terminated = {
        "exitCode": how.code,
        "reason": reason,
        "message": how.message,
        "finishedAt": at,
        "startedAt": at,
    }
    container = {"name": CONTAINER, "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    return {"containerStatuses": [{**container, "state": {"terminated": terminated}}]}


def train(world: World, chance: random.Random) -> None:
    """What happens to jobs without any fault: some get to their end."""
    for job in world.jobs("Running"):
        if chance.random() < SUCCESS_SHARE:
            succeed(world, job)


def succeed(world: World, job: Object) -> bool:
    """Lets all ranks of a job's attempt succeed, rank 0 last, as it saves the model; False when it
    has no pods."""
    pods = sorted(world.pods_of(job), key=rank_of, reverse=True)
    done = [
        end(
            world,
            job,
            pod,
            said(
                Result.SUCCEEDED, rank=rank_of(pod), step=8, totalSteps=8, message="trained 8 steps"
            ),
        )
        for pod in pods
        if pod["status"].get("phase") == "Running"
    ]
    return any(done)
