"""What is kept of the objects that attempts share: Services and NetworkPolicy of a namespace, the claim of a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .names import ObjectKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRecord:
    """An object of a namespace; it belongs to all GRPOJobs there, so its job_key has no name."""

    key: ObjectKey
    job_key: ObjectKey
    uid: str
    version: int
    deleting: bool
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord(SharedRecord):
    """A Service of ours."""

    selector: Mapping[str, str]
    cluster_ip: str
    """`None` for a headless Service."""
    publishes_not_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord(SharedRecord):
    """The NetworkPolicy for our pods."""

    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """A PersistentVolumeClaim. `grpojob_uid` is its controller's uid, empty for one that nobody owns."""

    key: ObjectKey
    grpojob_uid: str
    deleting: bool
    labels: Mapping[str, str]
