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


def _names_no_gpu(resources: "ResourceRequirements") -> bool:
    return not any(re.match(_GPU, name) for name in (*resources.requests, *resources.limits))


def _requests_are_within_limits(resources: "ResourceRequirements") -> bool:
    limited = [name for name in resources.requests if name in resources.limits]
    return all(resources.compared(name) <= 0 for name in limited)


def _indivisible_requests_equal_limits(resources: "ResourceRequirements") -> bool:
    for name in resources.requests:
        if not _is_indivisible(name):
            continue
        if name not in resources.limits or resources.compared(name) != 0:
            return False
    return True


def _extended_resources_are_whole(resources: "ResourceRequirements") -> bool:
    return all(amount.isdecimal() for name, amount in resources.limits.items() if "/" in name)


class ResourceRequirements(Model):
    """What a container requests of its node, and what it may use at most."""

    RULES = (
        Rule(
            f"!self.requests.exists(name, {_CEL_GPU}) && !self.limits.exists(name, {_CEL_GPU})",
            "GPUs are requested by the plan, within placement.gpus: remove them here",
            _names_no_gpu,
        ),
        Rule(
            f"self.requests.all(name, !(name in self.limits) || {_CEL_REQUEST}.compareTo({_CEL_LIMIT}) <= 0)",
            "a request must not exceed its limit: raise the limit or lower the request",
            _requests_are_within_limits,
        ),
        Rule(
            f"self.requests.all(name, !{_CEL_INDIVISIBLE} || "
            f"(name in self.limits && {_CEL_REQUEST}.compareTo({_CEL_LIMIT}) == 0))",
            "extended resources and hugepages are not shared: their request must equal their limit, or be left out",
            _indivisible_requests_equal_limits,
        ),
        Rule(
            "self.limits.all(name, !name.contains('/') || string(self.limits[name]).matches('^[0-9]+$'))",
            "extended resources are counted in whole pieces, such as 1",
            _extended_resources_are_whole,
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
