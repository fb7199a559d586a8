"""What is written beside checkpoints to say whose they are and that they are whole."""

import json
from typing import Annotated

from pydantic import Field

from grpo_api.base import Model

MANIFEST = "manifest.json"
OWNER = "owner.json"


class Owner(Model):
    """Whose checkpoints a folder has."""

    uid: str
    """uid of the GRPOJob."""
    attempt: Annotated[int, Field(ge=1)]
    """The newest attempt that claimed the folder; it alone may commit and delete."""


class FileRecord(Model):
    """One file of a complete checkpoint."""

    bytes: Annotated[int, Field(ge=0)]
    """Its size."""
    sha256: str
    """Its hash, in hex."""


class Manifest(Model):
    """Proof that a checkpoint is complete: every rank's files were on disk when it was written."""

    attempt: int
    """The attempt that wrote it."""
    step: int
    """Finished optimizer steps."""
    identity: dict[str, str]
    """What the run is, by field path: a resumed run must agree (see identity.py)."""
    files: dict[str, FileRecord]
    """Every file by its path inside the checkpoint."""


def identity_text(value: object) -> str:
    """A value as it stands in a manifest: compact JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
