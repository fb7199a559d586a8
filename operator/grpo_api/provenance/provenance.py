"""Defines the documents that state what an exported or a converted model was made of, and how they
are signed.

The trainer and `grpo verify` share this format. The document of an export is an in-toto Statement
(v1) about every file of the export, with SLSA's provenance (v1) as its predicate. The signature is
a DSSE envelope around the exact bytes of the Statement. Other tools read both, too. As in-toto's
parsing rules demand, readers ignore unknown fields, because a newer writer may have added them.

`grpo export --merge` and `--dtype` convert a model. The conversion makes other files, for which the
export's document would be false. So a conversion has a document of its own, which names each input
file by its hash. The documents of the export are copied unchanged into the folder ORIGINAL. Nobody
signs a conversion: it is made on demand, long after the signing key was used.

Formats: in-toto.io/Statement/v1, slsa.dev/provenance/v1, github.com/secure-systems-lab/dsse
(protocol 1.0).
"""

import base64
from typing import Annotated, Any, Literal

from pydantic import AliasPath, ConfigDict, Field, field_validator

from ..report.artifacts import weights_hash
from ..text.base import Model
from ..text.contract import GROUP

STATEMENT_FILE = "provenance.json"
"""The Statement, beside the files that it is about."""
ENVELOPE_FILE = "provenance.intoto.jsonl"
"""The signed Statement, one envelope in a line; the suffix is in-toto's for such files."""
OWN_FILES = (STATEMENT_FILE, ENVELOPE_FILE)
"""Files of an export that no Statement can be about."""
MOST_BYTES = 16 * 2**20
"""Longest file of these two that is read: a Statement takes 150 bytes per file and some 20 KB
besides."""

STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Literal["https://slsa.dev/provenance/v1"] = "https://slsa.dev/provenance/v1"
PAYLOAD_TYPE: Literal["application/vnd.in-toto+json"] = "application/vnd.in-toto+json"
BUILD_TYPE = f"https://{GROUP}/training/v1"
"""What the parameters mean: docs/how-to/models/verify.md says it."""
BUILDER = f"https://{GROUP}/trainer"
"""Who says all this: the trainer, in the pod of rank 0."""

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Record(Model):
    """A part of the document."""

    model_config = ConfigDict(extra="ignore")


class FileDigest(Record):
    """A file's digest."""

    sha256: Hex
    """In hex."""


class Subject(Record):
    """One file of the export."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its path inside the export, with slashes."""
    digest: FileDigest
    """Of its content."""


class Dependency(Record):
    """One thing that the model was made of (in-toto's ResourceDescriptor)."""

    name: str
    """What it was to the run: model, dataset, rows, rewards[0].model, image."""
    uri: str = ""
    """Where it was taken from, as far as there is a name for that."""
    digest: dict[str, str] = {}
    """What it was, for certain; empty where only the name is known."""
    annotations: dict[str, str] = {}
    """What else is known of it."""


class ExternalParameters(Record):
    """What the user asked for."""

    spec: dict[str, Any]
    """Sections of the GRPOJob's spec that the training pods receive, defaults included."""
    omitted: list[str]
    """Sections of the spec that they do not receive, and that are therefore left out here."""


class InternalParameters(Record):
    """What the operator made of it."""

    job: dict[str, str | int]
    """Namespace, name and uid of the GRPOJob, and the attempt that exported."""
    execution: dict[str, Any]
    """The plan of that attempt, as in status.plan."""
    pod_plan: dict[str, Any]
    """The other sections of the plan that its pods received: where to begin, which commits to
    fetch, what data to leave out."""


class BuildDefinition(Record):
    """SLSA's: what was asked for, and what it was made of."""

    build_type: str
    """How to read the parameters."""
    external_parameters: ExternalParameters
    """What the user asked for."""
    internal_parameters: InternalParameters
    """What the operator made of it."""
    resolved_dependencies: list[Dependency]
    """Model, data, reward models and image."""


