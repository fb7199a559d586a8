"""Where a pod must run for its claims: a volume that one node at a time can mount is mounted where
it is already.

The scheduler doesn't look at that: it would put the pod on any node, where it waits until who has
the volume has ended.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass

from grpo_operator.pods.pod_spec import require_node_names
from grpo_operator.pods.pod_volumes import Manifest, claims_of_pod

from ..show.errors import KubectlError, NotYet
from . import kubectl

MANY_NODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
ONE_POD = "ReadWriteOncePod"
_BOUND = "--field-selector=spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Pods that may have volumes mounted."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod that has a claim which others can mount on its node alone."""

    claim: str
    pod: str
    node: str
    tolerations: tuple[Manifest, ...] = ()
    """What lets it run there."""

    @property
    def description(self) -> str:
        """The claim, its pod and its node, as a part of a message."""
        return f"claim {self.claim}, which pod {self.pod} has on node {self.node}"


def pin_to_claims(options: Namespace, job: Manifest) -> tuple[Manifest, Holder | None]:
    """Pin the Job to the node of its claims; return it with the pod that holds them, or unchanged
    without one.

    Raises:
        NotYet: there is no such node as long as others have the claims.
        KubectlError: kubectl fails.
    """
    template = job["spec"]["template"]
    holders = find_holders(options, claims_of_pod(template["spec"]))
    if not holders:
        return job, None
    first, *others = holders
    for other in others:
        if other.node != first.node:
            raise NotYet(
                f"no node can mount both {first.description}, and {other.description}: wait until "
                "one of them has ended"
            )
    template = {**template, "spec": pin_to_holder(template["spec"], first)}
    return {**job, "spec": {**job["spec"], "template": template}}, first


def pin_to_holder(pod: Manifest, holder: Holder) -> Manifest:
    """Return the pod's spec pinned to the holder's node, with the holder's tolerations."""
    pinned_pod = deepcopy(pod)
    require_node_names(
        pinned_pod.setdefault("affinity", {}).setdefault("nodeAffinity", {}), "In", [holder.node]
    )
    tolerations = pinned_pod.setdefault("tolerations", [])
    tolerations += [
        toleration for toleration in holder.tolerations if toleration not in tolerations
    ]
    return pinned_pod


def find_holders(options: Namespace, claims: Iterable[str]) -> list[Holder]:
    """Return the pods that hold claims which one node at a time can mount, one per claim; empty if
    pods can't be read.

    Raises:
        NotYet: one pod at a time can mount a claim, and another has it.
        KubectlError: kubectl fails.
    """
    try:
        bound = _bound_to_a_node(options, set(claims))
        pods = kubectl.get_json(options, "pods", _BOUND)["items"] if bound else []
    except KubectlError as error:
        if "(Forbidden)" in str(error):
            return []
        raise
    holders = {holder.claim: holder for pod in pods for holder in _holders_of_pod(pod, bound)}
    for claim, holder in holders.items():
        if ONE_POD in bound[claim]:
            raise NotYet(
                f"only one pod at a time can mount {holder.description}: wait until that has ended"
            )
    return list(holders.values())


def _bound_to_a_node(options: Namespace, claims: set[str]) -> dict[str, list[str]]:
    """The access modes of those of the claims that one node at a time can mount."""
    existing = kubectl.get_json(options, "persistentvolumeclaims")["items"] if claims else []
    bound: dict[str, list[str]] = {}
    for claim in existing:
        name = claim["metadata"]["name"]
        # The volume's modes, once there is one, which may allow more than was asked for.
        spec, status = (claim.get(part) or {} for part in ("spec", "status"))
        modes = list(status.get("accessModes") or spec.get("accessModes") or ())
        if name in claims and modes and MANY_NODES.isdisjoint(modes):
            bound[name] = modes
    return bound


def _holders_of_pod(pod: Manifest, claims: Iterable[str]) -> Iterator[Holder]:
    spec = pod["spec"]
    for claim in set(claims_of_pod(spec)).intersection(claims):
        tolerations = tuple(spec.get("tolerations") or ())
        yield Holder(claim, pod["metadata"]["name"], spec["nodeName"], tolerations)
