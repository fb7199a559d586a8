"""The attempt of a GRPOJob, from what kubectl or a file says of it: what the operator's manifests
are made of."""

from typing import Any

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.status.status import ResumeSource
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.pods.manifests import Attempt
from grpo_operator.records.names import inheritable_metadata

TRAINER_IMAGE = "grpo-trainer"
"""Stands for the image that the operator was installed with, where no flag says it."""


def build_attempt(
    metadata: dict[str, Any],
    spec: GRPOJobSpec,
    plan: ExecutionPlan,
    number: int,
    source: ResumeSource | None,
) -> Attempt:
    """The attempt of a GRPOJob with this metadata."""
    return Attempt(
        key=ObjectKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        spec=spec,
        plan=plan,
        number=number,
        labels=inheritable_metadata(metadata.get("labels")),
        annotations=inheritable_metadata(metadata.get("annotations")),
        source=source,
    )
