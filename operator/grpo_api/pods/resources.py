"""`resources` of a container as in core/v1, without GPUs: how many of those is the plan's to decide."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from ..base import Model, Rule
from ..quantity import Quantity, parse_quantity

_NAME = (
    r"^(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]*[KMGT]i"
    r"|[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[a-zA-Z0-9]([-._a-zA-Z0-9]{0,61}[a-zA-Z0-9])?)$"
)
EPHEMERAL_STORAGE = "ephemeral-storage"
"""The resource that is the disk of a pod's node."""
_GPU = r"^(nvidia\.com/(gpu|mig-)|amd\.com/gpu|gpu\.intel\.com/)"
"""Not all of nvidia.com/: the network operator names its cards there too."""
_CEL_GPU = f"name.matches(r'{_GPU}')"
_CEL_REQUEST, _CEL_LIMIT = "quantity(string(self.requests[name]))", "quantity(string(self.limits[name]))"
_CEL_INDIVISIBLE = "(name.contains('/') || name.startsWith('hugepages-'))"

ResourceName = Annotated[str, Field(min_length=1, max_length=317, pattern=_NAME)]
ResourceList = Annotated[dict[ResourceName, Quantity], Field(max_length=16)]
"""Amounts by resource: cpu, memory, ephemeral-storage, hugepages-<size>, or an extended resource such as rdma/hca."""


def _is_indivisible(name: str) -> bool:
    """Whether the scheduler hands the resource out by the piece and never more often than it is there."""
    return "/" in name or name.startswith("hugepages-")


class ResourceRequirements(Model):
    """What a container requests of its node, and what it may use at most."""

    RULES = (
        Rule(
            f"!self.requests.exists(name, {_CEL_GPU}) && !self.limits.exists(name, {_CEL_GPU})",
            "GPUs are requested by the plan, within placement.gpus: remove them here",
            lambda own: not any(re.match(_GPU, name) for name in (*own.requests, *own.limits)),
        ),
        Rule(
            f"self.requests.all(name, !(name in self.limits) || {_CEL_REQUEST}.compareTo({_CEL_LIMIT}) <= 0)",
            "a request must not exceed its limit: raise the limit or lower the request",
            lambda own: all(own.compared(name) <= 0 for name in own.requests if name in own.limits),
        ),
        Rule(
            f"self.requests.all(name, !{_CEL_INDIVISIBLE} || "
            f"(name in self.limits && {_CEL_REQUEST}.compareTo({_CEL_LIMIT}) == 0))",
            "extended resources and hugepages are not shared: their request must equal their limit, or be left out",
            lambda own: all(
                name in own.limits and own.compared(name) == 0 for name in own.requests if _is_indivisible(name)
            ),
        ),
        Rule(
            "self.limits.all(name, !name.contains('/') || string(self.limits[name]).matches('^[0-9]+$'))",
            "extended resources are counted in whole pieces, such as 1",
            lambda own: all(amount.isdecimal() for name, amount in own.limits.items() if "/" in name),
        ),
    )

    requests: ResourceList = Field(default_factory=dict)
    """What the scheduler sets aside. Unset: the limits; of cpu, memory and ephemeral-storage what the plan needs."""
    limits: ResourceList = Field(default_factory=dict)
    """What the container may use at most; past its memory it is killed. Unset: no limit."""

    @property
    def requested(self) -> dict[str, str]:
        """The requests as the API server completes them: a limit alone is also the request."""
        return {**self.limits, **self.requests}

    def compared(self, name: str) -> int:
        """1, 0 or -1 as the request of a resource that has both is above, at or below its limit."""
        request, limit = parse_quantity(self.requests[name]), parse_quantity(self.limits[name])
        return (request > limit) - (request < limit)

    def manifest(self, defaults: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """The container's resources in a pod; `defaults` are requests that are not named here."""
        requests = {**defaults, **self.requested}
        found = {"requests": requests, "limits": dict(self.limits)}
        return {kind: amounts for kind, amounts in found.items() if amounts}
