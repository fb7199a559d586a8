"""What the processes of a delivery's pod know of each other, as files of one folder: what is served, and for whom.

The pod lives as long as somebody asks for something, so that none stays behind whose user has gone.
"""

import os
from pathlib import Path

from grpo_api.report.artifacts import Listing
from grpo_api.text.clock import Clock

from ..clock import SYSTEM_CLOCK, unix_time
from ..files import write_atomically
from ..plan_file import read_plan
from .sources import Folder, Source, exported

_LISTING = "listing.json"
_MODEL = "model"
_ASKED = "asked"


def publish(state: Path, model: Source, listing: Listing) -> None:
    """The files can be had from now on."""
    if isinstance(model, Folder):
        (state / _MODEL).symlink_to(model.path)
    write_atomically(state / _LISTING, listing.model_dump_json())


def published(state: Path) -> Listing | None:
    """What can be had; None until it is prepared."""
    try:
        return Listing.model_validate_json((state / _LISTING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def source(state: Path, clock: Clock = SYSTEM_CLOCK) -> Source:
    """Where the files are.

    Raises:
        BadInput: they are gone from the object store.
    """
    folder = state / _MODEL
    return Folder(folder) if folder.is_symlink() else exported(read_plan(os.environ), clock)


def asked(state: Path) -> None:
    """Somebody is there."""
    (state / _ASKED).touch()


def idle_seconds(state: Path) -> float:
    """How long nobody has asked for anything."""
    return unix_time() - (state / _ASKED).stat().st_mtime
