"""How long to wait: the time that waiting code takes from its caller, and the pause that a server
asks for.

A test moves that time instead of waiting for it.
"""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow, and pauses in them."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment; they never go back."""

    def sleep(self, seconds: float) -> None:
        """Return after this number of seconds."""


def requested_pause(headers: Mapping[str, str], longest: float) -> float:
    """Seconds that a Retry-After header asks for (RFC 9110, section 10.2.3), `longest` at most; 0
    for none or nonsense.

    A date is compared with the answer's own Date: the error of the server's clock is unknown.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", value):
        return min(float(value), longest)
    try:
        pause = parsedate_to_datetime(value) - parsedate_to_datetime(headers.get("Date", ""))
    # No dates, or one with a time zone and one without.
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(pause.total_seconds(), 0.0), longest)
