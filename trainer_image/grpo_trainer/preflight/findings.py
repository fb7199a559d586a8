"""Defines what the checks of one preflight share: where they run, and what they find.

They run in a pod of their own, at the start of rank 0, or on a laptop. Findings are sentences for
users that fit into a termination message.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from huggingface_hub import get_token

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import (
    MAX_PROBLEMS,
    MAX_SENTENCE,
    PreflightProblem,
    PreflightReport,
    PromptLengths,
    SkippedCheck,
)
from grpo_api.report.revisions import Revisions
from grpo_api.spec.model import Architecture
from grpo_api.text.contract import TERMINATION_BYTES
from grpo_api.text.messages import plain_text
from grpo_api.text.names import SecretKeySelector

from ..hub.repositories import Hub
from ..runtime.errors import Denied, HubUnavailable, TrainingError, Transient

MAX_PATH = 128
_PATH = re.compile(
    r"(?:spec\.)?((?:model|dataset|rewards|training|generation|adapter|checkpoint|export|tracking|image)"
    r"(?:\.[A-Za-z]\w*|\[[^\]\s]{1,64}\])*): "
)
"""The path of a field with which most messages of the trainer begin."""
_CUT = " […] "


class NotChecked(Exception):
    """A check that can't be made here; says nothing against the job."""


@dataclass
class Findings:
    """What is known so far."""

    problems: list[PreflightProblem] = field(default_factory=list)
    skipped: list[SkippedCheck] = field(default_factory=list)
    prompts: PromptLengths | None = None
    first_prompt: str = ""
    """What the model reads of the first row; shown on the user's own machine and nowhere else."""
    architecture: Architecture | None = None
    has_vllm: bool | None = None
    revisions: Revisions = field(default_factory=dict)
    is_hub_away: bool = False
    """Whether the hub did not answer an earlier check, which need not be waited for twice."""

    @contextmanager
    def check(self, path: str) -> Iterator[None]:
        """Surrounds one check. What it raises is a problem of the field at `path`, unless the
        message names another field."""
        try:
            yield
        except NotChecked as reason:
            self.skip(path, str(reason))
        except HubUnavailable as error:
            self.is_hub_away = True
            fix = "Check the pods' egress, their proxy and HF_ENDPOINT"
            self.add(path, f"{error}. {fix}", transient=True)
        except Transient as error:
            # A store that refuses a run which has never written there refuses it again.
            self.add(path, str(error), transient=not isinstance(error, Denied))
        except TrainingError as error:
            self.add(path, str(error))
        except Exception as error:
            # A check that fails of itself must hold no job back.
            self.skip(path, f"the check failed: {type(error).__name__}: {error}")

    def require_hub(self) -> None:
        """Ask a hub that is known not to answer no more.

        Raises:
            NotChecked: it has not answered an earlier check.
        """
        if self.is_hub_away:
            raise NotChecked("the hub did not answer an earlier check")

    def add(self, path: str, message: str, *, transient: bool = False) -> None:
        """Add a problem, once."""
        named = _PATH.match(message)
        if named:
            path, message = f"spec.{named[1]}", message[named.end() :]
        problem = PreflightProblem(
            path=path[:MAX_PATH], message=sentence(message), transient=transient
        )
        if problem not in self.problems:
            self.problems.append(problem)

    def skip(self, path: str, message: str) -> None:
        """Add a check that could not be made."""
        self.skipped.append(SkippedCheck(path=path[:MAX_PATH], message=sentence(message)))

    def report(self) -> PreflightReport:
        """The report, what holds the job back for good first, small enough for a termination
        message."""
        ordered = sorted(self.problems, key=lambda problem: problem.transient)
        report = PreflightReport(
            problems=ordered[:MAX_PROBLEMS],
            omitted_problems=len(ordered[MAX_PROBLEMS:]),
            skipped=self.skipped[:MAX_PROBLEMS],
            prompts=self.prompts,
            architecture=self.architecture,
            has_vllm=self.has_vllm,
            revisions=dict(self.revisions),
        )
        while len(report_json(report).encode()) > TERMINATION_BYTES:
            report = _without_least(report)
        return report


def report_json(report: PreflightReport) -> str:
    """The report as it is written."""
    return report.model_dump_json(exclude_defaults=True)


def _without_least(report: PreflightReport) -> PreflightReport:
    """The report without its least important entry."""
    if report.skipped:
        return report.model_copy(update={"skipped": report.skipped[:-1]})
    if report.revisions:
        revisions = dict(list(report.revisions.items())[:-1])
        return report.model_copy(update={"revisions": revisions})
    omitted = report.omitted_problems + 1
    return report.model_copy(update={"problems": report.problems[:-1], "omitted_problems": omitted})


def sentence(text: str) -> str:
    """The text in one line of at most MAX_SENTENCE characters, without what only a debugger has a
    use for and without secrets."""
    # A lone surrogate has no UTF-8.
    encodable = text.encode(errors="replace").decode()
    printable = "".join(letter if letter.isprintable() else " " for letter in encodable)
    line = plain_text(printable) or "no reason was given"
    if len(line) <= MAX_SENTENCE:
        return line
    # The beginning says what is wrong and the end what to write.
    half = (MAX_SENTENCE - len(_CUT)) // 2
    return f"{line[:half]}{_CUT}{line[-half:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The limits of one preflight."""

    most_rows: int
    """Rows of the dataset that are read."""
    wait_seconds: float
    """Longest wait for a hub or a store that does not answer."""
    reward_seconds: float
    """Time for all rewards together."""
    render_seconds: float = 60.0
    """Time for the chat template on all prompts; two thousand take less than a second."""
    is_whole: bool = True
    """False leaves out what is slow or needs transformers, which imports torch wherever that is not
    hidden: tokenizer, shape of the model, reward services, first rows of a hub's dataset."""
    is_in_cluster: bool = True
    """False on a laptop, which has neither the mounts nor the secrets of the job."""


POD = Scope(most_rows=2000, wait_seconds=15.0, reward_seconds=120.0)
LAPTOP = replace(POD, is_in_cluster=False)
RANK_0 = Scope(most_rows=200, wait_seconds=5.0, reward_seconds=1.0, is_whole=False)
"""Training makes the other checks itself, seconds later; only what is known at once is worth the
time of all GPUs."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """One preflight: what it checks, how far it goes, and what it has found."""

    plan: TrainingPlan
    scope: Scope
    hub: Hub
    findings: Findings

    def require_input(self, what: str, *, is_there: bool) -> None:
        """Leave out what only a pod of the job has.

        Raises:
            NotChecked: this is a laptop, and it is not there.
        """
        if not self.scope.is_in_cluster and not is_there:
            raise NotChecked(f"{what} is in the cluster only; add --in-cluster")

    def require_token(self, field: str, secret: SecretKeySelector | None) -> None:
        """Ask the hub for nothing that needs a token which only a pod of the job has.

        Raises:
            NotChecked: as require_input.
        """
        is_there = secret is None or get_token() is not None
        self.require_input(f"the Secret of {field}", is_there=is_there)
