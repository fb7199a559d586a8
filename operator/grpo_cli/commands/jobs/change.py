"""Changes a job that exists: `grpo suspend`, `resume`, `retry` and `delete`.

The Python client uses the same functions. Each is one request that `kubectl` could make, too.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_api.status.status import ConditionType, Phase

from ...cluster import kubectl
from ...cluster.job_end import is_retry_pending
from ...show.errors import NotYet

_HOLDING = (Phase.STARTING, Phase.RUNNING)
"""Phases in which a job has pods."""
_LOSS = "its steps so far are lost, since spec.checkpoint names no volume or store"


class _State(NamedTuple):
    """What a change depends on, of a job that another version of the operator may have written."""

    phase: str
    is_suspended: bool
    """`spec.suspend`, which the operator may not have acted on yet."""
    loses_steps: bool
    """True if the status says that no checkpoint outlives the pods."""


def suspend_job(options: Namespace, name: str) -> str:
    """Set spec.suspend; return what becomes of the job.

    Raises:
        NotYet: it has ended, or is being deleted.
    """
    state = _read_state(options, name)
    if state.phase in (Phase.SUCCEEDED, Phase.FAILED):
        raise NotYet(f"{name} is {state.phase}; only a job that has not ended is suspended")
    if state.is_suspended:
        return "is suspended already"
    _patch(options, name, suspend=True)
    if state.phase in _HOLDING and state.loses_steps:
        return f"suspended: it gives its GPUs back and will start again; {_LOSS}"
    if state.phase in _HOLDING:
        return "suspended: it saves a checkpoint and gives its GPUs back"
    return "suspended: it does not start until it is resumed"


def resume_job(options: Namespace, name: str) -> str:
    """Unset spec.suspend; return what becomes of the job.

    Raises:
        NotYet: it has succeeded, or is being deleted.
    """
    state = _read_state(options, name)
    if state.phase == Phase.SUCCEEDED:
        raise NotYet(f"{name} is {state.phase}; only a job that has not ended is resumed")
    if not state.is_suspended:
        return f"is {state.phase} and not suspended"
    _patch(options, name, suspend=False)
    if state.phase == Phase.FAILED:
        return "resumed: it has failed, and goes on only if it is tried again (grpo retry)"
    if state.loses_steps:
        return f"resumed: it starts again once it has GPUs; {_LOSS}"
    return "resumed: it goes on from its last checkpoint once it has GPUs"


def retry_job(options: Namespace, name: str) -> str:
    """Raise spec.retry; return what becomes of the job.

    Raises:
        NotYet: it has not failed, or is being deleted.
    """
    item = kubectl.get_object_of_job(options, name)
    _require_lasting(name, item)
    _, job = kubectl.read_job(item)
    if job.status.phase != Phase.FAILED:
        phase = job.status.phase or Phase.PENDING
        raise NotYet(f"{name} is {phase}; only a job that has failed is tried again")
    number = job.spec.retry
    if not is_retry_pending(job.spec, job.status):
        number = max(job.spec.retry, job.status.retry) + 1
        _patch(options, name, retry=number)
    once = " once it is resumed (grpo resume)" if job.spec.suspend else ""
    return f"is tried again{once} (spec.retry {number})"


def delete_job(options: Namespace, name: str) -> str:
    """Delete the object, whose pods the garbage collector ends; return what becomes of the job."""
    kubectl.require_name(name)
    kubectl.run_kubectl(options, "delete", kubectl.RESOURCE, name, "--wait=false")
    return "is being deleted; checkpoints stay where spec.checkpoint keeps them"


def _read_state(options: Namespace, name: str) -> _State:
    item = kubectl.get_object_of_job(options, name)
    _require_lasting(name, item)
    spec, status = item.get("spec") or {}, item.get("status") or {}
    conditions = status.get("conditions") or []
    return _State(
        phase=str(status.get("phase") or Phase.PENDING),
        is_suspended=spec.get("suspend") is True,
        loses_steps=any(map(_is_unrecoverable, conditions)),
    )


def _is_unrecoverable(condition: object) -> bool:
    if not isinstance(condition, dict) or condition.get("type") != ConditionType.RECOVERABLE:
        return False
    return condition.get("status") == "False"


def _require_lasting(name: str, item: dict[str, Any]) -> None:
    """Make sure that the job is not being deleted: nothing can keep it then.

    Raises:
        NotYet: it is.
    """
    since = item["metadata"].get("deletionTimestamp")
    if since:
        raise NotYet(f"{name} is being deleted, since {since}; create it again once it is gone")


def _patch(options: Namespace, name: str, **fields: Any) -> None:
    patch = json.dumps({"spec": fields})
    kubectl.run_kubectl(
        options, "patch", kubectl.RESOURCE, name, "--type=merge", f"--patch={patch}"
    )


def _registration(act: Callable[[Namespace, str], str]) -> Callable[[ArgumentParser], None]:
    def run(options: Namespace) -> int:
        print(f"{options.name} {act(options, options.name)}")
        return 0

    def register(parser: ArgumentParser) -> None:
        parser.add_argument("name", help="name of the GRPOJob")
        kubectl.add_arguments(parser)
        parser.set_defaults(run=run)

    return register


register_suspend = _registration(suspend_job)
register_resume = _registration(resume_job)
register_retry = _registration(retry_job)
register_delete = _registration(delete_job)
