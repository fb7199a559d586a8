"""`grpo status`: one screen on a job: what it does, why, how far it is, what it costs in memory,
where its pods are.

`kubectl describe` prints everything, in the order of the alphabet.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from operator import attrgetter

from rich.console import Console
from rich.text import Text

from grpo_api.findings.diagnosis import finding_message
from grpo_api.job_object import GRPOJob
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.preflight import PromptLengths
from grpo_api.report.report import STEP_PHASES, TrackerReport
from grpo_api.spec.generation import EnginePlan
from grpo_api.status.status import Condition, GRPOJobStatus, PodStatus, ProgressStatus
from grpo_api.text.messages import printable_text
from grpo_api.text.quantity import format_bytes
from grpo_planner.result.formatting import gib, plural, sharding

from ..cluster import kubectl
from ..show.documents import add_output, print_document
from ..show.terminal import console, print_entry, show_facts, show_table, terminal_text

_COLOURS = {"Succeeded": "green", "Running": "green", "Failed": "red", "Restarting": "yellow"}


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", help="name of the GRPOJob")
    add_output(parser, "screen")
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Prints the screen, or the status for a program; exit code 0 whatever the job's state."""
    metadata, job = kubectl.get_job(options, options.name)
    if options.output != "screen":
        named = {key: metadata[key] for key in ("namespace", "name")}
        status = job.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        print_document(options.output, named | status)
        return 0
    name = f"{metadata['namespace']}/{metadata['name']}"
    show_status(console(), name, job, metadata.get("deletionTimestamp"))
    return 0


def show_status(out: Console, name: str, job: GRPOJob, deleted_since: str | None = None) -> None:
    """Prints what is known of the job; sections that nothing is known of are left out."""
    phase = str(job.status.phase or "Pending")
    reason = printable_text(f"  {job.status.reason}") if job.status.reason else ""
    # Text, not markup: rich's `escape` loses the backslash of `\[`.
    head = Text.assemble((name, "bold"), "  ", (phase, _COLOURS.get(phase, "cyan")), reason)
    out.print(head)
    if deleted_since:
        out.print(terminal_text(f"being deleted, since {deleted_since}", "bold yellow"))
    for finding in job.status.findings or []:
        message = terminal_text(finding_message(finding), "bold yellow")
        print_entry(out, message, [terminal_text(finding.advice)])
    show_facts(out, _facts(job))
    _conditions(out, job.status.conditions)
    _pods(out, job.status.pods)


def _facts(job: GRPOJob) -> Iterator[tuple[str, str]]:
    status = job.status
    size = f" ({status.plan.parameters})" if status.plan else ""
    yield "model", job.spec.model.name + size
    if status.plan:
        yield from _plan(status.plan)
    if status.preflight and status.preflight.report and status.preflight.report.prompts:
        yield "prompts", _prompts(status.preflight.report.prompts)
    yield from _measured_facts(status)
    if status.checkpoint:
        checkpoint = status.checkpoint
        size = format_bytes(checkpoint.bytes)
        where = f"{size} at {checkpoint.where} since {checkpoint.time}"
        yield "checkpoint", f"step {checkpoint.step}, {where}"
    if status.export:
        yield "exported", f"{status.export.description}, weights {status.export.weights_hash}"
    for report in status.tracking or ():
        yield "tracking", _tracker(report)
    yield "attempts", _attempts(job)
    if status.usage and status.usage.effective:
        yield "GPU time", status.usage.description
    yield from _restriction_facts(status)
    if status.outcome:
        yield (
            "outcome",
            f"{status.outcome.result} at step {status.outcome.step}: {status.outcome.message}",
        )
        if status.outcome.standstill:
            yield (
                f"rank {status.outcome.rank} stood in",
                "\n".join(status.outcome.standstill.frames),
            )


def _tracker(report: TrackerReport) -> str:
    """`wandb https://wandb.ai/team/grpo/runs/…; 3 rows lost: HTTP 503`."""
    place = report.url or report.run_id or "has not answered yet"
    lost = f"; {report.lost_rows:,} rows lost" if report.lost_rows else ""
    problem = f": {report.problem}" if report.problem else ""
    return f"{report.name} {place}{lost}{problem}"


def _prompts(lengths: PromptLengths) -> str:
    """`2,000 measured: mean 120 tokens, 95th percentile 300; 12 are too long`."""
    numbers = (
        f"{lengths.rows:,} measured: mean {lengths.mean:.0f} tokens, 95th percentile "
        f"{lengths.p95:,}; {lengths.dropped:,} are too long"
    )
    return "; ".join(filter(None, (numbers, lengths.template_warning)))


