"""`grpo diagnose`: says what is wrong with a run, by its logged steps.

The run may be a job in the cluster or anybody's: a file of TRL's logs is enough. The rules are
those of docs/reference/findings.md.
"""

from argparse import ArgumentParser, Namespace

from grpo_api.findings.diagnosis import LEAST_STEPS, diagnose, finding_message
from grpo_api.findings.step_row import REWARD, StepRow
from grpo_api.report.report import Finding

from ...cluster.delivery_pod import add_pod_arguments
from ...inputs.run_history import SOURCE_HELP, load_steps
from ...show.documents import add_output, print_document
from ...show.errors import OptionError
from ...show.terminal import console, print_entry, terminal_text

HAS_FINDINGS = 3
"""Exit code where something is wrong with a run."""


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help=f"{SOURCE_HELP}: what the trainer printed, JSON lines, CSV, or trainer_state.json, "
        "with TRL's keys",
    )
    parser.add_argument(
        "--max-kl", type=float, help="guard.maxKL of the run; unset: no absolute limit"
    )
    add_output(parser, "text")
    add_pod_arguments(parser)


def run(options: Namespace) -> int:
    """Prints the findings of each run at its last step; 0 where there are none, else 3."""
    if options.max_kl is not None and not options.max_kl > 0:
        raise OptionError(f"--max-kl {options.max_kl:g}: write a number above 0")
    steps_by_run = {name: load_steps(options, name) for name in options.runs}
    findings_by_run = {
        name: diagnose(steps, options.max_kl) for name, steps in steps_by_run.items()
    }
    if options.output != "text":
        print_document(options.output, _items(findings_by_run))
    else:
        for name, findings in findings_by_run.items():
            _print_findings(name, steps_by_run[name], findings)
    return HAS_FINDINGS if any(findings_by_run.values()) else 0


def _items(findings_by_run: dict[str, list[Finding]]) -> list[dict[str, object]]:
    """All findings; with the run where there are several."""
    items = []
    for name, findings in findings_by_run.items():
        where = {"run": name} if len(findings_by_run) > 1 else {}
        items += [
            where | finding.model_dump(mode="json", exclude_none=True) for finding in findings
        ]
    return items


def _print_findings(name: str, rows: list[StepRow], findings: list[Finding]) -> None:
    out = console()
    if not findings:
        # An evaluation is logged beside a step, under the same number.
        steps = len({row.step for row in rows})
        doubt = f"; most rules need {LEAST_STEPS} steps" if steps < LEAST_STEPS else ""
        if not any(REWARD in row.values for row in rows):
            doubt = "; most rules need rewards, and none is logged"
        out.print(f"{name}: no findings in {steps} steps{doubt}", markup=False)
    for finding in findings:
        line = f"{name}: {finding_message(finding)}, confidence {finding.confidence:.2f}"
        print_entry(out, terminal_text(line), [terminal_text(finding.advice)])
