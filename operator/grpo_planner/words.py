"""Numbers as the planner's sentences write them: counts with their noun, bytes in GiB."""

from grpo_api.quantity import GIB


def gib(count: float) -> str:
    """Bytes as `57.0 GiB`."""
    return f"{count / GIB:.1f} GiB"


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 processes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"
