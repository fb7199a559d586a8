"""`grpo preflight`: says what is wrong with a job before it is applied.

The checks are the trainer's own, in a process on this machine, and the first prompt is shown. What
only the cluster has, such as volumes, ConfigMaps and Secrets, is listed as not checked. With
--in-cluster they run in the pod that the operator would start, which has all of it.
"""

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.report.preflight import PreflightReport, SkippedCheck
from grpo_operator.pods import pod_spec as pod_defaults
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.pods.preflight_job import preflight_job
from grpo_operator.records.names import LABEL_JOB, LABEL_MANAGED_BY
from grpo_operator.records.parsing import grpojob_record

from ..cluster import job_pods, kubectl
from ..cluster.delivery_pod import pods_with_image
from ..inputs import job_classes, local_preflight
from ..inputs.manifest import add_filename, load_specs
from ..show.documents import add_output, print_document
from ..show.errors import KubectlError, KubectlExitError, NotYet
from ..show.preflight_report import print_prompt, print_report
from ..show.terminal import console

FOUND_PROBLEMS = 1
"""Exit code where a job has a problem."""


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_filename(parser, required=True)
    parser.add_argument(
        "--in-cluster",
        action="store_true",
        help="check in a pod with the job's volumes and secrets",
    )
    add_output(parser, "text")
    pod_defaults.add_arguments(parser, "")
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Checks one job after the other; 0 if all pass, 1 if one has a problem."""
    jobs = load_specs(options.filename)
    if not options.in_cluster:
        local_preflight.require_trainer("check by --in-cluster")
    out = console()
    documents: list[dict[str, Any]] = []
    code = 0
    for job in jobs:
        name = job.metadata["name"]
        namespace = options.namespace or job.metadata.get("namespace")
        if options.in_cluster:
            job_options = Namespace(**{**vars(options), "namespace": namespace})
            job_class = job_classes.class_in_cluster(job_options, job.spec)
            spec = job_classes.with_class(job.spec, job_class, job.metadata)
            report, prompt = _check_in_cluster(job_options, job.metadata, spec), ""
        else:
            report, prompt = local_preflight.check_here(name, namespace, job.spec)
            report = report.model_copy(
                update={"skipped": [*report.skipped, *_hub_model_checks(job.spec)]}
            )
        if options.output != "text":
            documents.append({"name": name} | report.model_dump(mode="json", by_alias=True))
        else:
            print_report(out, name, report)
            if prompt:
                print_prompt(out, prompt)
        if report.problems:
            code = FOUND_PROBLEMS
    if options.output != "text":
        print_document(options.output, documents)
    return code


def _hub_model_checks(spec: GRPOJobSpec) -> Iterator[SkippedCheck]:
    """What a folder of this machine says nothing of: the model's repository on the hub."""
    folder = Path(spec.model.name)
    if folder.is_absolute() or not folder.is_dir():
        return
    message = (
        f"the folder {folder} of this machine was checked, and pods take {folder} of the hub; for "
        f"the folder set spec.model.volume, and write /models/{folder.name}"
    )
    yield SkippedCheck(path="spec.model.name", message=message)


def check_job(metadata: Mapping[str, Any], spec: GRPOJobSpec, pods: PodDefaults) -> dict[str, Any]:
    """The Job that the operator would create, under another name and for nobody: there may be no
    GRPOJob yet, and an operator must not take it for its own."""
    # A policy may ask for the GRPOJob's labels on its pods.
    fields = ("name", "namespace", "labels", "annotations")
    known = {field: metadata[field] for field in fields if metadata.get(field)}
    known |= {"uid": "preflight", "resourceVersion": "1"}
    item = {"metadata": known, "spec": spec.model_dump(mode="json", exclude_none=True)}
    body = preflight_job(grpojob_record(item), spec, None, pods)
    body["metadata"]["name"] = check_name(metadata["name"])
    del body["metadata"]["namespace"]  # it may be the context's
    del body["metadata"]["ownerReferences"]
    for labelled in (body["metadata"], body["spec"]["template"]["metadata"]):
        for label in (LABEL_JOB, LABEL_MANAGED_BY):
            labelled["labels"].pop(label, None)
    return body


def check_name(job: str) -> str:
    """Name of the Job."""
    return f"{job}-check"


def _check_in_cluster(
    options: Namespace, metadata: Mapping[str, Any], spec: GRPOJobSpec
) -> PreflightReport:
    """The report of a pod; its Job is deleted afterwards."""
    name = metadata["name"]
    pods = pods_with_image(options, name, spec)
    placed = {**metadata, "namespace": options.namespace or "default"}
    _create_job(options, check_job(placed, spec, pods))
    try:
        return _awaited_report(options, check_name(name))
    finally:
        # The report counts; a Job that can't be deleted now makes room for the next check.
        with contextlib.suppress(KubectlError):
            kubectl.run_kubectl(options, "delete", "job", check_name(name), "--wait=false")


def _create_job(options: Namespace, body: dict[str, Any]) -> None:
    """Create the Job; one that an earlier check left makes room if it has ended."""
    try:
        kubectl.create_object(options, body)
    except KubectlExitError:
        name = body["metadata"]["name"]
        earlier = job_pods.find_job(options, name)
        if earlier is None or not job_pods.job_end(earlier):
            raise
        kubectl.run_kubectl(options, "delete", "job", name, "--wait")
        kubectl.create_object(options, body)


def _awaited_report(options: Namespace, name: str) -> PreflightReport:
    for job, pods in job_pods.follow_job(options, name):
        for report in map(_pod_report, pods):
            if report is not None:
                return report
        if job is None or job_pods.job_end(job):
            raise NotYet(f"job {name} ended without a report; see its pod's log")
    raise AssertionError("following has no end")


def _pod_report(pod: dict[str, Any]) -> PreflightReport | None:
    """What a pod that has ended left behind."""
    for message in job_pods.termination_messages(pod):
        with contextlib.suppress(ValidationError):
            return PreflightReport.model_validate_json(message)
    return None
