"""Reads a Job of a command and its pods: its end, their termination messages, and why a pod does
not run."""

import sys
from argparse import Namespace
from collections.abc import Iterator

from grpo_api.text.messages import printable_text
from grpo_kube.objects.resources import Object

from . import kubectl
from .claims import Holder
from .clock import SYSTEM_CLOCK

POLL_SECONDS = 2.0
_NO_NODE = ("Unschedulable", "SchedulingGated")
"""Reasons of a pod's condition for having no node."""


def find_job(options: Namespace, name: str) -> Object | None:
    """The Job; None where no Job has that name."""
    selector = f"--field-selector=metadata.name={name}"
    jobs: list[Object] = kubectl.get_json(options, "jobs", selector)["items"]
    return jobs[0] if jobs else None


def find_pods(options: Namespace, job: str) -> list[Object]:
    """The pods of a Job."""
    selector = f"--selector=batch.kubernetes.io/job-name={job}"
    pods: list[Object] = kubectl.get_json(options, "pods", selector)["items"]
    return pods


def job_end(job: Object) -> str:
    """Complete or Failed; empty for a Job that is at work."""
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            kind: str = condition["type"]
            return kind
    return ""


def waiting_message(
    options: Namespace, job: str, pods: list[Object], holder: Holder | None = None
) -> str:
    """Why the Job's pods don't run yet, or why it has none; empty if no reason is known.

    `holder`: the pod for whose sake there is one node only that they can run on.
    """
    if not pods:
        return kubectl.newest_warning(options, job)
    message = "; ".join(filter(None, (_pod_message(options, pod) for pod in pods)))
    if holder and message:
        return f"{message}; it can run only beside {holder.description}"
    return message


def _pod_message(options: Namespace, pod: Object) -> str:
    """Why a pod doesn't run yet, by its status. Some problems are in events only, such as a volume
    that can't be mounted."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses") or []
    waits = [container.get("state", {}).get("waiting") or {} for container in containers]
    conditions = status.get("conditions") or []
    waits += [condition for condition in conditions if condition.get("reason") in _NO_NODE]
    for wait in waits:
        if wait.get("message"):
            return kubectl.reason_and_message(wait)
    if status.get("phase") != "Pending":
        return ""
    warning = kubectl.newest_warning(options, pod["metadata"]["name"])
    return warning or next(filter(None, map(kubectl.reason_and_message, waits)), "")


def termination_messages(pod: Object) -> Iterator[str]:
    """What the containers of a pod left behind."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        terminated = container.get("state", {}).get("terminated") or {}
        if text := terminated.get("message"):
            yield text


def follow_job(
    options: Namespace, name: str, holder: Holder | None = None
) -> Iterator[tuple[Object | None, list[Object]]]:
    """Yield a Job, None once it is gone, and its pods, again and again; print on stderr what they
    wait for."""
    shown = ""
    while True:
        job = find_job(options, name)  # before its pods, which are all there when it has ended
        pods = find_pods(options, name)
        yield job, pods
        waiting = waiting_message(options, name, pods, holder)
        if waiting not in ("", shown):
            print(f"job {name}: {printable_text(waiting)}", file=sys.stderr, flush=True)
            shown = waiting
        SYSTEM_CLOCK.sleep(POLL_SECONDS)
