"""`grpo run --local`: runs the jobs of a file as processes of this machine, and shows their steps.

Data, rewards and a small model can be tried so before a cluster is touched.
"""

import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from itertools import count
from pathlib import Path

from grpo_api.report.history import STEP, Row, standing_rows
from grpo_api.report.report import EXIT_CODES, Result
from grpo_api.status.status import GRPOJobStatus, Phase
from grpo_api.text.log_lines import as_text
from grpo_api.text.messages import printable_text

from ..cluster.clock import SYSTEM_CLOCK
from ..inputs import job_classes
from ..inputs.manifest import (
    Job,
    add_filename,
    load_config_maps,
    load_specs,
    read_stdin,
    with_own_name,
)
from ..local.local_runs import LocalRuns
from ..show.errors import NotYet, OptionError, ending_signals_interrupt
from ..show.pictures import curves_of, plot_lines
from ..show.terminal import console

SHOWN = ("reward", "kl", "loss", "step_time")
"""Numbers of a step's line, in this order, where a run has them."""
FOLDER = Path("grpo-runs")
POLL_SECONDS = 0.5
LOG_LINES = 5
"""Lines of the log that are shown of a run that left no outcome."""


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_filename(parser, required=True)
    parser.add_argument(
        "--local", action="store_true", help="on this machine's CPUs; needs the trainer's packages"
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM=FOLDER",
        help="folder for a claim; may be repeated. Unset: a new folder for each claim",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes of the gang. Unset: as many as the job has on CPUs, else 1",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="end after N steps")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help=f"for the runs. Unset: the next number in {FOLDER}/",
    )
    job_classes.add_argument(parser, job_classes.IN_FILE)


def run(options: Namespace) -> int:
    """Runs the jobs one after the other up to the first that fails; returns its exit code, else
    0."""
    # Standard input can be read once, and has the ConfigMaps, too.
    stdin = read_stdin() if options.filename == "-" else None
    jobs = load_specs(options.filename, stdin)
    if not options.local:
        raise OptionError(
            f"add --local to run on this machine; on a cluster: kubectl apply -f {options.filename}"
        )
    if options.steps is not None and options.steps < 1:
        raise OptionError(f"--steps is {options.steps}; it takes 1 or more")
    numbered = (FOLDER / str(number) for number in count(1))
    runs = LocalRuns(
        options.folder or next(folder for folder in numbered if not folder.exists()),
        volumes=dict(map(_volume, options.volume)),
        config_maps=load_config_maps(options.filename, stdin),
        processes=options.processes,
        steps=options.steps,
        job_class=options.job_class,
    )
    for job in map(with_own_name, jobs):
        if code := _run_job(runs, job):
            return code
    return 0


def _volume(option: str) -> tuple[str, Path]:
    claim, separator, folder = option.partition("=")
    if not (claim and separator and folder):
        raise OptionError(f"--volume is {option!r}; write it as CLAIM=FOLDER")
    return claim, Path(folder)


def _run_job(runs: LocalRuns, job: Job) -> int:
    """Run one job to its end; where that is interrupted, end its trainer, too."""
    name = job.metadata["name"]
    print(f"{name}: starting in {runs.folder / name}", flush=True)
    try:
        with ending_signals_interrupt():
            runs.create(job)
            status = _follow(runs, name)
    except KeyboardInterrupt:
        print(f"\n{name}: stopping", file=sys.stderr, flush=True)
        with suppress(NotYet):  # it was not started
            runs.suspend(name)
        raise
    out = console()
    curve = curves_of(standing_rows(runs.rows(name)), ("reward",))
    for line in plot_lines(curve, min(out.width, 80)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return _show_end(runs, name, status)


def _follow(runs: LocalRuns, name: str) -> GRPOJobStatus:
    """Print a line for each step until the run has ended."""
    printed, stage = 0, ""
    while True:
        status = runs.read_job(name).job.status
        # Read after the status, so that an ended run has no rows beyond these.
        rows = runs.rows(name)
        for row in rows[printed:]:
            print(step_line(row), flush=True)
        printed = len(rows)
        if status.phase not in (Phase.STARTING, Phase.RUNNING):
            return status
        new_stage = (status.progress and status.progress.stage) or ""
        if status.phase == Phase.STARTING and new_stage not in ("", stage):
            print(f"{name}: {new_stage}", flush=True)
        stage = new_stage or stage
        SYSTEM_CLOCK.sleep(POLL_SECONDS)


def step_line(row: Row) -> str:
    """One step, such as `step 3  reward 0.412  kl 0.0012`."""
    numbers = [f"{key} {row[key]:.4g}" for key in SHOWN if isinstance(row.get(key), int | float)]
    return "  ".join([f"step {row.get(STEP)}", *numbers])


def _show_end(runs: LocalRuns, name: str, status: GRPOJobStatus) -> int:
    """Print how the run ended and where its files are; return the trainer's exit code."""
    outcome = status.outcome
    log = runs.log_file(name)
    if outcome is None:
        last_lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        for line in last_lines:
            print(as_text(line), file=sys.stderr)
        print(f"{name}: ended without an outcome; its log is {log}", file=sys.stderr)
        return EXIT_CODES[Result.ERROR]
    message = printable_text(outcome.message)
    print(f"{name}: {outcome.result} at step {outcome.step}: {message}")
    if outcome.result is not Result.SUCCEEDED:
        print(f"{name}: its log is {log}", file=sys.stderr)
    return EXIT_CODES[outcome.result]
