"""Prints what a preflight found: problems, what was not checked, prompts and model."""

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from grpo_api.report.preflight import PreflightProblem, PreflightReport, PromptLengths, SkippedCheck

from .terminal import make_table, show_table

PASSING = "may pass by itself: "
"""Before the message of a problem that the operator waits for."""


def print_report(out: Console, name: str, report: PreflightReport) -> None:
    """Print the report of the job with this name."""
    count = len(report.problems) + report.omitted_problems
    noun = "problem" if count == 1 else "problems"
    out.print(f"[bold]{escape(name)}[/bold]: {count or 'no'} {noun}")
    _print_findings(out, "problem", report.problems)
    if report.omitted_problems:
        out.print(f"and {report.omitted_problems} more, for which the report had no room")
    _print_findings(out, "not checked", report.skipped)
    facts = make_table()
    if report.prompts:
        facts.add_row("prompts", _prompts_message(report.prompts))
    if report.architecture:
        shape = report.architecture
        kind = shape.model_type or "unknown type"
        facts.add_row("model", f"{kind}, {shape.layers} layers of width {shape.hidden_size}")
    for path, commit in report.revisions.items():
        facts.add_row(escape(path), f"commit {commit}")
    if facts.row_count:
        facts.show_header = False
        out.print(facts)


def _print_findings(
    out: Console, heading: str, findings: list[PreflightProblem] | list[SkippedCheck]
) -> None:
    if not findings:
        return
    wide = make_table("field", heading)
    stacked: list[tuple[Text, ...]] = []
    for finding in findings:
        passes = isinstance(finding, PreflightProblem) and finding.transient
        message = f"{PASSING if passes else ''}{finding.message}"
        wide.add_row(escape(finding.path), escape(message))
        stacked.append((Text(f"{finding.path} ({heading})", "bold"), Text(message)))
    show_table(out, wide, stacked)


def _prompts_message(prompts: PromptLengths) -> str:
    message = (
        f"mean {prompts.mean:.0f} tokens, 95 % at most {prompts.p95}, of the first {prompts.rows}"
    )
    return f"{message}; {prompts.dropped} too long" if prompts.dropped else message
