"""`python -m grpo_trainer.preflight`: checks the job of a plan and writes a PreflightReport as
termination message.

The exit code is 0 whenever there is a report, with problems or without. With `--local` what only a
pod of the job has is left out.
"""

import logging
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from grpo_api.report.preflight import PreflightReport
from grpo_api.report.report import EXIT_CODES, Result

from ..process.outcome import write_termination_message
from ..process.process_setup import hide_unused_libraries
from ..runtime.errors import BadInput
from ..runtime.hidden_library import hide_libraries
from ..runtime.logs import configure_logs
from ..runtime.plan_file import read_plan
from .findings import LAPTOP, POD, Findings, report_json

log = logging.getLogger("grpo_trainer")


def write_report(report: PreflightReport) -> None:
    """Write the termination message, and log it."""
    text = report_json(report)
    write_termination_message(text)
    log.info(f"preflight: {text}")


def main(arguments: list[str]) -> int:
    """Checks the pod's plan; returns the exit code."""
    # The first process of a container isn't ended by SIGTERM unless it says so.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_CODES[Result.PREEMPTED]))
    configure_logs()
    # Before datasets and transformers are imported, which look for it then.
    hide_libraries("torch")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        plan = read_plan()
    except BadInput as error:
        findings = Findings()
        findings.add("spec", str(error))
        write_report(findings.report())
        return 0
    hide_unused_libraries(plan.execution)
    from .checks import run_checks

    options = _options(arguments)
    scope = LAPTOP if options.local else POD

    def keep_prompt(prompt: str) -> None:
        if options.prompt:
            options.prompt.write_text(prompt, encoding="utf-8", errors="backslashreplace")

    if options.only_prompt:
        scope = replace(scope, most_rows=1)
    write_report(
        run_checks(plan, scope, write_report, keep_prompt, only_prompts=options.only_prompt)
    )
    return 0


def _options(arguments: list[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m grpo_trainer.preflight", description=__doc__)
    parser.add_argument("--local", action="store_true", help="leave out what only a pod has")
    parser.add_argument(
        "--prompt", type=Path, help="file for what the model reads of the first row"
    )
    parser.add_argument(
        "--only-prompt", action="store_true", help="check model and first row, and nothing else"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
