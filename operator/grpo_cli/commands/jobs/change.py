"""Changes a job that exists: `grpo suspend`, `resume`, `retry` and `delete`.

The Python client uses the same functions. Each is one request that `kubectl` could make, too.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from grpo_api.status.status import Phase

from ...cluster import kubectl
from ...show.errors import NotYet


def suspend_job(options: Namespace, name: str) -> str:
    """Set spec.suspend; return what becomes of the job."""
    _patch(options, name, suspend=True)
    return "suspended: it saves a checkpoint and gives its GPUs back"


def resume_job(options: Namespace, name: str) -> str:
    """Unset spec.suspend; return what becomes of the job."""
    _patch(options, name, suspend=False)
    return "resumed: it goes on from its last checkpoint once it has GPUs"


def retry_job(options: Namespace, name: str) -> str:
    """Raise spec.retry; return what becomes of the job.

    Raises:
        NotYet: it has not failed.
    """
    _, job = kubectl.get_job(options, name)
    if job.status.phase != Phase.FAILED:
        phase = job.status.phase or Phase.PENDING
        raise NotYet(f"{name} is {phase}; only a job that has failed is tried again")
    number = max(job.spec.retry, job.status.retry) + 1
    _patch(options, name, retry=number)
    return f"is tried again (spec.retry {number})"


def delete_job(options: Namespace, name: str) -> str:
    """Delete the object, whose pods the garbage collector ends; return what becomes of the job."""
    kubectl.run_kubectl(options, "delete", kubectl.RESOURCE, name, "--wait=false")
    return "is being deleted; checkpoints stay where spec.checkpoint keeps them"


def _patch(options: Namespace, name: str, **fields: Any) -> None:
    kubectl.patch_object(options, kubectl.RESOURCE, name, {"spec": fields})


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
