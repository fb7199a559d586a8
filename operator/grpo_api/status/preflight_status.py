"""status.preflight: what was found out about a job before its first attempt."""

from typing import Annotated

from pydantic import Field

from ..report.preflight import PreflightReport
from ..text.base import Model
from ..text.quantity import Count
from ..text.timing import Time


class PreflightStatus(Model):
    """The preflight of one version of the spec. Another spec or another image is checked again."""

    digest: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]{64}$")]
    """sha256 of the image and of the parts of the spec that were checked."""
    tries: Count = 0
    """Preflights that have ended; the pause before the next one doubles with each."""
    job_uid: Annotated[str, Field(max_length=64)] | None = None
    """uid of the Job of the last one that has ended."""
    time: Time | None = None
    """When that was."""
    report: PreflightReport | None = None
    """What the last one reported; absent where it made no report."""
    cause: Annotated[str, Field(max_length=512)] | None = None
    """Why there is no report."""
    blocked_since: Time | None = None
    """Since when something keeps the preflight, and not the job, from running."""
    given_up: bool = False
    """True if the job may start without having been checked."""
