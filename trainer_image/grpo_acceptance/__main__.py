"""`python -m grpo_acceptance`: checks this machine's GPUs, prints what it finds, and writes it to
files.

It prints which versions differ from the image's before anything that may fail over them is
imported. In a pod of a GRPOJob it ends with the Outcome that the operator waits for. Exit code 0:
nothing failed; 1: something did; 2: there is no GPU. With --check it is the process of one check,
which the run starts.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_trainer.runtime.clock import SYSTEM_CLOCK

from . import report
from .findings import CHECKS, Check, Context, State, dump_findings
from .report import Progress, Surroundings
from .runner import answer_file, run_checks

BUDGET_SECONDS = 540.0
"""For the whole run, installation included: a machine that is lent often ends a command after ten
minutes, and bringing the files back takes one."""
CLOSING_SECONDS = 10.0
"""Kept for the end: processes that die slowly, and the report."""
DEFAULT_PATIENCE = {"cuda": 1.0, "cpu": 10.0}
"""Factor of the checks' limits, by device. The limits are made for a GPU, whose minutes are few; on
a CPU they shall end a check that hangs, and none that is slow."""
ASK_SECONDS = 60.0
"""Longest wait for torch's answer how many GPUs there are: a broken driver gives none."""
NO_GPU = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the acceptance, or one check of it; returns the exit code."""
    begin = SYSTEM_CLOCK.now()
    options = parse_options(arguments)
    if options.check:
        return run_check(Check(**json.loads(options.check)), Context(**json.loads(options.context)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    image = report.image_versions()
    here = report.installed_versions(image)
    where = Surroundings(
        report.system_sentence(), options.device, here, report.differing_versions(here, image)
    )
    print(f"{where.machine}; {report.versions_sentence(where.different)}", flush=True)
    world = options.ranks or (count_gpus() if options.device == "cuda" else 1)
    if not world:
        hint = "--device cpu runs what can be seen on a CPU"
        print(f"this machine has no GPU that torch can use; {hint}", flush=True)
        return NO_GPU
    deadline = begin + options.budget - options.used - CLOSING_SECONDS
    return run_acceptance(options, where, world, deadline)


def run_acceptance(
    options: argparse.Namespace, where: Surroundings, world: int, deadline: float
) -> int:
    """Run all checks until the deadline on SYSTEM_CLOCK, and write the report. Returns 1 if any
    failed."""
    chosen = [check for check in CHECKS if not options.only or check.name in options.only]
    patience = options.patience or DEFAULT_PATIENCE[options.device]
    checks = [replace(check, seconds=check.seconds * patience) for check in chosen]
    progress = Progress(checks, where, options.output, deadline)
    with tempfile.TemporaryDirectory(prefix="acceptance-") as folder:
        context = Context(options.device, folder, world=world)
        for result in run_checks(checks, context, deadline, progress.begin):
            progress.end(result)
    results = progress.results
    page = report.markdown_page(report.as_json(where, results))
    print(f"\n{page}\nwritten to {options.output}", flush=True)
    findings = [finding for result in results for finding in result.findings]
    failed = [finding for finding in findings if finding.state is State.FAILED]
    wrong = [f"{finding.what}: {finding.message}" for finding in failed]
    write_outcome(f"acceptance: {report.summary(results)}", wrong)
    return int(bool(wrong))


def write_outcome(summary: str, wrong: list[str]) -> None:
    """In a pod of a GRPOJob: the Outcome of this attempt, in its termination message."""
    from grpo_api.text.contract import PLAN_ENV

    path = Path(os.environ.get(PLAN_ENV, ""))
    if not path.is_file():
        return
    from grpo_api.plan.plan import TrainingPlan
    from grpo_api.report.report import Outcome, Result
    from grpo_api.report.termination_message import truncate_to_fit
    from grpo_trainer.gang.placement import placement
    from grpo_trainer.process.outcome import announce_outcome

    plan = TrainingPlan.model_validate_json(path.read_text(encoding="utf-8"))
    result = Result.ERROR if wrong else Result.SUCCEEDED
    rank = placement(plan.execution, os.environ).rank
    outcome = Outcome(result=result, rank=rank, attempt=plan.job.attempt)
    announce_outcome(truncate_to_fit(outcome, "; ".join([summary, *wrong])))


def run_check(check: Check, context: Context) -> int:
    """In the process of a check: import, wait for the word, look, and leave what was found."""
    function = getattr(importlib.import_module(check.module, __package__), check.function)
    if not sys.stdin.readline():
        return 0  # the run has ended before this check's turn
    threading.Thread(target=_die_with_the_run, daemon=True).start()
    findings = function(context, *check.arguments)
    if context.rank == 0:
        unfinished = answer_file(check, context).with_suffix(".unfinished")
        unfinished.write_text(dump_findings(findings), encoding="utf-8")
        unfinished.rename(answer_file(check, context))
    return 0


def _die_with_the_run() -> None:
    """End this check's processes when the run's end of their input closes: a killed run leaves no
    GPU in use."""
    sys.stdin.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def count_gpus() -> int:
    """GPUs that torch can use; asked in a process of its own, since asking takes hold of them."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ASK_SECONDS
        )
    except subprocess.TimeoutExpired:
        print(f"torch did not say within {ASK_SECONDS:.0f} s how many GPUs there are", flush=True)
        return 0
    last = process.stdout.strip().rpartition("\n")[2]
    if not last.isdecimal():
        print(f"torch can't be asked for GPUs: {process.stderr.strip()[-500:]}", flush=True)
        return 0
    return int(last)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m grpo_acceptance", description=__doc__)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: what can be seen without a GPU",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("acceptance"), help="folder for the three files"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_SECONDS, help="seconds for the whole run"
    )
    parser.add_argument(
        "--used", type=float, default=0.0, help="seconds of the budget that an installation took"
    )
    parser.add_argument(
        "--patience",
        type=float,
        help="factor of every check's own time limit (default: 1, on a CPU 10)",
    )
    parser.add_argument("--only", nargs="+", choices=names, help="some of the checks")
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes of checks that take several; 0: one per GPU"
    )
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--context", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # past the interpreter's teardown, in which threads of collectives can abort after all is said
    code = 1
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
