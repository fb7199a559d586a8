"""Prints what a preflight found: problems, what was not checked, prompts and model."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from grpo_api.report.preflight import PreflightProblem, PreflightReport, PromptLengths, SkippedCheck

from .terminal import add_row, make_table, show_table, terminal_text

Finding = PreflightProblem | SkippedCheck

MAX_PROMPT = 4000
"""Characters of a prompt that are shown."""
PASSING = "may pass by itself: "
"""Before the message of a problem that the operator waits for."""


def print_report(out: Console, name: str, report: PreflightReport) -> None:
    """Print the report of the job with this name."""
    count = len(report.problems) + report.omitted_problems
    noun = "problem" if count == 1 else "problems"
    out.print(Text.assemble((name, "bold"), f": {count or 'no'} {noun}"))
    _print_findings(out, "problem", report.problems)
    if report.omitted_problems:
        out.print(f"and {report.omitted_problems} more, for which the report had no room")
    _print_findings(out, "not checked", report.skipped)
    facts = make_table()
    if report.prompts:
        add_row(facts, ("prompts", _prompts_message(report.prompts)))
    if report.architecture:
        shape = report.architecture
        kind = shape.model_type or "unknown type"
        add_row(facts, ("model", f"{kind}, {shape.layers} layers of width {shape.hidden_size}"))
    for path, commit in report.revisions.items():
        add_row(facts, (path, f"commit {commit}"))
    if facts.row_count:
        facts.show_header = False
        out.print(facts)


def print_prompt(out: Console, prompt: str) -> None:
    """Print the first prompt as the model reads it, without what steers a terminal."""
    shown = "".join(map(_visible_letter, prompt[:MAX_PROMPT]))
    rest = len(prompt) - MAX_PROMPT
    more = f" (its first {MAX_PROMPT:,} of {len(prompt):,} characters)" if rest > 0 else ""
    out.print(f"[dim]first prompt{more}:[/dim]")
    out.print(terminal_text(shown), overflow="fold")


def _visible_letter(letter: str) -> str:
    return letter if letter == "\n" or letter.isprintable() else repr(letter)[1:-1]


def _print_findings(out: Console, heading: str, findings: Sequence[Finding]) -> None:
    if not findings:
        return

    def cells(finding: Finding) -> tuple[str, ...]:
        passes = isinstance(finding, PreflightProblem) and finding.transient
        return finding.path, f"{PASSING if passes else ''}{finding.message}"

    def stack(finding: Finding) -> tuple[Text, ...]:
        path, message = cells(finding)
        return terminal_text(f"{path} ({heading})", "bold"), terminal_text(message)

    show_table(out, ("field", heading), findings, cells, stack)


def _prompts_message(prompts: PromptLengths) -> str:
    message = (
        f"mean {prompts.mean:.0f} tokens, 95 % at most {prompts.p95}, of the first {prompts.rows}"
    )
    dropped = f"{prompts.dropped} too long" if prompts.dropped else ""
    return "; ".join(filter(None, (message, dropped, prompts.template_warning)))
