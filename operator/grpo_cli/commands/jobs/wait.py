"""`grpo wait`: waits for a job's end, whichever it is, and says it by the exit code."""

from argparse import ArgumentParser, Namespace

from ...cluster import kubectl
from ...cluster.job_end import add_timeout, wait_for_end


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", help="name of the GRPOJob")
    add_timeout(parser)
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """0 once the job has succeeded, 1 if it fails, 6 at the timeout."""
    return wait_for_end(options, options.name)
