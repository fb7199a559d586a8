"""`grpo render`: the objects that the operator would create for a job.

A platform engineer can read, diff and policy-check them before anything runs. From a file the job is planned first; by
name the plan is the one that the operator committed.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

import yaml

from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan
from grpo_api.status import ResumeSource
from grpo_operator.manifests import Attempt, checkpoint_volume_claim, indexed_job, rendezvous_service
from grpo_operator.names import ObjectKey, checkpoint_claim, inherited, run_folder

from . import kubectl, sources
from .errors import NotYet
from .manifest import load_specs

UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("name", nargs="?", help="a GRPOJob of the cluster, with the plan of its last attempt")
    source.add_argument("-f", "--filename", help="file with GRPOJobs; - is standard input")
    parser.add_argument("--trainer-image", default="grpo-trainer", help="image of jobs without spec.image")
    kubectl.add_namespace(parser)
    sources.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Prints YAML documents in the order in which the operator creates the objects."""
    attempts = _planned(options) if options.filename else [_committed(options)]
    objects = [item for attempt in attempts for item in _objects(attempt, options.trainer_image)]
    print(yaml.safe_dump_all(objects, sort_keys=False, width=120), end="")
    return 0


def _planned(options: Namespace) -> list[Attempt]:
    """The first attempt of each job in the file."""
    attempts = []
    for metadata, spec in load_specs(options.filename):
        result = sources.planned(options, spec)
        if result.chosen is None:
            raise NotYet(f"{metadata['name']}: {result.message}")
        named = {
            **metadata,
            "namespace": options.namespace or metadata.get("namespace") or "default",
            "uid": metadata.get("uid") or UNKNOWN_UID,
        }
        attempts.append(_attempt(named, spec, result.chosen, 1, _unresolved(spec)))
    return attempts


def _committed(options: Namespace) -> Attempt:
    """The last attempt of a job of the cluster."""
    metadata, job = kubectl.get_job(options, options.name)
    if job.status.plan is None:
        said = "; ".join(c.message for c in job.status.conditions if c.status == "False" and c.type == "Admitted")
        raise NotYet(f"{options.name} has no plan yet: {said or 'the operator has not seen it'}")
    number = max(1, job.status.attempt)
    return _attempt(metadata, job.spec, job.status.plan, number, job.status.resume_from)


def _unresolved(spec: GRPOJobSpec) -> ResumeSource | None:
    """What stands for the other job's checkpoints as long as only its name is known."""
    name = spec.resume_from.grpo_job if spec.resume_from else None
    if name is None:
        return None
    folder = run_folder(name, UNKNOWN_UID)
    return ResumeSource(grpo_job=name, uid=UNKNOWN_UID, claim_name=checkpoint_claim(name), folder=folder)


def _attempt(
    metadata: dict[str, Any], spec: GRPOJobSpec, plan: ExecutionPlan, number: int, source: ResumeSource | None
) -> Attempt:
    """The attempt of a GRPOJob with this metadata."""
    return Attempt(
        key=ObjectKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        spec=spec,
        plan=plan,
        number=number,
        labels=inherited(metadata.get("labels")),
        annotations=inherited(metadata.get("annotations")),
        source=source,
    )


def _objects(attempt: Attempt, image: str) -> list[dict[str, Any]]:
    claim = checkpoint_volume_claim(attempt.key, attempt.uid, attempt.spec)
    service = rendezvous_service(attempt.key.namespace)
    job = indexed_job(attempt, attempt.spec.image or image)
    return [item for item in (service, claim, job) if item is not None]
