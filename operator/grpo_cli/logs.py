"""`grpo logs`: the log of one rank of one attempt, the failed ones included.

`kubectl logs` wants a pod's name, but pods have random suffixes, and the interesting attempt is often not the last.
"""

import subprocess
from argparse import ArgumentParser, Namespace
from typing import Any

from grpo_api.contract import CONTAINER
from grpo_operator.names import LABEL_ATTEMPT, LABEL_INDEX, LABEL_JOB

from . import kubectl
from .errors import NotYet


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", help="name of the GRPOJob")
    parser.add_argument("--attempt", type=int, help="number of the attempt; unset: the last one that has pods")
    parser.add_argument("--rank", type=int, default=0, help="global rank; the ranks of one pod share its log. Unset: 0")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the pod ends")
    parser.add_argument("--tail", type=int, default=-1, help="only the last lines. Unset: all")
    kubectl.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Runs `kubectl logs` for the rank's pod and returns its exit code."""
    _, job = kubectl.get_job(options, options.name)
    processes = job.status.plan.processes_per_node if job.status.plan else 1
    pods = kubectl.get(options, "pods", f"--selector={LABEL_JOB}={options.name}")["items"]
    pod = choose(pods, options.attempt, options.rank // processes)
    flags = [f"--container={CONTAINER}", f"--tail={options.tail}", *(["--follow"] if options.follow else [])]
    return subprocess.run(kubectl.command(options, "logs", pod, *flags), check=False).returncode


def choose(pods: list[dict[str, Any]], attempt: int | None, index: int) -> str:
    """Name of the pod with this node rank in the attempt, or in the last attempt that has one.

    Raises:
        NotYet: there is none; the message says which there are.
    """
    found = {place: pod for pod in pods if (place := _place(pod))}
    wanted = attempt if attempt is not None else max((number for number, node in found if node == index), default=0)
    if (wanted, index) not in found:
        there = ", ".join(f"attempt {number} node {node}" for number, node in sorted(found)) or "none"
        raise NotYet(f"no pod of attempt {wanted or 1} on node {index} of the gang; there are: {there}")
    name: str = found[wanted, index]["metadata"]["name"]
    return name


def _place(pod: dict[str, Any]) -> tuple[int, int] | None:
    """Attempt and node rank of a pod; None if its labels are not those of a gang's member."""
    labels = pod["metadata"].get("labels") or {}
    attempt, index = labels.get(LABEL_ATTEMPT, ""), labels.get(LABEL_INDEX, "")
    return (int(attempt), int(index)) if attempt.isdecimal() and index.isdecimal() else None
