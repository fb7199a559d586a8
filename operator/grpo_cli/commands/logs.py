"""`grpo logs`: the log of one rank, of all, or of one engine, of one attempt, the failed ones
included.

`kubectl logs` wants a pod's name, but pods have random suffixes, and the interesting attempt is
often not the last.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from grpo_api.text.contract import CONTAINER
from grpo_api.text.log_lines import as_text
from grpo_api.text.messages import printable_text
from grpo_operator.records.names import (
    COMPONENT_ENGINE,
    LABEL_ATTEMPT,
    LABEL_COMPONENT,
    LABEL_INDEX,
    LABEL_JOB,
)

from ..cluster import kubectl
from ..show.errors import NotYet


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", help="name of the GRPOJob")
    parser.add_argument(
        "--attempt", type=int, help="number of the attempt; unset: the last one that has pods"
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        help="global rank; the ranks of one pod share its log. Unset: 0",
    )
    parser.add_argument(
        "--engine", type=int, help="number of an engine in a pod of its own, instead of a rank"
    )
    parser.add_argument(
        "--all-ranks", action="store_true", help="the logs of all pods of the attempt"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the pod ends")
    parser.add_argument(
        "-o",
        "--output",
        choices=("text", "json"),
        default="text",
        help="json: the lines as they are. Unset: text",
    )
    parser.add_argument("--tail", type=int, default=-1, help="only the last lines. Unset: all")
    parser.add_argument("--since", help="only lines of this time, such as 10m. Unset: all")
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Runs `kubectl logs` for the pods of the ranks or the engine and returns its exit code."""
    pod = find_pod(options)
    flags = [f"--container={CONTAINER}", f"--tail={options.tail}"]
    flags += [f"--since={options.since}"] if options.since else []
    flags += ["--follow"] if options.follow else []
    target = [pod]
    if options.all_ranks:
        target = _all_of_attempt(kubectl.get_json(options, "pod", pod))
        # Lines of JSON name their rank, and a prefix would make them none.
        flags += ["--prefix"] if options.output == "text" else []
    command = kubectl.command(options, "logs", *target, *flags)
    if options.output == "json":
        return _report_failure(options, pod, subprocess.run(command, check=False).returncode)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as logs:
        assert logs.stdout is not None  # it is a pipe
        for line in logs.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            prefix = _PREFIX.match(text) if options.all_ranks else None
            where = f"{prefix[1]} " if prefix else ""
            rest = text[prefix.end() :] if prefix else text
            print(where + as_text(rest), flush=options.follow)
    return _report_failure(options, pod, logs.returncode)


def _report_failure(options: Namespace, pod: str, code: int) -> int:
    """Say what keeps the pod where it has no log yet; return kubectl's exit code, as a shell has it
    of a program that a signal ends."""
    if code < 0:
        return 128 - code
    warning = kubectl.newest_warning(options, pod) if code else ""
    if warning:
        print(f"{pod}: {printable_text(warning)}", file=sys.stderr)
    return code


_PREFIX = re.compile(r"\[pod/([^/\]]+)/[^\]]*\] ")
"""What `kubectl logs --prefix` puts before a line."""
MOST_PODS = 10_000
"""Whose logs kubectl reads at once; without it five."""


def _all_of_attempt(pod: dict[str, Any]) -> list[str]:
    """The arguments of `kubectl logs` for all gang pods of this pod's attempt."""
    labels = _labels(pod)
    shared = (LABEL_JOB, LABEL_ATTEMPT, LABEL_COMPONENT)
    selector = ",".join(f"{key}={labels[key]}" for key in shared if key in labels)
    return [f"--selector={selector}", f"--max-log-requests={MOST_PODS}"]


def find_pod(options: Namespace) -> str:
    """Return the name of the pod that `name`, `attempt`, and `rank` or `engine` say.

    Raises:
        NotYet: there is no pod.
        KubectlError: the cluster does not say.
    """
    _, job = kubectl.get_job(options, options.name)
    processes = job.status.plan.processes_per_node if job.status.plan else 1
    pods = kubectl.get_json(options, "pods", f"--selector={LABEL_JOB}={options.name}")["items"]
    if options.engine is None:
        return choose_pod(pods, options.attempt, options.rank // processes)
    return choose_pod(pods, options.attempt, options.engine, engine=True)


def choose_pod(
    pods: list[dict[str, Any]], attempt: int | None, index: int, *, engine: bool = False
) -> str:
    """Return the name of the pod with this node rank, or with `engine` of the engine with this
    number.

    Without an attempt the last one counts that has such a pod. Of several pods the youngest is
    chosen.

    Raises:
        NotYet: no pod matches; the message lists the pods of the job.
    """
    pods_by_place: dict[tuple[int, int], dict[str, Any]] = {}
    # Times of one form sort as texts.
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or ""):
        place = _place(pod)
        is_engine = _labels(pod).get(LABEL_COMPONENT) == COMPONENT_ENGINE
        if place and is_engine == engine:
            pods_by_place[place] = pod
    if attempt is None:
        attempt = max((number for number, node in pods_by_place if node == index), default=0)
    if (attempt, index) not in pods_by_place:
        what = "engine" if engine else "node"
        names = [f"attempt {number} {what} {node}" for number, node in sorted(pods_by_place)]
        there = ", ".join(names) or "none"
        missing = f"for engine {index}" if engine else f"on node {index} of the gang"
        raise NotYet(f"no pod of attempt {attempt or 1} {missing}; there are: {there}")
    name: str = pods_by_place[attempt, index]["metadata"]["name"]
    return name


def _labels(pod: dict[str, Any]) -> dict[str, str]:
    return pod["metadata"].get("labels") or {}


def _place(pod: dict[str, Any]) -> tuple[int, int] | None:
    """Attempt and index of a pod; None if its labels are not those of a gang's member."""
    labels = _labels(pod)
    attempt, index = labels.get(LABEL_ATTEMPT, ""), labels.get(LABEL_INDEX, "")
    if not attempt.isdecimal() or not index.isdecimal():
        return None
    return int(attempt), int(index)
