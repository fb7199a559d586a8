"""RFC 3339 timestamps, as the API server writes them, from and to unix seconds."""

from datetime import UTC, datetime


def seconds(text: str | None) -> float | None:
    """Unix time of an RFC 3339 timestamp; None for one that is absent or empty.

    Raises:
        ValueError: the text is no such timestamp.
    """
    if not text:
        return None
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return when.timestamp()


def timestamp(unix: float) -> str:
    """RFC 3339 in UTC with whole seconds, as metav1.Time is written."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
