"""`grpo diagnose`: says what is wrong with a run, by its logged steps.

The run may be anybody's: a file of TRL's logs is enough. The rules are those of docs/findings.md.
"""

import json
from argparse import ArgumentParser, Namespace

from grpo_api.findings.diagnosis import LEAST_STEPS, diagnose, finding_message
from grpo_api.findings.verdict import RunLimits
from grpo_api.report.report import Finding

from ..inputs.step_file import load_steps
from ..show.errors import OptionError
from ..show.terminal import console

HAS_FINDINGS = 3
"""Exit code where something is wrong with a run."""


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="logged steps: JSON lines, CSV, or trainer_state.json, with TRL's keys",
    )
    parser.add_argument(
        "--max-kl", type=float, help="guard.maxKL of the run; unset: no absolute limit"
    )
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="unset: text"
    )
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Prints the findings of each file at its last step; 0 where there are none, else 3."""
    if options.max_kl is not None and not options.max_kl > 0:
        raise OptionError(f"--max-kl {options.max_kl:g}: write a number above 0")
    limits = RunLimits(max_kl=options.max_kl)
    steps_by_file = {path: load_steps(path) for path in options.files}
    findings_by_file = {path: diagnose(steps, limits) for path, steps in steps_by_file.items()}
    if options.output == "json":
        print(json.dumps(_items(findings_by_file), indent=2))
    else:
        for path, findings in findings_by_file.items():
            _print_findings(path, len(steps_by_file[path]), findings)
    return HAS_FINDINGS if any(findings_by_file.values()) else 0


def _items(findings_by_file: dict[str, list[Finding]]) -> list[dict[str, object]]:
    """All findings; with the file where there are several."""
    items = []
    for path, findings in findings_by_file.items():
        where = {"file": path} if len(findings_by_file) > 1 else {}
        items += [
            where | finding.model_dump(mode="json", exclude_none=True) for finding in findings
        ]
    return items


def _print_findings(path: str, steps: int, findings: list[Finding]) -> None:
    out = console()
    if not findings:
        doubt = f"; most rules need {LEAST_STEPS} steps" if steps < LEAST_STEPS else ""
        out.print(f"{path}: no findings in {steps} steps{doubt}", markup=False)
    for finding in findings:
        line = f"{path}: {finding_message(finding)}, confidence {finding.confidence:.2f}"
        out.print(line, markup=False)
        out.print(f"  {finding.advice}", markup=False)
