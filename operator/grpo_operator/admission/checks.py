"""What only the operator can say about a spec, before anything is created.

Exists because a schema can't know the operator's settings or how big a plan becomes. Pure: spec in, problems out, each
a (reason, sentence). The line for GPUs is in line.py. Called by reconcile before every first attempt.
"""

from grpo_api.job import GRPOJobSpec
from grpo_api.plan import ExecutionPlan

from ..errors import Reason
from ..manifests import Attempt, plan_json, training_plan
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
    template = spec.checkpoint.volume_claim_template
    if template and template.access_mode == "ReadWriteOnce" and plan.nodes > 1:
        sentence = (
            f"spec.checkpoint.volumeClaimTemplate.accessMode: ReadWriteOnce can't be shared by {plan.nodes} nodes; "
        )
        return Reason.NOT_SUPPORTED, sentence + "set ReadWriteMany, or placement.nodes to 1"
    carried = plan_json(training_plan(Attempt(job.parent, job.uid, spec, plan, job.status.attempt + 1)))
    size = len((carried + "".join(spec.pod_template.metadata.annotations.values())).encode())
    if size > MAX_PLAN_BYTES:
        sentence = f"spec: {size} bytes of settings and annotations; the pods' annotations hold {MAX_PLAN_BYTES}; "
        return Reason.NOT_SUPPORTED, sentence + "move long patterns into a reward function of a ConfigMap"
    return None
