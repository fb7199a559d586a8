"""`grpo status`: one screen on a job: what it does, why, how far it is, what it costs in memory, where its pods are.

`kubectl describe` prints everything, in the order of the alphabet.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_api.job import GRPOJob
from grpo_api.plan import ExecutionPlan
from grpo_api.status import GRPOJobStatus
from grpo_planner.words import sharding

from . import kubectl
from .terminal import console, gib

_COLOURS = {"Succeeded": "green", "Running": "green", "Failed": "red", "Restarting": "yellow"}


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", help="name of the GRPOJob")
    kubectl.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Prints the screen; exit code 0 whatever the job's state."""
    metadata, job = kubectl.get_job(options, options.name)
    show(console(), f"{metadata['namespace']}/{metadata['name']}", job)
    return 0


def show(out: Console, name: str, job: GRPOJob) -> None:
    """Prints what is known of the job; sections that nothing is known of are left out."""
    phase = str(job.status.phase or "Pending")
    out.print(f"[bold]{name}[/bold]  [{_COLOURS.get(phase, 'cyan')}]{phase}[/]")
    facts = Table.grid(padding=(0, 2))
    for label, text in _facts(job):
        facts.add_row(f"[dim]{label}[/dim]", escape(text))
    out.print(facts)
    for table in (_conditions(job.status), _pods(job.status)):
        if table.row_count:
            out.print(table)


def _facts(job: GRPOJob) -> Iterator[tuple[str, str]]:
    status = job.status
    yield "model", job.spec.model.name + (f" ({status.plan.parameters})" if status.plan else "")
    if status.plan:
        yield from _plan(status.plan)
    if status.progress:
        eta = f", {status.progress.eta} to go" if status.progress.eta else ""
        yield "progress", f"{status.progress.summary} steps, {status.progress.percent} %{eta}"
    if status.metrics:
        found = status.metrics.model_dump(exclude_none=True)
        yield "metrics", ", ".join(f"{key} {value}" for key, value in found.items())
    if status.memory:
        predicted, measured = (gib(size) for size in (status.memory.predicted_bytes, status.memory.measured_bytes))
        yield "memory", f"{predicted:.1f} GiB predicted, {measured:.1f} GiB measured"
    yield "attempts", _attempts(job)
    if status.rollbacks:
        left_out = (f"{one.skipped.first} to {one.skipped.last} ({one.reason})" for one in status.rollbacks)
        yield "left out", f"generations {', '.join(left_out)}"
    if status.avoided_nodes:
        yield "kept away from", ", ".join(status.avoided_nodes)
    if status.outcome:
        yield "outcome", f"{status.outcome.result} at step {status.outcome.step}: {status.outcome.message}"
        if status.outcome.standstill:
            yield f"rank {status.outcome.rank} stood in", "\n".join(status.outcome.standstill.frames)


def _attempts(job: GRPOJob) -> str:
    """`4: restarts 1 of 3 after failures, 1 of 100 after disruptions; ended: 1 OutOfMemory, 2 Preempted, …`."""
    status, restarts = job.status, job.spec.restarts
    counted = f"{status.restarts} of {restarts.limit} after failures"
    uncounted = f"{status.uncounted_restarts} of {restarts.uncounted_limit} after disruptions"
    ends = ", ".join(f"{end.attempt} {end.reason}" for end in status.ends)
    return f"{status.attempt}: restarts {counted}, {uncounted}" + (f"; ended: {ends}" if ends else "")


def _plan(plan: ExecutionPlan) -> Iterator[tuple[str, str]]:
    size = f"{plan.gpus} GPUs" if plan.accelerator == "GPU" else f"{plan.world_size} CPU processes"
    sharded = sharding(plan.zero_stage, offload=plan.offload != "None")
    yield "plan", f"{plan.method}, reference {plan.strategy}, {sharded}, {size} on {plan.nodes} nodes"
    yield "why", plan.reason
    for change in plan.changes:
        yield "change", change
    for warning in plan.warnings:
        yield "warning", warning


def _conditions(status: GRPOJobStatus) -> Table:
    table = Table("condition", "status", "since", "reason", "message", box=None, header_style="dim")
    for condition in status.conditions:
        since = condition.last_transition_time
        table.add_row(condition.type, condition.status, since, condition.reason, escape(condition.message))
    return table


def _pods(status: GRPOJobStatus) -> Table:
    table = Table("pod", "index", "node", "phase", "reason", box=None, header_style="dim")
    for pod in status.pods:
        table.add_row(pod.name, str(pod.index), pod.node, pod.phase, escape(pod.reason))
    return table
