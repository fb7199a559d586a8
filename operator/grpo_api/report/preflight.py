"""What a preflight reports: mistakes in a job that need no GPU to be found.

The preflight pod writes a PreflightReport as its termination message. `grpo preflight` prints the
same report, and rank 0 turns it into an Outcome before it imports torch. The operator keeps it in
`status.preflight`.
"""

from typing import Annotated, Literal

from pydantic import Field

from ..spec.model import Architecture
from ..text.base import Model
from ..text.quantity import Count
from .revisions import Revisions

MAX_PROBLEMS = 16
"""Most problems that a report shows; the kubelet keeps 4096 bytes of a termination message."""
MAX_SENTENCE = 300

FieldPath = Annotated[str, Field(min_length=1, max_length=128)]
"""Path in the GRPOJob, such as `spec.rewards[0].python.function`."""
Sentence = Annotated[str, Field(min_length=1, max_length=MAX_SENTENCE)]


class PreflightProblem(Model):
    """What would keep every attempt from training."""

    path: FieldPath
    """The field to change."""
    message: Sentence
    """What is wrong with the value, what exists instead, and what to write."""
    transient: bool = False
    """True if it may pass without a change of the job, such as a hub that cannot be reached."""


class SkippedCheck(Model):
    """A check that the preflight could not make. The job is not held back for it."""

    path: FieldPath
    """The field that was not checked."""
    message: Sentence
    """Why."""


TemplateUse = Literal["Applied", "Unused", "None"]
"""Applied: the prompts are chats, rendered by the chat template. Unused: the prompts are text,
which stays as it is, and the tokenizer has a chat template. None: text, and no template."""


class PromptLengths(Model):
    """Lengths of the first prompts of the dataset, in tokens with the chat template."""

    rows: Count
    """How many prompts were measured."""
    mean: Annotated[float, Field(ge=0)]
    """Mean length."""
    p95: Count
    """95th percentile."""
    dropped: Count
    """How many are longer than training.maxPromptLength and would not be trained on."""
    template: TemplateUse | None = None
    """What the chat template is for these prompts: Applied, Unused (they are text) or None."""

    @property
    def template_warning(self) -> str:
        """What to know of prompts that reach a chat model as plain text; empty for others."""
        if self.template != "Unused":
            return ""
        return (
            "they are text, to which the model's chat template is not applied: set "
            "dataset.systemPrompt, or give chat messages"
        )


class PreflightReport(Model):
    """The result of one preflight. It has passed if it has no problems."""

    problems: Annotated[list[PreflightProblem], Field(max_length=MAX_PROBLEMS)] = []
    """All mistakes that were found."""
    omitted_problems: Count = 0
    """Further mistakes for which the message had no room."""
    skipped: Annotated[list[SkippedCheck], Field(max_length=MAX_PROBLEMS)] = []
    """Checks that could not be made."""
    prompts: PromptLengths | None = None
    """Lengths of the first prompts; absent where they could not be measured."""
    architecture: Architecture | None = None
    """The model's shape as its config.json states it; absent where it could not be read."""
    has_vllm: bool | None = None
    """True if the image can import vLLM. Absent where that was not looked at."""
    revisions: Revisions = Field(default_factory=dict)
    """Commits on the hub that were found, by path in the spec."""
