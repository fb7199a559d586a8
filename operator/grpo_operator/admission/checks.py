"""What only the operator can say about a spec, before anything is created.

A schema can't know the operator's settings or how big a plan becomes. Spec in, problems out, each a (reason, sentence).
"""

from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan

from ..manifests import attempt_of, pod_annotations
from ..reasons import Reason
from ..records import GRPOJobRecord

Problem = tuple[Reason, str]
MAX_PLAN_BYTES = 200 * 1024
"""All annotations of an object may hold 256 KiB."""


def spec_problem(spec: GRPOJobSpec, default_image: str) -> Problem | None:
    """Why this operator can't run the spec."""
    if not (spec.image or default_image):
        return Reason.NO_IMAGE, "spec.image: unset, and the operator was installed without a training image; set either"
    return None


def plan_problem(job: GRPOJobRecord, plan: ExecutionPlan) -> Problem | None:
    """Why this operator can't run the plan of the job's spec."""
    spec = job.spec
    if spec is None:
        return None
    carried = pod_annotations(attempt_of(job, spec, plan, job.status.attempt + 1))
    size = sum(len(f"{key}{value}".encode()) for key, value in carried.items())
    if size > MAX_PLAN_BYTES:
        sentence = f"spec: {size} bytes of settings and annotations; the pods' annotations hold {MAX_PLAN_BYTES}; "
        return Reason.NOT_SUPPORTED, (
            sentence + "shorten metadata.annotations, or move long patterns into a reward function of a ConfigMap"
        )
    return None
