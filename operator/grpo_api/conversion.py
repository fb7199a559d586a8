"""What a converted model was made of: the document beside what `grpo export --merge` and `--dtype` give.

A conversion makes other files, of which the export's own document would be false. So it has one of its own, which names
every file that went in by its hash; the export's documents come along in the folder ORIGINAL, as they were. Nobody
signs a conversion: it is made on demand, long after the key was used.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasPath, Field

from .artifacts import weights_hash
from .contract import GROUP
from .provenance import Builder, BuildMetadata, Dependency, Described, Record, Statement

CONVERSION_TYPE = f"https://{GROUP}/conversion/v1"
"""What the parameters mean: docs/verify.md says it."""
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
    def words(self) -> str:
        """What was done, for people."""
        return f"merged into its base, to {self.dtype}" if self.merge else f"to {self.dtype}"


class ConversionDefinition(Record):
    """SLSA's: what was asked for, and what it was made of."""

    build_type: str
    """CONVERSION_TYPE."""
    external_parameters: ConversionParameters
    """What the user asked for."""
    resolved_dependencies: list[Dependency]
    """The export's files, whose names begin with CONSUMED, and the base that an adapter was merged into."""


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
    def consumed(self) -> dict[str, str]:
        """Name → sha256 of the export's files that went in."""
        dependencies = self.build_definition.resolved_dependencies
        named = {one.name.removeprefix(CONSUMED): one for one in dependencies if one.name.startswith(CONSUMED)}
        return {name: one.digest.get("sha256", "") for name, one in named.items()}

    @property
    def weights_hash(self) -> str:
        """The one hash of the weights that went in."""
        return weights_hash(self.consumed)

    @property
    def words(self) -> str:
        """What was done to what, for people."""
        return f"{self.build_definition.external_parameters.words}, from weights {self.weights_hash}"


class ConversionStatement(Described):
    """The document beside a converted model."""

    predicate: Conversion
    """What the files were made of, and how."""


class _Kind(Record):
    """As much of a document as tells which one it is."""

    build_type: Annotated[Any, Field(validation_alias=AliasPath("predicate", "buildDefinition", "buildType"))] = None


def read_statement(text: bytes) -> Statement | ConversionStatement:
    """The document of an export, or of a conversion.

    Raises:
        ValueError: it is neither.
    """
    converted = _Kind.model_validate_json(text).build_type == CONVERSION_TYPE
    return (ConversionStatement if converted else Statement).model_validate_json(text)
