"""`grpo list`: the jobs of a namespace, or of all, in 80 columns: what each does and how far it
is."""

from argparse import ArgumentParser, Namespace
from typing import Any

from rich.text import Text

from ...cluster import kubectl
from ...cluster.job_end import progress_line, readable_job
from ...show.documents import add_output, print_document
from ...show.terminal import console, show_table, terminal_text

NUMBERS = ("GPUs", "KL", "reward")
HEADINGS = ("name", *NUMBERS, "state")


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    parser.add_argument("-l", "--selector", help="only jobs with these labels, as for kubectl")
    add_output(parser)
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Prints the jobs, ordered by namespace and name."""
    flags = ["--all-namespaces"] if options.all_namespaces else []
    flags += [f"--selector={options.selector}"] if options.selector else []
    jobs = kubectl.get_json(options, kubectl.RESOURCE, *flags)
    if options.output != "table":
        print_document(options.output, jobs)
        return 0
    rows = [_row(item, with_namespace=options.all_namespaces) for item in jobs["items"]]
    if not rows:
        print("no GRPOJobs found")
        return 0
    show_table(console(), HEADINGS, rows, tuple, _stacked_row, right=NUMBERS)
    return 0


def _row(item: dict[str, Any], *, with_namespace: bool) -> tuple[str, ...]:
    """Name, GPUs, KL, reward and state of a job."""
    metadata = item["metadata"]
    name = metadata["name"]
    if with_namespace:
        name = f"{metadata['namespace']}/{name}"
    job = readable_job(item)
    if job is None:
        return name, "", "", "", "written by another version of the operator"
    plan, metrics = job.status.plan, job.status.metrics
    gpus = str(plan.gpus) if plan and plan.accelerator == "GPU" else ""
    numbers = [getattr(metrics, key, None) for key in ("kl", "reward")]
    shown = ["" if number is None else str(number) for number in numbers]
    return name, gpus, *shown, progress_line(job, metadata)


def _stacked_row(row: tuple[str, ...]) -> tuple[Text, ...]:
    name, *numbers, state = row
    pairs = zip(NUMBERS, numbers, strict=True)
    facts = ", ".join(f"{label} {value}" for label, value in pairs if value)
    return tuple(terminal_text(text) for text in (f"{name}  {state}", facts) if text)