def _measured_facts(status: GRPOJobStatus) -> Iterator[tuple[str, str]]:
    """What the run reports of itself: progress, metrics and memory."""
    if status.progress:
        eta = f", {status.progress.eta} to go" if status.progress.eta else ""
        if status.progress.summary:
            yield "progress", f"{status.progress.summary} steps, {status.progress.percent} %{eta}"
        if status.progress.stage:
            yield "stage", _stage(status.progress)
    if status.metrics:
        metrics = status.metrics.model_dump(exclude_none=True, exclude={"phase_seconds"})
        yield "metrics", ", ".join(f"{key} {value}" for key, value in metrics.items())
        if phases := status.metrics.phase_seconds:
            yield (
                "step seconds",
                ", ".join(f"{phase} {phases[phase]}" for phase in STEP_PHASES if phase in phases),
            )
    if status.memory:
        predicted, measured = gib(status.memory.predicted_bytes), gib(status.memory.measured_bytes)
        yield "memory", f"{predicted} predicted, {measured} measured"


def _stage(progress: ProgressStatus) -> str:
    """`Downloading since 2026-11-21T12:00:00Z, 1.2 GiB of 3.0 GiB, 35 MiB per second, ends
    2026-11-21T12:02:00Z`."""
    fetched = ""
    if progress.fetched_bytes is not None:
        speed = format_bytes(progress.fetched_bytes_per_second or 0)
        total = f" of {format_bytes(progress.expected_bytes)}" if progress.expected_bytes else ""
        end = f", ends {progress.stage_end}" if progress.stage_end else ""
        fetched = f", {format_bytes(progress.fetched_bytes)}{total}, {speed} per second{end}"
    return f"{progress.stage} since {progress.stage_since}{fetched}"


def _restriction_facts(status: GRPOJobStatus) -> Iterator[tuple[str, str]]:
    """What further attempts keep away from: data that the run diverged on, and nodes."""
    if status.rollbacks:
        left_out = (
            f"{rollback.skipped.first} to {rollback.skipped.last} ({rollback.reason})"
            for rollback in status.rollbacks
        )
        yield "left out", f"generations {', '.join(left_out)}"
    if status.avoided_nodes:
        yield "kept away from", ", ".join(status.avoided_nodes)


def _attempts(job: GRPOJob) -> str:
    """`4: restarts 1 of 3 after failures, 1 of 100 after disruptions; ended: 1 OutOfMemory, 2
    Preempted, …`."""
    status, restarts = job.status, job.spec.restarts
    counted = f"{status.restarts} of {restarts.limit} after failures"
    uncounted = f"{status.uncounted_restarts} of {restarts.uncounted_limit} after disruptions"
    ends = ", ".join(f"{end.attempt} {end.reason}" for end in status.ends)
    return f"{status.attempt}: restarts {counted}, {uncounted}" + (
        f"; ended: {ends}" if ends else ""
    )


def _plan(plan: ExecutionPlan) -> Iterator[tuple[str, str]]:
    size = plural(plan.gpus, "GPU")
    if plan.accelerator == "CPU":
        size = plural(plan.world_size, "CPU process")
    nodes = plural(plan.nodes, "node")
    sharded = sharding(plan.zero_stage, offload=plan.offload != "None")
    yield (
        "plan",
        f"{plan.method}, reference {plan.strategy}, {sharded}, {size} on {nodes}",
    )
    if plan.engine:
        yield "engine", _engine(plan.engine)
    yield "why", plan.reason
    for change in plan.changes:
        yield "change", change
    for warning in plan.warnings:
        yield "warning", warning


def _engine(engine: EnginePlan) -> str:
    if engine.kind == "Colocated":
        return f"vLLM beside every process, with {engine.memory_share:.0%} of its memory"
    each = (
        f", {engine.gpus_per_replica} × {engine.gpu_product} each"
        if engine.gpus_per_replica
        else ""
    )
    return f"vLLM in {plural(engine.replicas, 'pod')} of their own{each}"


def _conditions(out: Console, conditions: list[Condition]) -> None:
    """One row per condition; where that is too wide, its message in lines of its own."""
    if not conditions:
        return
    headings = ("condition", "status", "since", "reason", "message")
    cells = attrgetter("type", "status", "last_transition_time", "reason", "message")
    show_table(out, headings, conditions, cells, _stacked_condition)


def _stacked_condition(condition: Condition) -> tuple[Text, ...]:
    title = f"{condition.type} {condition.status} since {condition.last_transition_time}"
    head = terminal_text(f"{title}: {condition.reason}", "bold")
    return (head, terminal_text(condition.message)) if condition.message else (head,)


def _pods(out: Console, pods: list[PodStatus]) -> None:
    if not pods:
        return
    headings = ("pod", "index", "node", "phase", "reason")
    show_table(out, headings, pods, _pod_cells)


def _pod_cells(pod: PodStatus) -> tuple[str, ...]:
    number = f"engine {pod.index}" if pod.engine else str(pod.index)
    return pod.name, number, pod.node, pod.phase, pod.reason
