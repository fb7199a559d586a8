"""What is kept of the objects that attempts share: Services and NetworkPolicy of a namespace, the claim of a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .names import ObjectKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    """A Service of ours in a namespace; it belongs to all GRPOJobs there, so its job_key has no name."""

    key: ObjectKey
    job_key: ObjectKey
    uid: str
    version: int
    deleting: bool
    labels: Mapping[str, str]
    selector: Mapping[str, str]
    cluster_ip: str
    """`None` for a headless Service."""
    publishes_not_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """The NetworkPolicy of a namespace for our pods, which is all GRPOJobs' like a Service."""

    key: ObjectKey
    job_key: ObjectKey
    uid: str
    version: int
    deleting: bool
    labels: Mapping[str, str]
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """A PersistentVolumeClaim. `grpojob_uid` is its controller's uid, empty for one that nobody owns."""

    key: ObjectKey
    grpojob_uid: str
    deleting: bool
    labels: Mapping[str, str]
