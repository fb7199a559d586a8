"""What Kueue's manager writes on Workloads, each function one step of its source (v0.19,
pkg/workload).

They change a Workload in memory; kueue_stand_in.py puts it to the API server.
"""

import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo_api.text.quantity import parse_quantity

Workload = dict[str, Any]
GPU = "nvidia.com/gpu"


def said(workload: Workload, kind: str) -> tuple[str, str]:
    """Status and reason of a condition, empty if it was never written."""
    conditions = [
        one for one in workload.get("status", {}).get("conditions", []) if one["type"] == kind
    ]
    return (conditions[0]["status"], conditions[0]["reason"]) if conditions else ("", "")


def message(workload: Workload, kind: str) -> str:
    """A condition's message, empty if it was never written."""
    conditions = [
        one for one in workload.get("status", {}).get("conditions", []) if one["type"] == kind
    ]
    return conditions[0]["message"] if conditions else ""


def is_true(workload: Workload, kind: str) -> bool:
    """Whether a condition is True."""
    return said(workload, kind)[0] == "True"


def say(workload: Workload, kind: str, status: str, reason: str, message: str) -> None:
    """Sets a condition; its time is that of the last change of its status."""
    conditions = workload.setdefault("status", {}).setdefault("conditions", [])
    new = {"type": kind, "status": status, "reason": reason, "message": message}
    new["observedGeneration"] = workload["metadata"]["generation"]
    for condition in conditions:
        if condition["type"] == kind:
            changed = condition["status"] != status
            condition.update(new | ({"lastTransitionTime": now()} if changed else {}))
            return
    conditions.append({**new, "lastTransitionTime": now()})


def now(seconds: float = 0) -> str:
    """The time in so many seconds, as the API server reads it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def reserve(workload: Workload, queue: str, flavor: str) -> None:
    """Quota is reserved; what was evicted before is no more."""
    status = workload.setdefault("status", {})
    status["admission"] = {
        "clusterQueue": queue,
        "podSetAssignments": [
            _assignment(pod_set, flavor) for pod_set in workload["spec"]["podSets"]
        ],
    }
    say(
        workload,
        "QuotaReserved",
        "True",
        "QuotaReserved",
        f"Quota reserved in ClusterQueue {queue}",
    )
    for kind in ("Evicted", "Preempted"):
        if is_true(workload, kind):
            say(workload, kind, "False", "QuotaReserved", f"Previously: {message(workload, kind)}")


def _assignment(pod_set: dict[str, Any], flavor: str) -> dict[str, Any]:
    count = pod_set.get("count", 1)
    requested = requests(pod_set)
    usage = {name: _written(each * count) for name, each in requested.items()}
    return {
        "name": pod_set.get("name", "main"),
        "flavors": dict.fromkeys(requested, flavor),
        "resourceUsage": usage,
        "count": count,
    }


def _written(amount: Fraction) -> str:
    return str(int(amount)) if amount == int(amount) else f"{int(amount * 1000)}m"


def requests(pod_set: dict[str, Any]) -> dict[str, Fraction]:
    """What one pod of the set asks for, its containers together."""
    total: dict[str, Fraction] = {}
    for container in pod_set["template"]["spec"]["containers"]:
        resources = container.get("resources", {})
        for name, value in (resources.get("limits", {}) | resources.get("requests", {})).items():
            total[name] = total.get(name, Fraction(0)) + parse_quantity(value)
    return total


def gpus(workload: Workload) -> int:
    """The GPUs of all its pods."""
    return sum(
        int(requests(pod_set).get(GPU, 0)) * pod_set.get("count", 1)
        for pod_set in workload["spec"]["podSets"]
    )


def admit(workload: Workload) -> None:
    """Quota is reserved and all admission checks are ready."""
    say(workload, "Admitted", "True", "Admitted", "The workload is admitted")


def keep_waiting(workload: Workload, message: str) -> None:
    """There is no quota for it now (v0.20 says WaitingForQuota in place of Pending)."""
    say(workload, "QuotaReserved", "False", "Pending", message)


def evict(workload: Workload, reason: str, message: str) -> None:
    """Its pods must end; until its owner has ended them it keeps its quota and stays Admitted."""
    say(workload, "Evicted", "True", reason, message)
    workload["status"].pop("unhealthyNodes", None)
    for check in workload["status"].get("admissionChecks", []):
        if check["state"] != "Pending":
            before = check["state"]
            check.pop("podSetUpdates", None)
            check |= {
                "state": "Pending",
                "message": f"Reset to Pending after eviction. Previously: {before}",
            }


def preempt(workload: Workload) -> None:
    """One of a higher priority needs its quota."""
    message = (
        "Preempted to accommodate a workload (UID: UNKNOWN, JobUID: UNKNOWN) due to "
        "prioritization in the ClusterQueue"
    )
    say(workload, "Preempted", "True", "InClusterQueue", message)
    evict(workload, "Preempted", message)


def time_out(workload: Workload, seconds: float) -> None:
    """Its pods were not ready in time; it may come back in so many seconds."""
    count = workload["status"].get("requeueState", {}).get("count", 0)
    workload["status"]["requeueState"] = {"count": count + 1, "requeueAt": now(seconds)}
    evict(workload, "PodsReadyTimeout", "Exceeded the PodsReady timeout")


def answer_check(
    workload: Workload, state: str, *updates: dict[str, Any], name: str = "check"
) -> None:
    """An admission check's controller answers, with what the pods get if they are admitted."""
    other_checks = [
        one
        for one in workload.setdefault("status", {}).get("admissionChecks", [])
        if one["name"] != name
    ]
    new = {"name": name, "state": state, "message": "", "lastTransitionTime": now()}
    workload["status"]["admissionChecks"] = [
        *other_checks,
        {**new, "podSetUpdates": list(updates)} if updates else new,
    ]


