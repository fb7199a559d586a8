"""What only the operator can say about a spec, before anything is created.

A schema can't know the operator's settings or how big a plan becomes. Spec in, problems out, each a
(reason, sentence).
"""

import re

from grpo_api.effective_spec import gpus_problem
from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.generation import MAX_SERVER_JOB_NAME
from grpo_api.text.contract import LABEL_QUEUE
from grpo_planner.search.engines import NO_ENGINES_BESIDE

from ..pods.manifests import attempt_of, pod_annotations
from ..pods.roles import replicas
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord

Problem = tuple[Reason, str]
_QUEUE_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
MAX_PLAN_BYTES = 200 * 1024
"""All annotations of an object may hold 256 KiB."""


def spec_problem(spec: GRPOJobSpec, default_image: str) -> Problem | None:
    """Why this operator can't run the spec."""
    if spec.image or default_image:
        return None
    message = (
        "spec.image: unset, and the operator was installed without a training image; set either"
    )
    return Reason.NO_IMAGE, message


def queue_problem(job: GRPOJobRecord) -> Problem | None:
    """Why the job's queue label is invalid or contradicts its spec; None if it doesn't."""
    label = job.kueue.queue
    path = f"metadata.labels[{LABEL_QUEUE}]"
    spec = job.valid_spec
    if not label:
        return None
    if spec.placement.queue_name != label:
        return Reason.INVALID_SPEC, (
            f"{path}: {label!r} is another queue than spec.placement.queueName "
            f"{spec.placement.queue_name!r}; allowed "
            "is one LocalQueue: remove one of the two, or make them equal"
        )
    if not re.fullmatch(_QUEUE_NAME, label):
        return Reason.INVALID_SPEC, (
            f"{path}: {label!r} is no name of a LocalQueue; allowed are lower-case letters, "
            "digits, - and .: give the label the name of one"
        )
    if spec.placement.provisioning == "CreatePods":
        return Reason.INVALID_SPEC, (
            f"{path}: {label!r} can't go with spec.placement.provisioning CreatePods, by which the "
            "operator admits the job without Kueue; allowed is one of the two: remove the label, "
            "or set provisioning to WhenFree"
        )
    return None


def plan_problem(job: GRPOJobRecord, plan: ExecutionPlan) -> Problem | None:
    """Why this operator can't run the plan of the job's spec."""
    job_class = job.content.job_class
    if job_class and (problem := gpus_problem(job_class, plan)):
        return Reason.REFUSED_BY_JOB_CLASS, problem
    # The planner refuses a new plan like that; a Workload's plan may be older than the class.
    if replicas(plan) and job.valid_spec.platform.host_network:
        return Reason.NOT_SUPPORTED, f"{NO_ENGINES_BESIDE} Transformers"
    # The schema knows this of engine Servers; with Auto the plan may choose it.
    if replicas(plan) and len(job.name) > MAX_SERVER_JOB_NAME:
        message = (
            "metadata.name: the plan has engines in pods of their own, whose names hold "
            f"{MAX_SERVER_JOB_NAME} characters of it, and it has {len(job.name)}; shorten it, or "
            "set spec.generation.engine to Colocated or Transformers"
        )
        return Reason.NOT_SUPPORTED, message
    # The plan travels in the pods' annotations, and the API server refuses an object with more than
    # 256 KiB of these.
    next_attempt = attempt_of(job, job.valid_spec, plan, job.status.attempt + 1)
    annotations = pod_annotations(next_attempt)
    size = sum(len(f"{key}{value}".encode()) for key, value in annotations.items())
    if size > MAX_PLAN_BYTES:
        message = (
            f"spec: {size} bytes of settings and annotations; the pods' annotations hold "
            f"{MAX_PLAN_BYTES}; shorten metadata.annotations, or move long patterns into a reward "
            "function of a ConfigMap"
        )
        return Reason.NOT_SUPPORTED, message
    return None
