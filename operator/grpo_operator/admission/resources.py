"""Kubernetes quantities, and what one pod takes of a node.

A pod's requests are more than the sum of its containers'.
"""

from collections.abc import Iterable

from grpo_api.quantity import parse_quantity

from ..untyped import Part

Amounts = dict[str, float]
"""Amounts by resource name: cores for cpu, bytes for memory, pieces for GPUs."""


def quantity(value: object) -> float:
    """The number that a resource.Quantity such as `500m`, `16Gi` or `1e3` means; 0 for anything else."""
    # A stranger's pod may say anything; one quantity that can't be read must not hide what the pod takes besides.
    try:
        return float(parse_quantity(str(value)))
    except ValueError:
        return 0.0


def amounts(part: Part) -> Amounts:
    """A resource list as numbers."""
    return {name: quantity(value) for name, value in part.items()}


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _most(one: Amounts, other: Amounts) -> Amounts:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in one.keys() | other.keys()}


def _asked(container: Part, kind: str) -> Amounts:
    return amounts(container.part("resources").part(kind))


def pod_requests(spec: Part, kind: str = "requests") -> Amounts:
    """What the scheduler counts for a pod (kubernetes/enhancements KEP-753 and KEP-2837); a quota its `limits` alike.

    Containers and sidecars run together; an init container runs with the sidecars started before it. Requests of the
    pod as a whole replace the sums; its overhead comes on top.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    # Init containers run one after the other, each beside the sidecars that were started before it. So the peak is the
    # largest of these sums, or that of all containers and sidecars together.
    sidecars: Amounts = {}
    peak: Amounts = {}
    for container in spec.parts("initContainers"):
        own = _asked(container, kind)
        if container.text("restartPolicy") == "Always":
            sidecars = _sum((sidecars, own))
            peak = _most(peak, sidecars)
        else:
            peak = _most(peak, _sum((sidecars, own)))
    together = _sum((sidecars, *(_asked(container, kind) for container in spec.parts("containers"))))
    whole = _asked(spec, kind)
    return _sum((_most(peak, together) | whole, amounts(spec.part("overhead"))))
