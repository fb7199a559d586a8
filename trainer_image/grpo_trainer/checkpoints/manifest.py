"""What is written beside checkpoints to say whose they are and that they are whole."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from grpo_api.report.report import Generations
from grpo_api.text.base import Model
from grpo_api.text.timing import Clock

OWNER = "owner.json"


class Owner(Model):
    """Whose checkpoints a folder has."""

    uid: str
    """uid of the GRPOJob."""
    attempt: Annotated[int, Field(ge=1)]
    """The newest attempt that claimed the folder; it alone may commit and delete."""


Algorithm = Literal["xxh3_128", "sha256"]
"""Hashes that a checkpoint's files may be recorded with."""


class FileRecord(Model):
    """One file of a complete checkpoint."""

    bytes: Annotated[int, Field(ge=0)]
    """Its size."""
    algorithm: Algorithm
    """What it was hashed with."""
    chunk_bytes: Annotated[int, Field(ge=1)]
    """Its bytes under one hash; the last hash is of what remains."""
    hashes: Annotated[list[str], Field(min_length=1)]
    """The hash of each chunk, in order, in hex; an empty file has one, of nothing."""

    @model_validator(mode="before")
    @classmethod
    def _of_version_one(cls, data: Any) -> Any:
        """Manifests were first written with one sha256 of the whole file: one chunk of its size."""
        if not isinstance(data, dict) or "sha256" not in data:
            return data
        size = data.get("bytes")
        # A chunk has at least one byte. What is no size is refused by the field `bytes`, with its own message.
        has_content = isinstance(size, int) and size > 0
        chunk_bytes = size if has_content else 1
        return {"bytes": size, "algorithm": "sha256", "chunkBytes": chunk_bytes, "hashes": [data["sha256"]]}

    @model_validator(mode="after")
    def _one_hash_per_chunk(self) -> Self:
        chunks = max(1, -(-self.bytes // self.chunk_bytes))
        if len(self.hashes) != chunks:
            raise ValueError(
                f"{self.bytes} bytes in chunks of {self.chunk_bytes} have {chunks} hashes, not {len(self.hashes)}"
            )
        return self


class Manifest(Model):
    """Proof that a checkpoint is complete: every rank's files were on disk when it was written."""

    attempt: int
    """The attempt that wrote it."""
    step: int
    """Finished optimizer steps."""
    identity: dict[str, str]
    """What the run is, by field path: a resumed run must agree (see identity.py)."""
    skipped: list[Generations] = []
    """What the run had left out of the order of the data by then (spec.guard.onDivergence)."""
    clock: Clock = Clock()
    """What rank 0 of that attempt had spent its time on by then: a run that continues here keeps so much of it."""
    files: dict[str, FileRecord]
    """Every file by its path inside the checkpoint."""


def identity_text(value: object) -> str:
    """A value as it stands in a manifest: compact JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
