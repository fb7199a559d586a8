"""Writes pictures by matplotlib, which nothing else needs."""

import io
from pathlib import Path
from typing import Any, Literal

from .errors import OptionError

_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "grpo"}
"""Text stays text, and the same numbers give the same file."""


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("a picture needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: Any, kind: Literal["svg", "png"], path: Path | None) -> None:
    """Write a figure into a file; without one print it, as svg.

    Raises:
        OptionError: the file can't be written.
    """
    from matplotlib import rc_context

    picture = io.BytesIO()
    with rc_context(_SETTINGS):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(picture, format=kind, dpi=120, metadata=metadata)
    if path is None:
        print(picture.getvalue().decode(), end="")
        return
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise OptionError(f"the picture can't be written: {error}") from error
