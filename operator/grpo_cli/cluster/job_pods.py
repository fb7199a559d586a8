"""Reads a Job of a command and its pods: its end, their termination messages, and why a pod does
not run."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from grpo_api.text.messages import printable_text

from . import kubectl
from .claims import Holder
from .clock import SYSTEM_CLOCK

POLL_SECONDS = 2.0
Object = dict[str, Any]


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


def waiting_message(options: Namespace, job: str, pods: list[Object]) -> str:
    """Why the Job's pods don't run yet, or why it has none; empty if no reason is known."""
    if not pods:
        return kubectl.newest_warning(options, job)
    reasons = [_status_message(pod) or _pending_warning(options, pod) for pod in pods]
    return "; ".join(filter(None, reasons))


def _pending_warning(options: Namespace, pod: Object) -> str:
    """What only events say of a pod that doesn't run yet, such as a volume that can't be
    mounted."""
    pending = pod.get("status", {}).get("phase") == "Pending"
    return kubectl.newest_warning(options, pod["metadata"]["name"]) if pending else ""


def _status_message(pod: Object) -> str:
    """Why a pod doesn't run yet, by its status; empty where that says nothing."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("message"):
            return str(waiting["message"])
    for condition in status.get("conditions") or []:
        if condition.get("reason") == "Unschedulable" and condition.get("message"):
            return str(condition["message"])
    return ""


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
    wait for.

    `holder`: the pod for whose sake there is one node only that they can run on.
    """
    shown = ""
    while True:
        job = find_job(options, name)  # before its pods, which are all there when it has ended
        pods = find_pods(options, name)
        yield job, pods
        waiting = waiting_message(options, name, pods)
        if holder and waiting:
            waiting += f"; it can run only beside {holder.description}"
        if waiting not in ("", shown):
            print(f"job {name}: {printable_text(waiting)}", file=sys.stderr, flush=True)
            shown = waiting
        SYSTEM_CLOCK.sleep(POLL_SECONDS)
