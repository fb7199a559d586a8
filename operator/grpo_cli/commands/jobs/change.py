"""`grpo suspend`, `resume`, `retry` and `delete`: what a user changes of a job that exists, each a
patch that `kubectl` could make, too."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from grpo_api.status.status import Phase

from ...cluster import kubectl
from ...show.errors import NotYet


def _suspend(options: Namespace) -> str:
    _patch(options, suspend=True)
    return "suspended: it saves a checkpoint and gives its GPUs back"


def _resume(options: Namespace) -> str:
    _patch(options, suspend=False)
    return "resumed: it goes on from its last checkpoint once it has GPUs"


def _retry(options: Namespace) -> str:
    """Raise spec.retry of a job that failed."""
    _, job = kubectl.get_job(options, options.name)
    if job.status.phase != Phase.FAILED:
        phase = job.status.phase or Phase.PENDING
        raise NotYet(f"{options.name} is {phase}; only a job that has failed is tried again")
    number = max(job.spec.retry, job.status.retry) + 1
    _patch(options, retry=number)
    return f"is tried again (spec.retry {number})"


def _delete(options: Namespace) -> str:
    kubectl.run_kubectl(options, "delete", kubectl.RESOURCE, options.name, "--wait=false")
    return "is being deleted; checkpoints stay where spec.checkpoint keeps them"


def _patch(options: Namespace, **fields: Any) -> None:
    kubectl.patch_object(options, kubectl.RESOURCE, options.name, {"spec": fields})


def _registration(act: Callable[[Namespace], str]) -> Callable[[ArgumentParser], None]:
    def run(options: Namespace) -> int:
        print(f"{options.name} {act(options)}")
        return 0

    def register(parser: ArgumentParser) -> None:
        parser.add_argument("name", help="name of the GRPOJob")
        kubectl.add_arguments(parser)
        parser.set_defaults(run=run)

    return register


register_suspend = _registration(_suspend)
register_resume = _registration(_resume)
register_retry = _registration(_retry)
register_delete = _registration(_delete)
