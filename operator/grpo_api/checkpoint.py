"""`spec.checkpoint`: where and how often a run saves its state, on a volume or on an object store."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Model, Rule
from .names import Name
from .quantity import ByteQuantity
from .references import VolumeClaim
from .stores import ObjectStoreSpec


class VolumeClaimTemplate(Model):
    """A claim that the operator creates for the job."""

    storage_class_name: Name | None = None
    """StorageClass. Unset: the cluster's default."""
    size: ByteQuantity
    """Requested size such as `100Gi`."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteMany for gangs of several nodes; ReadWriteOnce keeps the gang on one. Unset: ReadWriteMany."""
    retain: bool = True
    """Keep the claim and its checkpoints when the job is deleted. Unset: true."""


def _has_one_place_at_most(spec: "CheckpointSpec") -> bool:
    places = (spec.volume, spec.volume_claim_template, spec.store)
    return sum(bool(place) for place in places) <= 1


class CheckpointSpec(Model):
    """Where and how often the run saves its state."""

    RULES = (
        Rule(
            "[has(self.volume), has(self.volumeClaimTemplate), has(self.store)].filter(given, given).size() <= 1",
            "set at most one of volume, volumeClaimTemplate, store",
            _has_one_place_at_most,
        ),
    )

    volume: VolumeClaim | None = None
    """Volume shared by all nodes of the gang, mounted at /checkpoints. Unset: see volumeClaimTemplate."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """A claim of the job's own, created with it. Unset and no `volume` or `store`: the run can't be recovered after a
    failure, and condition Recoverable=False says so."""
    store: ObjectStoreSpec | None = None
    """An object store, for clusters without volumes that several nodes can mount. Unset: see volumeClaimTemplate."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Steps between checkpoints; resume is exact at any step. Unset: 100."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest complete checkpoints that are kept. Unset: 2."""

    @property
    def lasting(self) -> bool:
        """Whether checkpoints outlive the pods."""
        return self.on_volume or self.store is not None

    @property
    def on_volume(self) -> bool:
        """Whether they are on a volume, which all nodes of the gang mount."""
        return bool(self.volume or self.volume_claim_template)

    @property
    def on_one_node(self) -> bool:
        """Whether only one node can mount the job's own claim, so that the gang must be there."""
        template = self.volume_claim_template
        return template is not None and template.access_mode == "ReadWriteOnce"
