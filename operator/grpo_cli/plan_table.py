"""Prints plans as tables: the chosen one, every family with its reason, and differences between two plans.

Exists to keep the layout apart from the command. Used by plan.py.
"""

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_api.base import GIB
from grpo_api.plan import ExecutionPlan
from grpo_planner import Candidate, PlanResult

SHOWN = 12
"""Candidates that are printed without --all."""


def console() -> Console:
    """The terminal; wide where there is none, so that pipes get whole lines."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def show(name: str, result: PlanResult, everything: bool = False) -> None:
    """Prints the verdict, the candidates, the memory of the chosen plan, and what to do."""
    out = console()
    verdict = "[green]planned[/green]" if result.feasible else f"[red]{result.reason}[/red]"
    out.print(f"[bold]{escape(name)}[/bold]  {verdict}  {escape(result.message)}")
    if result.candidates and result.candidates[0].memory:
        out.print(_candidates(result.candidates if everything else result.candidates[:SHOWN]))
        hidden = 0 if everything else max(0, len(result.candidates) - SHOWN)
        if hidden:
            out.print(f"[dim]… {hidden} more with --all[/dim]")
    if result.chosen:
        _phases(out, result.chosen)
        for text in result.chosen.warnings:
            out.print(f"[yellow]warning[/yellow]  {escape(text)}")
    for text in result.changes:
        out.print(f"[bold yellow]changes[/bold yellow]  {escape(text)}")
    for fix in result.fixes:
        out.print(f"[cyan]fix[/cyan]  {escape(fix.message)}")


def settings(plan: ExecutionPlan) -> list[str]:
    """The columns that say how a candidate runs."""
    sharding = f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "DDP"
    offload = "+offload" if plan.offload != "None" else ""
    saving = ["checkpointing"] if plan.gradient_checkpointing else []
    saving += [f"sub-batch {plan.generation_sub_batch}"] if plan.generation_sub_batch else []
    saving += ["no gather"] if not plan.gather_for_generation else []
    saving += ["8-bit"] if plan.optimizer == "AdamW8bit" else []
    return [
        plan.method, f"{sharding}{offload}", plan.strategy, f"{plan.gpus} x {plan.gpu_product or plan.gpu_resource}",
        str(plan.nodes), f"{plan.micro_batch} x {plan.gradient_accumulation}", ", ".join(saving) or "-",
    ]  # fmt: skip


def _candidates(candidates: list[Candidate]) -> Table:
    """One line per family: how it runs, what it needs, how long a step takes, and why not."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in (
        "method",
        "sharding",
        "reference",
        "GPUs",
        "nodes",
        "batch x accum",
        "saving",
        "GiB",
        "of",
        "phase",
    ):
        table.add_column(heading, no_wrap=True)
    table.add_column("s/step", justify="right")
    table.add_column("verdict")
    for candidate in candidates:
        memory = candidate.memory
        if memory is None:
            continue
        numbers = [f"{memory.device_bytes / GIB:.1f}", f"{memory.usable_bytes / GIB:.1f}", memory.peak_phase]
        verdict = candidate.rejected.message if candidate.rejected else "CHOSEN"
        seconds = f"{candidate.estimated_step_seconds or 0:.1f}"
        style = None if candidate.rejected else "bold green"
        table.add_row(*settings(candidate), *numbers, seconds, escape(verdict), style=style)
    return table


def _phases(out: Console, plan: ExecutionPlan) -> None:
    """The chosen plan's memory by phase and its host memory."""
    if plan.memory is None:
        out.print(f"host memory per pod {plan.host_memory_bytes / GIB:.1f} GiB; no GPUs")
        return
    phases = "  ".join(f"{name} {count / GIB:.1f}" for name, count in plan.memory.phases.model_dump().items())
    out.print(f"GiB allocated on one GPU: {phases}")
    out.print(
        f"shape: {plan.architecture.lower()}; host memory per pod {plan.host_memory_bytes / GIB:.1f} GiB; "
        f"checkpoint {plan.memory.checkpoint_bytes / GIB:.1f} GiB"
    )


def difference(change: str, before: PlanResult, after: PlanResult) -> None:
    """Prints what a change does to the chosen plan and to its memory."""
    out = console()
    out.print(f"\n[bold]what if {escape(change)}[/bold]  {escape(after.message)}")
    if not (before.chosen and after.chosen and before.chosen.memory and after.chosen.memory):
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("", "now", "then", "difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    old, new = before.chosen.memory, after.chosen.memory
    pairs = list(zip(old.phases.model_dump().items(), new.phases.model_dump().values(), strict=True))
    for (name, was), now in [*pairs, (("needed per GPU", old.device_bytes), new.device_bytes)]:
        table.add_row(name, f"{was / GIB:.2f} GiB", f"{now / GIB:.2f} GiB", f"{(now - was) / GIB:+.2f} GiB")
    was_s, now_s = before.chosen.estimated_step_seconds or 0, after.chosen.estimated_step_seconds or 0
    table.add_row("step", f"{was_s:.1f} s", f"{now_s:.1f} s", f"{now_s - was_s:+.1f} s")
    out.print(table)
    for was_text, now_text in zip(settings(before.chosen), settings(after.chosen), strict=True):
        if was_text != now_text:
            out.print(f"  {escape(was_text)} becomes {escape(now_text)}")
