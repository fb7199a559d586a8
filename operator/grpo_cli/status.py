"""`grpo status`: one screen on a job: what it does, why, how far it is, what it costs in memory, where its pods are.

Exists because `kubectl describe` prints everything in the order of the alphabet. Registered by __main__.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_api.base import GIB
from grpo_api.job import GRPOJob
from grpo_api.plan import ExecutionPlan
from grpo_api.status import GRPOJobStatus

from . import kubectl

_COLOURS = {"Succeeded": "green", "Running": "green", "Failed": "red", "Restarting": "yellow"}


def register(commands: Any) -> None:
    """Adds the command to argparse's sub-commands."""
    parser: ArgumentParser = commands.add_parser("status", help="show one job on one screen")
    parser.add_argument("name", help="name of the GRPOJob")
    kubectl.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Prints the screen; exit code 0 whatever the job's state."""
    metadata, job = kubectl.get_job(options, options.name)
    show(_console(), f"{metadata['namespace']}/{metadata['name']}", job)
    return 0


def _console() -> Console:
    """The terminal; wide where there is none, so that pipes get whole lines."""
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def show(console: Console, name: str, job: GRPOJob) -> None:
    """Prints what is known of the job; sections that nothing is known of are left out."""
    phase = str(job.status.phase or "Pending")
    console.print(f"[bold]{name}[/bold]  [{_COLOURS.get(phase, 'cyan')}]{phase}[/]")
    facts = Table.grid(padding=(0, 2))
    for label, text in _facts(job):
        facts.add_row(f"[dim]{label}[/dim]", escape(text))
    console.print(facts)
    for table in (_conditions(job.status), _pods(job.status)):
        if table.row_count:
            console.print(table)


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
        predicted, measured = (size / GIB for size in (status.memory.predicted_bytes, status.memory.measured_bytes))
        yield "memory", f"{predicted:.1f} GiB predicted, {measured:.1f} GiB measured"
    yield "attempts", f"{status.attempt}, of them {status.restarts} after failures (limit {job.spec.restarts.limit})"
    if status.outcome:
        yield "outcome", f"{status.outcome.result} at step {status.outcome.step}: {status.outcome.message}"


def _plan(plan: ExecutionPlan) -> Iterator[tuple[str, str]]:
    size = f"{plan.gpus} GPUs" if plan.accelerator == "GPU" else f"{plan.world_size} CPU processes"
    zero = f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "DDP"
    yield "plan", f"{plan.method}, reference {plan.strategy}, {zero}, {size} on {plan.nodes} nodes"
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
