"""Gives a job that asks for an attempt its GRPOJobClass, and says why it can't have it.

A class that is missing, and pods that their namespace's pod security label forbids, keep a job
waiting: both may change. A job that its class refuses waits for a change of either. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from grpo_api.effective_spec import applied_class, resolve
from grpo_api.pods.platform import PlatformSpec, PodSecurityLevel
from grpo_api.status.status import AppliedJobClass
from grpo_api.text.contract import CLASS_KIND, DEFAULT_CLASS_ANNOTATION
from grpo_kube.objects.json_reader import JsonObject

from .names import LABEL_WORKLOAD_PRIORITY
from .reasons import Reason
from .records import GRPOJobRecord

ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"


class JobClassFacts(NamedTuple):
    """A GRPOJobClass of the cluster."""

    applied: AppliedJobClass
    created: float
    is_default: bool


def job_class_facts(item: object) -> JobClassFacts:
    """Read a GRPOJobClass object.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = JsonObject(item)
    meta = whole.part("metadata")
    name = meta.required_text("name")
    generation = meta.integer("generation")
    applied = applied_class(name, generation, whole.raw("spec"))
    is_default = meta.part("annotations").text(DEFAULT_CLASS_ANNOTATION) == "true"
    return JobClassFacts(applied, meta.time("creationTimestamp") or 0.0, is_default)


def enforced_level(item: object) -> tuple[str, str]:
    """Name and enforced pod security standard of a Namespace; empty without the label."""
    meta = JsonObject(item).part("metadata")
    return meta.required_text("name"), meta.part("labels").text(ENFORCE_LABEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClasses:
    """The classes of the cluster, and what namespaces allow."""

    by_name: Mapping[str, AppliedJobClass] = field(default_factory=dict)
    """The default one has the name ``, too."""
    problem: str = ""
    """Why classes can't be seen."""
    enforced_levels: Mapping[str, str] = field(default_factory=dict)
    """By namespace; empty where namespaces can't be seen."""


def named_classes(classes: Iterable[JobClassFacts]) -> dict[str, AppliedJobClass]:
    """Classes by name; of several defaults the newest counts, as of StorageClasses."""
    sorted_classes = sorted(
        classes, key=lambda job_class: (-job_class.created, job_class.applied.name)
    )
    by_name = {job_class.applied.name: job_class.applied for job_class in sorted_classes}
    default = next(
        (job_class.applied for job_class in sorted_classes if job_class.is_default), None
    )
    return by_name | ({"": default} if default else {})


def with_class(job: GRPOJobRecord, classes: JobClasses) -> GRPOJobRecord:
    """The job with the spec that its class as it is now makes of the declared one."""
    content = job.content
    declared = content.declared
    if declared is None:
        return job
    content = replace(content, spec=declared, problems=(), job_class=None, class_problem=None)
    name = declared.job_class_name or ""
    job_class = classes.by_name.get(name)
    if job_class is None:
        if name:
            why = classes.problem or f"there is no {CLASS_KIND} {name}"
            message = f"spec.jobClassName: {why}; the job waits until {name} is there"
            content = replace(content, class_problem=(Reason.JOB_CLASS_NOT_FOUND, message))
        return replace(job, typed=content)
    # Kueue's label is no label of the pods, and may be required all the same.
    labels = {**job.labels, LABEL_WORKLOAD_PRIORITY: job.kueue.priority_class}
    resolution = resolve(declared, job_class, labels)
    problem: tuple[Reason, str] | None = None
    if resolution.problems:
        problem = Reason.REFUSED_BY_JOB_CLASS, "; ".join(resolution.problems)
    elif resolution.spec:
        content = replace(content, spec=resolution.spec, job_class=job_class)
        problem = _forbidden(job.key.namespace, resolution.spec.platform, job_class, classes)
    return replace(job, typed=replace(content, class_problem=problem))


def _forbidden(
    namespace: str, platform: PlatformSpec, job_class: AppliedJobClass, classes: JobClasses
) -> tuple[Reason, str] | None:
    """Why the namespace does not allow the pods what the class gives them. A namespace without the
    label has not allowed it: no decision was made. Nor has one that is too new to have been
    seen."""
    needed = platform.pod_security_level
    if needed is PodSecurityLevel.RESTRICTED or not classes.enforced_levels:
        return None
    enforced = classes.enforced_levels.get(namespace, "")
    if enforced in {str(level) for level in PodSecurityLevel if level >= needed}:
        return None
    label = f"is {enforced}" if enforced else "is not set"
    return Reason.POD_SECURITY_FORBIDS, (
        f"{CLASS_KIND} {job_class.name} gives pods what needs the {needed} pod security standard; "
        f"label {ENFORCE_LABEL} of namespace {namespace} {label}: set it to {needed}, or name "
        "another class in spec.jobClassName"
    )