def checks(workload: Workload) -> set[str]:
    """The states of its admission checks."""
    return {one["state"] for one in workload.get("status", {}).get("admissionChecks", [])}


def reactivate(workload: Workload) -> None:
    """It is active again, and waits for quota."""
    say(workload, "Requeued", "True", "Reactivated", "The workload was reactivated")


def end_backoff(workload: Workload) -> None:
    """It has waited long enough after what it was evicted for."""
    workload["status"].get("requeueState", {}).pop("requeueAt", None)
    say(workload, "Requeued", "True", "BackoffFinished", "The workload backoff was finished")


def reject(workload: Workload) -> None:
    """An admission check was rejected: it is to be deactivated."""
    say(
        workload,
        "DeactivationTarget",
        "True",
        "AdmissionCheck",
        "Admission check(s): check, were rejected",
    )


def retry(workload: Workload) -> None:
    """An admission check is to be tried again: it gives its quota back first."""
    evict(workload, "AdmissionCheck", "Evicted due to admission check(s): check, were retried")


def deactivate(workload: Workload) -> None:
    """It is not active any more, by a user's will or for what the manager wrote before."""
    status = workload.setdefault("status", {})
    cause = said(workload, "DeactivationTarget")[1]
    status.pop("requeueState", None)
    status["conditions"] = [
        one for one in status.get("conditions", []) if one["type"] != "DeactivationTarget"
    ]
    evict(
        workload,
        f"DeactivatedDueTo{cause}" if cause else "Deactivated",
        "The workload is deactivated",
    )


def what_follows(workload: Workload) -> Callable[[Workload], None] | None:
    """The write that follows from the Workload alone, if any."""
    active, states = workload["spec"].get("active", True), checks(workload)
    held = is_true(workload, "QuotaReserved") and not is_true(workload, "Evicted")
    if not active:
        return None if is_true(workload, "Evicted") else deactivate
    if said(workload, "Requeued") == ("False", "Deactivated"):
        return reactivate
    if said(workload, "Requeued") in (("False", "PodsReadyTimeout"), ("False", "AdmissionCheck")):
        return (
            end_backoff
            if workload["status"].get("requeueState", {}).get("requeueAt", "") <= now()
            else None
        )
    if held and "Rejected" in states and not is_true(workload, "DeactivationTarget"):
        return reject
    if held and "Retry" in states:
        return retry
    return admit if held and not is_true(workload, "Admitted") and states <= {"Ready"} else None


def waits(workload: Workload) -> bool:
    """Whether it stands in a queue for quota."""
    active = workload["spec"].get("active", True) and bool(workload["spec"].get("queueName"))
    return (
        active
        and not is_true(workload, "QuotaReserved")
        and said(workload, "Requeued")[0] != "False"
    )


def owner(workload: Workload) -> str:
    """The name of its controller."""
    references = workload["metadata"].get("ownerReferences", [])
    return next((one["name"] for one in references if one.get("controller")), "")


def requeued(reason: str) -> tuple[str, str]:
    """Status and reason of Requeued after an eviction; by other reasons than these the manager
    requeues nobody."""
    at_once = "True" if reason in ("Preempted", "NodeFailures") else "False"
    return at_once, "Deactivated" if reason.startswith("Deactivated") else reason


def give_back(workload: Workload) -> None:
    """What the owner writes once no pod is left of an evicted Workload."""
    reason, why = said(workload, "Evicted")[1], message(workload, "Evicted")
    workload["status"].pop("admission", None)
    say(workload, "Requeued", *requeued(reason), why)
    say(workload, "QuotaReserved", "False", "Pending", why)
    say(workload, "Admitted", "False", "NoReservation", "The workload has no reservation")


def finish(workload: Workload) -> None:
    """What the owner writes when it has ended for good."""
    say(workload, "Finished", "True", "Succeeded", "Job finished successfully")