class Builder(Record):
    """SLSA's: who made it."""

    id: str
    """BUILDER."""
    version: dict[str, str]
    """Every Python package of the image by its name, Python itself included."""


class BuildMetadata(Record):
    """SLSA's: which run this was."""

    invocation_id: str
    """uid of the GRPOJob and the attempt."""
    started_on: str
    """When the process of rank 0 that exported the model started, by its node's clock (RFC
    3339)."""
    finished_on: str
    """When the Statement was made, by the same clock."""


class End(Record):
    """How processes of an attempt ended."""

    result: str
    """The class of the end."""
    step: int
    """Their last finished optimizer step."""
    ranks: int
    """How many processes ended so."""


class AttemptRecord(Record):
    """One attempt of the run."""

    attempt: int
    """Its number, from 1."""
    ends: list[End] = []
    """Outcomes that its processes wrote onto the volume; empty without a volume, or if no process
    could write one."""
    reason: str = ""
    """How it ended as the operator saw it; empty where it no longer knew, and for the one that
    exported."""
    resumed_from_step: int | None = None
    """Step of the checkpoint that it began at, 0 for none; known of the one that exported."""


class ReferenceRecord(Record):
    """What the KL term was measured against."""

    strategy: str
    """The strategy that the plan chose."""
    sync_every_steps: int | None = None
    """spec.reference.sync.everySteps; absent for a reference that stays."""
    mixup: float | None = None
    """spec.reference.sync.mixup."""
    syncs: int = 0
    """How often the reference was moved, in all attempts together, what was lost to restarts left
    out."""
    last_sync_step: int = 0
    """The step after which it was moved last; 0 for never."""


class WeightsProof(Record):
    """A model that was compared with its files, bit for bit, in the attempt that exported."""

    what: str
    """Which model, and when."""
    parameters: int
    """Parameters that were compared."""
    fingerprint: str
    """XXH3-128 over the ranks' weights; the same for the same weights, parallelism and number of
    ranks."""


class EnvironmentRecord(Record):
    """Where rank 0 of the attempt ran that exported the model."""

    platform: str
    """Kernel and processor."""
    command: list[str]
    """The process's command line."""
    variables: list[str]
    """Names of all its environment variables; no values, for some are secrets."""
    gpus: list[str] = []
    """Products of the GPUs that the process saw."""
    driver: str = ""
    """Version of their driver; empty where it isn't known."""
    cuda: str = ""
    """Version of CUDA that torch was built for; empty for a build without."""


class RunRecord(Record):
    """What SLSA has no place for: the run itself."""

    steps: int
    """Optimizer steps behind the model."""
    attempts: list[AttemptRecord]
    """All attempts, the first first; the last one exported the model."""
    reference: ReferenceRecord
    """What the KL term was measured against."""
    proofs: list[WeightsProof]
    """What was proven of the weights."""
    environment: EnvironmentRecord
    """Where rank 0 ran."""


class RunDetails(Record):
    """SLSA's: how it was made."""

    builder: Builder
    """Who."""
    metadata: BuildMetadata
    """Which run."""
    grpo_run: Annotated[RunRecord, Field(alias="grpo_run")]
    """The run; SLSA wants a vendor's name before fields of its own."""


class Provenance(Record):
    """The predicate."""

    build_definition: BuildDefinition
    """What was asked for."""
    run_details: RunDetails
    """How it was made."""


class Described(Record):
    """A document about the files that it lies beside, less what they were made of."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    """The format of the document."""
    subject: list[Subject]
    """Every file of the folder but OWN_FILES, sorted by name."""
    predicate_type: Literal["https://slsa.dev/provenance/v1"]
    """The format of the predicate."""

    @field_validator("subject")
    @classmethod
    def _each_once(cls, subjects: list[Subject]) -> list[Subject]:
        names = [subject.name for subject in subjects]
        if len(set(names)) < len(names):
            raise ValueError("names a file twice")
        return subjects

    @property
    def sums(self) -> dict[str, str]:
        """Name → sha256 of the files."""
        return {subject.name: subject.digest.sha256 for subject in self.subject}


class Statement(Described):
    """The document beside an export."""

    predicate: Provenance
    """What the files were made of, and how."""


class Signature(Record):
    """One signature of an envelope."""

    keyid: str = ""
    """A hint to the key, which nothing vouches for: signing.key_id."""
    sig: str
    """The signature's bytes in base64."""


