"""Defines where a run stores its results: `spec.checkpoint`, `spec.checkpoint.store` and
`spec.export`.

`spec.checkpoint` says where and how often a run saves its state, on a volume or on an object store.
`spec.checkpoint.store` names a place on an object store and the credentials for it. Checkpoints
there need no volume that several nodes can mount, and they outlive the cluster.

`spec.samples` says how many completions are kept beside the checkpoints, for people to read.

`spec.export` says where the trained model is put when the run ends. A run that exports nothing must
say so explicitly, because nobody wants to lose the result of days of training by an omission.
"""

from typing import Annotated, Literal

from pydantic import Field

from ..text.base import Model, Rule
from ..text.names import Endpoint, LocalObjectReference, Name, SecretKeySelector, VolumeClaim
from ..text.quantity import PATTERN_HINT, ByteQuantity

StoreURL = Annotated[
    str,
    Field(
        max_length=512,
        pattern=r"^(s3|gs|az)://[a-z0-9][-._a-z0-9]*(/[a-zA-Z0-9_][-._=a-zA-Z0-9]*)*$",
        json_schema_extra={PATTERN_HINT: "write it as s3://BUCKET/FOLDER, gs://… or az://…"},
    ),
]
"""A bucket and a folder in it. No part begins with a dot, so none leads upwards."""


class ObjectStoreSpec(Model):
    """A folder on an object store. Every run has a folder of its own in it, `<job>-<uid>`."""

    RULES = (
        Rule(
            "self.url.startsWith('s3://') || (!has(self.endpoint) && !has(self.region))",
            "endpoint and region belong to s3:// stores; remove them",
        ),
        Rule(
            "!self.url.startsWith('az://') || self.url.matches('^az://[^/]+/[^/]+')",
            "an az:// URL names account and container: az://account/container/folder",
        ),
    )

    url: StoreURL
    """Bucket and folder: `s3://bucket/folder`, `gs://bucket/folder` or
    `az://account/container/folder`."""
    endpoint: Endpoint | None = None
    """URL of the service, for s3:// stores that are not Amazon's. Unset: Amazon's."""
    region: (
        Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[-a-zA-Z0-9]+$")] | None
    ) = None
    """Region of the bucket, for s3://. Unset: us-east-1."""
    credentials_secret_ref: LocalObjectReference | None = None
    """Secret whose keys are the client's settings, such as AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY (docs/how-to/models/object-stores.md). Unset: the pods' own identity, by
    podTemplate.spec.serviceAccountName."""


class VolumeClaimTemplate(Model):
    """A claim that the operator creates for the job."""

    storage_class_name: Name | None = None
    """StorageClass. Unset: the cluster's default."""
    size: ByteQuantity
    """Requested size such as `100Gi`."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteMany for gangs of several nodes; ReadWriteOnce keeps the gang on one. Unset:
    ReadWriteMany."""
    retain: bool = True
    """Keep the claim and its checkpoints when the job is deleted. Unset: true."""


class CheckpointSpec(Model):
    """Where and how often the run saves its state."""

    RULES = (
        Rule(
            (
                "[has(self.volume), has(self.volumeClaimTemplate), has(self.store)].filter(given, "
                "given).size() <= 1"
            ),
            "set at most one of volume, volumeClaimTemplate, store",
        ),
    )

    volume: VolumeClaim | None = None
    """Volume shared by all nodes of the gang, mounted at /checkpoints. Unset: see
    volumeClaimTemplate."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """A claim of the job's own, created with it. Unset and no `volume` or `store`: the run can't be
    recovered after a failure, and condition Recoverable=False says so."""
    store: ObjectStoreSpec | None = None
    """An object store, for clusters without volumes that several nodes can mount. Unset: see
    volumeClaimTemplate."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Steps between checkpoints; resume is exact at any step. Unset: 100."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest complete checkpoints that are kept. Unset: 2."""

    @property
    def is_lasting(self) -> bool:
        """Whether checkpoints outlive the pods."""
        return self.is_on_volume or self.store is not None

    @property
    def is_on_volume(self) -> bool:
        """Whether they are on a volume, which all nodes of the gang mount."""
        return bool(self.volume or self.volume_claim_template)

    @property
    def is_on_one_node(self) -> bool:
        """Whether only one node can mount the job's own claim, so that the gang must be there."""
        template = self.volume_claim_template
        return template is not None and template.access_mode == "ReadWriteOnce"


class SamplesSpec(Model):
    """Groups of completions, kept beside the checkpoints and with the exported model, not on a
    hub."""

    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Least steps between two samples. Unset: 10."""
    groups: Annotated[int, Field(ge=0, le=1000)] = 2
    """Prompts of a sampled step, with all completions; 0: none. Unset: 2."""
    max_bytes: Annotated[int, Field(ge=65536, le=268435456)] = 16777216
    """Most bytes; then older samples are thinned out. Unset: 16777216."""


_HUB_PART = "[a-zA-Z0-9_]([-._a-zA-Z0-9]{0,94}[a-zA-Z0-9_])?"
HubRepository = Annotated[
    str,
    Field(
        min_length=3,
        max_length=193,
        pattern=f"^{_HUB_PART}/{_HUB_PART}$",
        json_schema_extra={PATTERN_HINT: "write it as NAMESPACE/NAME, such as my-team/my-model"},
    ),
]
"""A repository of the hub that can be written: with its namespace."""


class HubExportSpec(Model):
    """A model repository of the hub."""

    RULES = (
        Rule(
            "!self.repository.contains('--') && !self.repository.contains('..') && "
            "!self.repository.endsWith('.git') && !self.repository.endsWith('.ipynb')",
            (
                "the hub takes no repository with `--` or `..` in its name, or with .git or .ipynb "
                "at its end"
            ),
        ),
    )

    repository: HubRepository
    """Namespace and name, such as `team/model`; created if it is missing. Files of the same name
    are replaced, and a former model's weights removed, in one commit to its main branch."""
    private: bool = True
    """Whether only the namespace's members may see it; then a public repository is refused. It is
    set where the repository is created. Unset: true."""
    token_secret_ref: SecretKeySelector
    """Hub token that may write to the repository, and create it if it is missing."""


class ExportSpec(Model):
    """What becomes of the trained model or adapter."""

    RULES = (
        Rule(
            "(self.to == 'Hub') == has(self.hub)",
            (
                "export.to Hub needs export.hub, and export.hub belongs to export.to Hub: set both "
                "or none"
            ),
        ),
    )

    to: Literal["Volume", "ObjectStore", "Hub", "None"]
    """Volume, ObjectStore: a folder `export` beside the run's checkpoints, which are there. Hub: a
    repository, and that folder, too, where there are lasting checkpoints. None: the model ends with
    its pods."""
    hub: HubExportSpec | None = None
    """For Hub: which repository. Unset: none."""
    signing_key_secret_ref: SecretKeySelector | None = None
    """Private key, in PEM and without a password, that signs what the model was made of: Ed25519,
    or ECDSA on P-256 or P-384 (docs/how-to/models/verify.md). Unset: provenance.json is not
    signed."""

    @property
    def is_model_kept(self) -> bool:
        """Whether the model outlives the pods."""
        return self.to != "None"
