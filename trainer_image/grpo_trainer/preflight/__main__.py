"""`python -m grpo_trainer.preflight`: checks the job of a plan and writes a PreflightReport as
termination message.

The exit code is 0 whenever there is a report, with problems or without. With `--local` what only a
pod of the job has is left out.
"""

import os
import signal
import sys

from grpo_api.report.preflight import PreflightReport
from grpo_api.report.report import EXIT_CODES, Result

from ..process.outcome import write_termination_message
from ..process.process_setup import hide_unused_libraries
from ..runtime.durable_files import read_plan
from ..runtime.errors import BadInput
from .findings import Findings, report_json
from .hidden_library import hide_library


def write_report(report: PreflightReport) -> None:
    """Write the termination message, and print it."""
    text = report_json(report)
    write_termination_message(text)
    print(f"preflight: {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Checks the pod's plan; returns the exit code."""
    # The first process of a container isn't ended by SIGTERM unless it says so.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_CODES[Result.PREEMPTED]))
    # Before datasets and transformers are imported, which look for it then.
    hide_library("torch")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        plan = read_plan(os.environ)
    except BadInput as error:
        findings = Findings()
        findings.add("spec", str(error))
        write_report(findings.report())
        return 0
    hide_unused_libraries(plan.execution)
    from .checks import run_checks
    from .scope import LAPTOP, POD

    scope = LAPTOP if "--local" in arguments else POD
    write_report(run_checks(plan, scope, write_report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
