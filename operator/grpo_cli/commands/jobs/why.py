"""`grpo why`: in a few lines, why a job is where it is: what it waits for, since when, and what to
do. `grpo status` has everything else."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_api.findings.diagnosis import finding_message
from grpo_api.job_object import GRPOJob
from grpo_api.status.status import Condition, ConditionType
from grpo_api.text.contract import MANAGED_BY

from ...cluster import kubectl
from ...cluster.job_end import progress_line
from ...show.documents import add_output, print_document
from ...show.terminal import console, terminal_text


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", help="name of the GRPOJob")
    add_output(parser, "text")
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Prints the lines; exit code 0 whatever the job's state."""
    metadata, job = kubectl.get_job(options, options.name)
    lines = list(explanation(metadata, job))
    if options.output != "text":
        named = {key: metadata[key] for key in ("namespace", "name")}
        print_document(options.output, named | {"lines": lines})
        return 0
    out = console()
    for line in lines:
        out.print(terminal_text(line), overflow="fold")
    return 0


def explanation(metadata: Mapping[str, Any], job: GRPOJob) -> Iterator[str]:
    """What the job does, the condition that says why, and what is wrong with the run."""
    status = job.status
    yield f"{metadata['name']} is {progress_line(job, metadata)}"
    if finalizers := metadata.get("deletionTimestamp") and metadata.get("finalizers"):
        yield f"Its deletion waits for its finalizers: {', '.join(finalizers)}"
    if not status.conditions and job.spec.managed_by in (None, MANAGED_BY):
        yield "No operator has seen it yet: look whether one runs (`kubectl get pods -A`)."
    elif not status.conditions:
        yield f"spec.managedBy leaves it to {job.spec.managed_by}: look whether that runs."
    for condition in telling_conditions(job):
        stated = f"{condition.type} is {condition.status}"
        yield f"{stated} since {condition.last_transition_time}: {condition.message}"
    progress = status.progress
    if progress and progress.stage and status.completion_time is None:
        yield f"Stage {progress.stage} since {progress.stage_since}"
    if status.outcome and status.completion_time is not None:
        yield f"It ended with {status.outcome.result}: {status.outcome.message}"
    for finding in status.findings or []:
        yield f"{finding_message(finding)}. {finding.advice}"


def telling_conditions(job: GRPOJob) -> list[Condition]:
    """The conditions that give `status.reason` and what the run suffers from, one of each message;
    or, where all is well, that of the phase."""
    status = job.status
    conditions = [condition for condition in status.conditions if condition.message]
    by_message: dict[str, Condition] = {}
    for condition in sorted(conditions, key=_rank):
        is_trouble = condition.type == ConditionType.DEGRADED and condition.status == "True"
        if condition.reason == status.reason or is_trouble:
            by_message.setdefault(condition.message, condition)
    of_phase = [condition for condition in conditions if condition.type == status.phase]
    newest = sorted(conditions, key=lambda condition: condition.last_transition_time)[-1:]
    return list(by_message.values()) or of_phase or newest


def _rank(condition: Condition) -> tuple[bool, bool]:
    """Orders conditions of one message: what is true says it best, and kstatus' two types worst."""
    is_of_kstatus = condition.type in (ConditionType.RECONCILING, ConditionType.STALLED)
    return is_of_kstatus, condition.status != "True"