class Envelope(Record):
    """DSSE's envelope."""

    payload: str
    """The signed bytes in base64."""
    payload_type: Literal["application/vnd.in-toto+json"]
    """What they are; it is signed with them."""
    signatures: Annotated[list[Signature], Field(min_length=1, max_length=64)]
    """At least one."""

    @property
    def content(self) -> bytes:
        """The signed bytes.

        Raises:
            ValueError: the payload is no base64.
        """
        return base64.b64decode(self.payload, validate=True)


def signed_bytes(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """What a signature is made over: type and content with their lengths, so that neither can be
    taken for the other.

    DSSE's pre-authentication encoding, PAE.
    """
    return b"DSSEv1 %d %b %d %b" % (len(payload_type), payload_type.encode(), len(payload), payload)


CONVERSION_TYPE = f"https://{GROUP}/conversion/v1"
"""What the parameters mean: docs/how-to/models/verify.md says it."""
ORIGINAL = "original"
"""Folder of a converted model with the documents of the export that it was made of."""
CONSUMED = "export/"
"""What the names of the export's files begin with among what a conversion was made of."""


class ConversionParameters(Record):
    """What the user asked for."""

    merge: bool
    """Whether an adapter was merged into its base."""
    dtype: Literal["bfloat16", "float32"]
    """Dtype of the weights that were written."""

    @property
    def description(self) -> str:
        """A phrase on what the conversion did, for messages."""
        return f"merged into its base, to {self.dtype}" if self.merge else f"to {self.dtype}"


class ConversionDefinition(Record):
    """SLSA's: what was asked for, and what it was made of."""

    build_type: str
    """CONVERSION_TYPE."""
    external_parameters: ConversionParameters
    """What the user asked for."""
    resolved_dependencies: list[Dependency]
    """The export's files, whose names begin with CONSUMED, and the base that an adapter was merged
    into."""


class ConversionDetails(Record):
    """SLSA's: how it was made."""

    builder: Builder
    """Who."""
    metadata: BuildMetadata
    """Of which job's attempt the export was, and when it was converted."""


class Conversion(Record):
    """The predicate."""

    build_definition: ConversionDefinition
    """What was asked for."""
    run_details: ConversionDetails
    """How it was made."""

    @property
    def consumed_digests(self) -> dict[str, str]:
        """Name → sha256 of the export's files that were converted."""
        dependencies = self.build_definition.resolved_dependencies
        named = {
            dependency.name.removeprefix(CONSUMED): dependency
            for dependency in dependencies
            if dependency.name.startswith(CONSUMED)
        }
        return {name: dependency.digest.get("sha256", "") for name, dependency in named.items()}

    @property
    def weights_hash(self) -> str:
        """The one hash of the weights that went in."""
        return weights_hash(self.consumed_digests)

    @property
    def description(self) -> str:
        """A phrase on what the conversion did and to which weights, for messages."""
        return (
            f"{self.build_definition.external_parameters.description}, from weights "
            f"{self.weights_hash}"
        )


class ConversionStatement(Described):
    """The document beside a converted model."""

    predicate: Conversion
    """What the files were made of, and how."""


class _Kind(Record):
    """The part of a document that identifies it."""

    build_type: Annotated[
        Any, Field(validation_alias=AliasPath("predicate", "buildDefinition", "buildType"))
    ] = None


def read_statement(text: bytes) -> Statement | ConversionStatement:
    """The document of an export, or of a conversion.

    Raises:
        ValueError: it is neither.
    """
    converted = _Kind.model_validate_json(text).build_type == CONVERSION_TYPE
    return (ConversionStatement if converted else Statement).model_validate_json(text)
