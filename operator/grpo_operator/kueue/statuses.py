"""What the operator writes into the status of a Workload: as Kueue's own jobs do, and nothing of Kueue's part.

The status as it is goes in, and what of it is another afterwards comes out, for one write guarded by the
resourceVersion: a reservation of another moment is never given back.
"""

from typing import Any

from ..times import timestamp
from ..workloads import ADMITTED, EVICTED, FINISHED, PODS_READY, QUOTA_RESERVED, REQUEUED

Fields = dict[str, Any]
COMES_BACK = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which the Workload waits again at once; after others Kueue says when."""
DEACTIVATED = "Deactivated"
"""Kueue requeues by this reason alone, and not by `DeactivatedDueToAdmissionCheck` and its like, once a Workload is set
active again."""
_OURS = (QUOTA_RESERVED, ADMITTED, EVICTED, PODS_READY, FINISHED, REQUEUED, "Preempted")
WAIT_FOR_START = "WaitForStart"
MOST_CONDITIONS = 16
"""The definition takes no more."""


def cleared(workload: Fields, now: float) -> Fields:
    """Return the status without its admission, after an eviction."""
    evicted = _condition(workload, EVICTED)
    why = str(evicted.get("reason") or EVICTED)
    message = str(evicted.get("message") or "")
    states = [
        (QUOTA_RESERVED, False, "Pending", message),
        (ADMITTED, False, "NoReservation", "The workload has no reservation"),
        (PODS_READY, False, WAIT_FOR_START, "Not all pods are ready or succeeded"),
        (REQUEUED, why in COMES_BACK, DEACTIVATED if why.startswith(DEACTIVATED) else why, message),
    ]
    return {"admission": None, "conditions": _with(workload, states, now)}


def ready(workload: Fields, now: float) -> Fields:
    """Return the status with all pods ready."""
    message = "All pods were ready or succeeded since the workload admission"
    return {"conditions": _with(workload, [(PODS_READY, True, "Started", message)], now)}


def finished(workload: Fields, succeeded: bool, message: str, now: float) -> Fields:
    """Return the status of a Workload that is done, so that its quota is free."""
    why = "Succeeded" if succeeded else "Failed"
    return {"conditions": _with(workload, [(FINISHED, True, why, message)], now)}


def _condition(workload: Fields, kind: str) -> Fields:
    return next((one for one in _conditions(workload) if one.get("type") == kind), {})


def _conditions(workload: Fields) -> list[Fields]:
    status = workload.get("status") or {}
    conditions = status.get("conditions") or []
    return [condition for condition in conditions if isinstance(condition, dict)]


def _with(workload: Fields, states: list[tuple[str, bool, str, str]], now: float) -> list[Fields]:
    """The conditions with these among them; lastTransitionTime moves only with the status.

    Where they would be too many, those give way that others have put beside Kueue's.
    """
    found = {str(one.get("type")): one for one in _conditions(workload)}
    for kind, true, reason, message in states:
        status, known = str(true), found.get(kind, {})
        since = known.get("lastTransitionTime") if known.get("status") == status else None
        found[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since or timestamp(now),
            "observedGeneration": workload["metadata"].get("generation", 0),
        }
    kept = sorted(found, key=lambda kind: kind not in _OURS)[:MOST_CONDITIONS]
    return [one for kind, one in found.items() if kind in kept]
