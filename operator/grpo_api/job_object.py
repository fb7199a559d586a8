"""Defines the whole object: a GRPOJob's spec with its status, and rules over both.

Planning reads specs alone, so the types of a status are not built for it.
"""

from pydantic import Field

from .job import GRPOJobSpec
from .spec.generation import MAX_SERVER_JOB_NAME
from .spec.immutability import STARTED, immutability
from .status.status import GRPOJobStatus
from .text.base import Model, Rule
from .text.contract import MAX_JOB_NAME, MULTIKUEUE


class GRPOJob(Model):
    """One GRPO training job: `spec` says what to train, `status` how it goes."""

    model_config = {"extra": "ignore"}

    SERVER_RULES = (
        Rule(
            f"size(self.metadata.name) <= {MAX_JOB_NAME} && !self.metadata.name.contains('.')",
            f"metadata.name must have at most {MAX_JOB_NAME} characters and no dot: "
            "its pods' names add the attempt and the index",
        ),
        Rule(
            (
                "self.spec.generation.engine != 'Servers' || size(self.metadata.name) <= "
                f"{MAX_SERVER_JOB_NAME}"
            ),
            f"metadata.name must have at most {MAX_SERVER_JOB_NAME} characters with "
            "generation.engine Servers: the names of the engines' pods add the role",
        ),
        Rule(
            "!has(self.spec.resumeFrom) || !has(self.spec.resumeFrom.grpoJob) || "
            "self.spec.resumeFrom.grpoJob != self.metadata.name",
            (
                "is this job itself, which goes on from its own checkpoints anyway; name an "
                "earlier job's folder by path"
            ),
            field_path=".spec.resumeFrom.grpoJob",
        ),
        *immutability(GRPOJobSpec),
        Rule(
            "self.spec.retry >= oldSelf.spec.retry",
            "can't be lowered: each raise is one retry",
            ".spec.retry",
        ),
        Rule(
            f"!({STARTED}) || (has(self.spec.managedBy) && self.spec.managedBy == '{MULTIKUEUE}') "
            "|| (has(self.status) && has(self.status.attempt) && self.status.attempt >= "
            "oldSelf.status.attempt)",
            "may only grow: it names the attempts' Jobs and fences their checkpoints",
            field_path=".status.attempt",
        ),
    )

    spec: GRPOJobSpec
    """What to train."""
    status: GRPOJobStatus = Field(default_factory=GRPOJobStatus)
    """What the operator has seen and done."""
