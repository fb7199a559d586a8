"""What the processes of a delivery's pod know of each other, as files of one folder: what is served, and for whom.

The pod lives as long as somebody asks for something, so that none stays behind whose user has gone.
"""

import time
from pathlib import Path

from grpo_api.artifacts import Listing

from ..files import write_atomically

_LISTING = "listing.json"
_MODEL = "model"
_ASKED = "asked"


def publish(state: Path, model: Path, listing: Listing) -> None:
    """The folder can be had from now on."""
    (state / _MODEL).symlink_to(model)
    write_atomically(state / _LISTING, listing.model_dump_json())


def published(state: Path) -> Listing | None:
    """What can be had; None until it is prepared."""
    try:
        return Listing.model_validate_json((state / _LISTING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def model_file(state: Path, name: str) -> Path:
    """A file of the folder."""
    return state / _MODEL / name


def asked(state: Path) -> None:
    """Somebody is there."""
    (state / _ASKED).touch()


def idle_seconds(state: Path) -> float:
    """How long nobody has asked for anything."""
    return time.time() - (state / _ASKED).stat().st_mtime
