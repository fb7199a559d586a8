"""What a run reports of an experiment tracker: a part of Progress and, as it is, of the status."""

from typing import Annotated

from pydantic import Field

from ..text.base import Model
from ..text.quantity import Count

MAX_URL = 512
URL_PATTERN = r"^https?://[-.a-zA-Z0-9]+(:[0-9]{1,5})?(/[-._~%+=,/#a-zA-Z0-9]*)?$"
"""A page that a user may open: a pod's word is not trusted, so no user, no query and no script."""
MAX_TRACKER_PROBLEM = 300


class TrackerReport(Model):
    """A tracker and the current attempt."""

    name: Annotated[str, Field(min_length=1, max_length=32, pattern="^[a-z]+$")]
    """As in spec.tracking."""
    run_id: Annotated[str, Field(max_length=256)] = ""
    """Its id of the run; empty until it has answered."""
    url: Annotated[str, Field(max_length=MAX_URL, pattern=URL_PATTERN)] | None = None
    """Its page, if it has one."""
    lost_rows: Count = 0
    """Steps that it did not get."""
    problem: Annotated[str, Field(max_length=MAX_TRACKER_PROBLEM)] = ""
    """Why; empty while it gets them."""
