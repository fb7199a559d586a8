"""Records of what the attempts of a job, or all jobs of a namespace, share."""

from collections.abc import Mapping
from dataclasses import dataclass

from .names import ObjectKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    """The rendezvous Service of a namespace; it belongs to all GRPOJobs there, so its job_key has no name."""

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
class ClaimRecord:
    """A PersistentVolumeClaim. `grpojob_uid` is its controller's uid, empty for one that nobody owns."""

    key: ObjectKey
    grpojob_uid: str
    deleting: bool
    labels: Mapping[str, str]
