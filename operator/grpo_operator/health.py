"""The operator's health by its watches: which are not served, which are silent, and which objects can't be read.

/readyz, /healthz and the metrics all use these functions, so that they never disagree.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .cluster.unreadable import Unreadables
from .cluster.watcher import Mirror

Mirrors = Mapping[str, Mirror[Any]]
"""By kind and namespace, such as `pods/*`."""


def not_served(mirrors: Mirrors) -> str:
    """What the API server does not serve now; all else goes on, so it is a detail and no reason to be unready."""
    lines: list[str] = []
    for name, mirror in mirrors.items():
        # a cluster may well lack an optional kind, but a missing right to see it is a mistake
        matters = mirror.forbidden or not mirror.optional
        if mirror.not_served and matters:
            lines.append(f"not served now: {name}: {mirror.not_served}")
    return "\n".join(lines)


def deaf(mirrors: Mirrors, now: float, limit: float) -> str:
    """Return a sentence that names the watches without a LIST, event or bookmark for `limit` seconds; empty if none.

    A watch that is not served is left out: it is being retried, and a restart would not help. `now` is the event loop's
    time, as are the mirrors' times.
    """
    names: list[str] = []
    for name, mirror in mirrors.items():
        if mirror.heard_at is not None and now - mirror.heard_at > limit:
            names.append(name)
    return f"nothing heard for {limit:.0f} s from: {', '.join(names)}" if names else ""


def heard(mirrors: Mirrors, now: float, unix: float) -> dict[str, float]:
    """Return, by kind, the unix time in seconds of the last LIST, event or bookmark.

    Of several namespaces the oldest time counts. `now` and `unix` are the same moment on the two clocks.
    """
    times: dict[str, float] = {}
    for name, mirror in mirrors.items():
        kind = name.partition("/")[0]
        if mirror.heard_at is not None:
            times[kind] = min(times.get(kind, unix), unix - (now - mirror.heard_at))
    return times


def unreadable(*sources: Unreadables) -> Counter[str]:
    """How many objects can't be read, by kind, from all sources."""
    total: Counter[str] = Counter()
    for source in sources:
        total.update(source.counts())
    return total
