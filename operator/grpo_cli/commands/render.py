"""`grpo render`: the objects that the operator would create for a job.

A platform engineer can read, diff and policy-check them before anything runs. From a file the job
is planned first; by name the plan is the one that the operator committed.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

import yaml

from grpo_api.job import GRPOJobSpec
from grpo_api.status.status import AppliedJobClass, ResumeSource
from grpo_operator.pods import pod_spec
from grpo_operator.pods.manifests import (
    Attempt,
    checkpoint_volume_claim,
    engines_job,
    indexed_job,
    with_status,
)
from grpo_operator.pods.namespace_objects import engine_service, rendezvous_service
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.records.names import checkpoint_claim, run_folder

from ..cluster import kubectl
from ..cluster.delivery_pod import TRAINER_IMAGE, build_attempt
from ..inputs import job_classes, plan_inputs
from ..inputs.manifest import add_filename, load_specs
from ..show.errors import NotYet
from ..show.kubectl_yaml import KubectlDumper

UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "name", nargs="?", help="a GRPOJob of the cluster, with the plan of its last attempt"
    )
    add_filename(source)
    pod_spec.add_arguments(parser, TRAINER_IMAGE)
    kubectl.add_namespace(parser)
    plan_inputs.add_arguments(parser)
    job_classes.add_argument(parser)


def run(options: Namespace) -> int:
    """Prints YAML documents in the order in which the operator creates the objects."""
    attempts = (
        [_committed_attempt(options)] if options.filename is None else _planned_attempts(options)
    )
    objects = [
        item
        for attempt, _ in attempts
        for item in _objects(attempt, pod_spec.defaults_from_flags(options))
    ]
    for attempt, job_class in attempts:
        if job_class:
            print(f"# {attempt.key.name}: {job_classes.class_message(attempt.spec, job_class)}")
    print(yaml.dump_all(objects, Dumper=KubectlDumper, sort_keys=False, width=120), end="")
    return 0


def _planned_attempts(options: Namespace) -> list[tuple[Attempt, AppliedJobClass | None]]:
    """The first attempt of each job in the file, with its class."""
    attempts = []
    for job in load_specs(options.filename):
        metadata = job.metadata
        job_class = job_classes.class_of(options, job)
        spec = job_classes.with_class(job.spec, job_class, metadata)
        result = plan_inputs.make_plan(options, spec)
        if result.chosen is None:
            raise NotYet(f"{metadata['name']}: {result.message}")
        namespace = options.namespace or metadata.get("namespace")
        namespace = namespace or kubectl.context_namespace(options)
        uid = metadata.get("uid") or UNKNOWN_UID
        named = {**metadata, "namespace": namespace, "uid": uid}
        attempt = build_attempt(named, spec, result.chosen, 1, _unresolved_source(spec))
        attempts.append((attempt, job_class))
    return attempts


def _committed_attempt(options: Namespace) -> tuple[Attempt, AppliedJobClass | None]:
    """The last attempt of a job of the cluster, with its class."""
    metadata, job = kubectl.get_job(options, options.name)
    if job.status.plan is None:
        refused = [
            condition
            for condition in job.status.conditions
            if condition.type == "Admitted" and condition.status == "False"
        ]
        reasons = "; ".join(condition.message for condition in refused)
        raise NotYet(f"{options.name} has no plan yet: {reasons or 'the operator has not seen it'}")
    number = max(1, job.status.attempt)
    attempt = build_attempt(metadata, job.spec, job.status.plan, number, None)
    return with_status(attempt, job.status), job.status.job_class


def _unresolved_source(spec: GRPOJobSpec) -> ResumeSource | None:
    """A placeholder for the other job's checkpoints: only its name is known."""
    name = spec.resume_from.grpo_job if spec.resume_from else None
    if name is None:
        return None
    folder = run_folder(name, UNKNOWN_UID)
    return ResumeSource(
        grpo_job=name, uid=UNKNOWN_UID, claim_name=checkpoint_claim(name), folder=folder
    )


def _objects(attempt: Attempt, pods: PodDefaults) -> list[dict[str, Any]]:
    claim = checkpoint_volume_claim(attempt.key, attempt.uid, attempt.spec)
    namespace, engines = attempt.key.namespace, engines_job(attempt, pods)
    services = (rendezvous_service(namespace), engine_service(namespace) if engines else None)
    return [
        item for item in (*services, claim, indexed_job(attempt, pods), engines) if item is not None
    ]
