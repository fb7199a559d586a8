"""How objects, conditions and decisions are shown in a recorded file."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from tests.golden.layout import InOrder

Json = dict[str, Any]
PLAN_ANNOTATION = "grpo.dev/plan"
"""Of a pod: the training plan, as JSON."""


def objects_of(objects: Iterable[Json]) -> Json:
    """Return objects by kind, in their order, and the training plans that their pods are given,
    each once.

    Services are the same in every namespace: shared_objects has them.
    """
    found, plans = InOrder(), dict[str, Json]()
    for body in objects:
        name = _free(body["kind"], found)
        annotations = body["spec"].get("template", {}).get("metadata", {}).get("annotations", {})
        if PLAN_ANNOTATION in annotations:
            pod_plan = InOrder(json.loads(annotations[PLAN_ANNOTATION]))
            known = next((key for key, plan in plans.items() if plan == pod_plan), name)
            plans.setdefault(known, pod_plan)
            annotations[PLAN_ANNOTATION] = f"(training plan of {known})"
        found[name] = "(shared)" if body["kind"] == "Service" else _sorted(body)
    return {"objects": found, "training plans": plans} if plans else {"objects": found}


def _free(kind: str, taken: Json) -> str:
    """Return `Job`, or `Job 2` where that is taken."""
    names = (f"{kind} {number}" if number > 1 else kind for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def _sorted(value: Any) -> Any:
    """Return the value with sorted keys, for a place that keeps the order."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def condition(one: Json) -> str:
    """Return all of a condition in a line."""
    since, generation = one["lastTransitionTime"], one.get("observedGeneration")
    return (
        f"{one['type']}={one['status']} {one['reason']} since {since} of {generation}: "
        f"{one['message']}"
    )


def filled(value: Any) -> Any:
    """Return an account of time without what is zero or empty."""
    if not isinstance(value, dict):
        return [filled(item) for item in value] if isinstance(value, list) else value
    values = {key: filled(item) for key, item in value.items()}
    return {key: item for key, item in values.items() if item not in (0, "", [], {})}


def fields(value: Any) -> Json:
    """Return the fields of a dataclass that are not empty."""
    values = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return {name: item for name, item in values.items() if item not in ("", None, False, 0, ())}
