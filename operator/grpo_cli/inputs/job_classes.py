"""Gives a job of a file its GRPOJobClass, from another file or from the cluster.

The operator does the same for each attempt, so what a command shows is what will run.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_api.job import GRPOJobSpec
from grpo_api.text.contract import CLASS_KIND, CLASS_PLURAL, GROUP

from ..cluster import kubectl
from ..show.errors import KubectlError, ManifestError, OptionError
from .manifest import Job, load_classes

if TYPE_CHECKING:
    from grpo_api.status.status import AppliedJobClass

MISSING_KIND = "the server doesn't have a resource type"
IN_FILE = "the job's own file"
IN_CLUSTER = f"{IN_FILE}, else a cluster that --context names"


def add_argument(parser: ArgumentParser, unset: str = IN_CLUSTER) -> None:
    """The flag that says where the classes are; `unset`: where they are without it."""
    parser.add_argument(
        "--class",
        dest="job_class",
        metavar="FILE",
        help=f"file with the GRPOJobClass that the job names, or the default one; unset: {unset}",
    )


def class_of(options: Namespace, job: Job) -> "AppliedJobClass | None":
    """The class that a job of a file has, by the flags; None without one. Options without `context`
    are a local run's, which asks no cluster.

    Raises:
        ManifestError: there is no such class in the file or in the cluster.
        OptionError: the job names a class, and nothing says where it is.
        KubectlError: kubectl is missing or fails.
    """
    if options.job_class:
        named = _class_of_items(load_classes(options.job_class), job.spec, options.job_class)
        if named is None:
            why = "spec.jobClassName is unset, and none there is the default"
            print(f"grpo: no class of {options.job_class} is used: {why}", file=sys.stderr)
        return named
    if job.classes:
        return _class_of_items(job.classes, job.spec, "its file")
    has_cluster = "context" in options
    if has_cluster and options.context:
        return class_in_cluster(options, job.spec)
    if job.spec.job_class_name:
        other = "the cluster that has it by --context NAME"
        other = other if has_cluster else "job_class of LocalProcess"
        name = job.spec.job_class_name
        raise OptionError(f"spec.jobClassName is {name}: give its file by --class FILE, or {other}")
    return None


def class_in_cluster(options: Namespace, spec: GRPOJobSpec) -> "AppliedJobClass | None":
    """The class that a job has in the cluster; None without one.

    Raises:
        ManifestError: there is no such class.
        KubectlError: kubectl is missing or fails.
    """
    return _class_of_items(_classes_of_cluster(options, spec), spec, "the cluster")


def _class_of_items(
    items: Iterable[Mapping[str, Any]], spec: GRPOJobSpec, where: str
) -> "AppliedJobClass | None":
    """The class of these that the job names, or the default one; None without any."""
    # The operator's own reading of classes; a plan without a cluster waits for no other of its
    # modules.
    from grpo_kube.objects.json_reader import Unreadable
    from grpo_operator.records.job_class import job_class_facts, named_classes

    name = spec.job_class_name or ""
    try:
        job_class = named_classes(map(job_class_facts, items)).get(name)
    except Unreadable as error:
        raise ManifestError(f"{where} has a {CLASS_KIND} with a wrong field: {error}") from error
    if job_class is None and name:
        raise ManifestError(f"spec.jobClassName: {where} has no {CLASS_KIND} {name}")
    return job_class


def with_class(
    spec: GRPOJobSpec, job_class: "AppliedJobClass | None", metadata: Mapping[str, Any]
) -> GRPOJobSpec:
    """The effective spec.

    Raises:
        ManifestError: the class refuses the job.
    """
    if job_class is None:
        return spec
    # Without a class nothing is resolved, nor the types of a status read.
    from grpo_api.effective_spec import resolve

    resolution = resolve(spec, job_class, metadata.get("labels") or {})
    if resolution.problems or resolution.spec is None:
        raise ManifestError(*resolution.problems)
    return resolution.spec


def class_message(spec: GRPOJobSpec, job_class: "AppliedJobClass") -> str:
    """Which class a job has, and what its pods need of the namespace."""
    level = spec.platform.pod_security_level
    return f"{job_class}; its pods need the {level} pod security standard"


def _classes_of_cluster(options: Namespace, spec: GRPOJobSpec) -> list[dict[str, Any]]:
    """The classes of the cluster; none where it has no such kind, or where a job that names none
    may not see them."""
    target = Namespace(context=options.context, namespace=None)
    try:
        classes: list[dict[str, Any]] = kubectl.get_json(target, f"{CLASS_PLURAL}.{GROUP}")["items"]
    except KubectlError as error:
        if MISSING_KIND in str(error):
            return []
        # A cluster that does not answer now may have a default class.
        if spec.job_class_name or "(Forbidden)" not in str(error):
            raise
        print(f"grpo: no default {CLASS_KIND} is known: {error}", file=sys.stderr)
        return []
    return classes
