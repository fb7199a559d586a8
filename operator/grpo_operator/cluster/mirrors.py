"""Which kinds of objects an operator mirrors, each in every namespace that it serves."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..names import COMPONENT_RENDEZVOUS, LABEL_COMPONENT, LABEL_JOB, NETWORK_POLICY, ObjectKey
from .api import GRPOJOBS, JOBS, NETWORK_POLICIES, PODS, SERVICES, WORKLOADS, Cluster, Resource, Selection
from .cache import Cache, Caches
from .watcher import Mirror

Changed = Callable[[Iterable[ObjectKey]], None]


def mirrors(
    cluster: Cluster,
    caches: Caches,
    changed: Changed,
    shared_changed: Changed,
    *,
    namespaces: Sequence[str],
    isolates: bool,
    resync: float,
) -> dict[str, Mirror[Any]]:
    """A mirror per kind and namespace, by `plural/namespace`; without namespaces of all as one, `*`.

    `changed` hears the GRPOJobs that a change concerns, `shared_changed` the namespaces whose jobs share what changed.
    NetworkPolicies are mirrored by an operator that `isolates`.
    """
    by_name = f"metadata.name={NETWORK_POLICY}"
    kinds: list[tuple[Resource, str, Cache[Any], Changed]] = [
        (JOBS, LABEL_JOB, caches.jobs, changed),
        (PODS, LABEL_JOB, caches.pods, changed),
        (SERVICES, f"{LABEL_COMPONENT}={COMPONENT_RENDEZVOUS}", caches.services, shared_changed),
        (WORKLOADS, LABEL_JOB, caches.workloads, changed),
        (GRPOJOBS, "", caches.grpojobs, changed),
    ]
    if isolates:
        kinds.append((NETWORK_POLICIES, "", caches.network_policies, shared_changed))
    made: dict[str, Mirror[Any]] = {}
    for namespace in namespaces or (None,):
        for resource, labels, cache, hears in kinds:
            # by name: who takes its labels away is noticed, and no other policy may be read
            fields = by_name if resource is NETWORK_POLICIES else ""
            selection = Selection(resource, namespace, labels, fields)
            optional = resource is WORKLOADS
            mirror = Mirror(cluster, selection, cache, hears, resync=resync, optional=optional)
            made[f"{resource.plural}/{namespace or '*'}"] = mirror
    return made
