"""`grpo calibrate`: collects the step times of finished jobs into a file that corrects plans.

Jobs are those of a cluster, whose status has what was measured, or runs of `grpo run` in a folder,
whose history has it. Rows that the file has already stay: the newest of each setting.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import TrainingPlan
from grpo_api.status.status import Phase
from grpo_kube.objects.times import timestamp
from grpo_planner.replan.measured_step import StepSeconds, finished_run, measured_row
from grpo_planner.replan.past_run import Run
from grpo_planner.time.measured_runs import MeasuredRow, MeasuredRuns

from ...cluster import kubectl
from ...inputs.calibration_file import load_measured_rows, save_measured_rows
from ...local.attempt_state import PLAN_FILE
from ...local.local_runs import NAMESPACE, LocalRuns
from ...show.errors import KubectlError, NotYet, OptionError
from ...show.terminal import console, show_table

FILE = "calibration.yaml"
FINISHED = (Phase.SUCCEEDED, Phase.FAILED)
LOCAL = "local"
"""Name of the cluster of local runs."""
HEADINGS = ("run", "model", "on", "measured s", "predicted s", "factor")


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="JOB|FOLDER",
        help="finished jobs, or folders of `grpo run`; unset: all finished jobs of the namespace",
    )
    parser.add_argument(
        "-A", "--all-namespaces", action="store_true", help="those of all namespaces"
    )
    parser.add_argument(
        "--to", type=Path, default=Path(FILE), metavar="FILE", help=f"default: {FILE}"
    )
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Collects the rows, and prints what each one says of the time model."""
    if options.sources and options.all_namespaces:
        raise OptionError("--all-namespaces takes all jobs: leave the names out")
    folders = [source for source in options.sources if Path(source).is_dir()]
    names = [source for source in options.sources if source not in folders]
    rows = [row for folder in folders for row in _local_rows(Path(folder))]
    if names or not options.sources:
        rows += _cluster_rows(options, names)
    if not rows:
        raise NotYet(
            "no finished job here has measured a step: a job on GPUs has status.learned.step, "
            "a run of `grpo run` its history"
        )
    before = load_measured_rows(options.to) if options.to.exists() else []
    runs = MeasuredRuns.newest([*before, *rows])
    save_measured_rows(options.to, runs.rows)
    show_table(console(), HEADINGS, rows, _cells, right=HEADINGS[3:])
    print(f"{options.to} has {len(runs.rows)} runs; grpo plan --calibration {options.to} uses them")
    return 0


def _local_rows(folder: Path) -> Iterator[MeasuredRow]:
    """The rows of the finished runs in a folder."""
    runs = LocalRuns(folder)
    for name in runs.names():
        job = runs.read_job(name).job
        ends = runs.outcomes(name)
        if job.status.phase not in FINISHED or not ends:
            continue
        text = (runs.attempt_folder(name) / PLAN_FILE).read_bytes()
        plan = TrainingPlan.model_validate_json(text).execution
        seconds = StepSeconds.of_history(runs.rows(name))
        ended, _ = ends[-1]
        row = measured_row(
            Run(plan, job.spec, Learned()), seconds, source=f"{NAMESPACE}/{name}",
            date=timestamp(ended), cluster=LOCAL,
        )  # fmt: skip
        if row:
            yield row


def _cluster_rows(options: Namespace, names: list[str]) -> Iterator[MeasuredRow]:
    """The rows of the finished jobs of a cluster."""
    cluster = options.context or kubectl.run_kubectl(options, "config", "current-context").strip()
    for item in kubectl.get_jobs(options, names):
        try:
            metadata, job = kubectl.read_job(item)
        except KubectlError:
            # Of another version of the operator, whose numbers are of another time model.
            if names:
                raise
            continue
        source = f"{metadata['namespace']}/{metadata['name']}"
        if row := finished_run(job.spec, job.status, source, cluster):
            yield row
        elif names:
            raise NotYet(f"{source} has no measured step, or has not ended: leave it out")


def _cells(row: MeasuredRow) -> tuple[str, ...]:
    measured, predicted = sum(row.seconds.values()), sum(row.predicted.values())
    return (
        row.source, row.model, f"{row.gpus} x {row.gpu}", f"{measured:.3g}",
        f"{predicted:.3g}", f"{measured / predicted:.2f}",
    )  # fmt: skip
