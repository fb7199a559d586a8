"""Draws reward and KL over the steps of a run into one PNG.

The demo ends with this picture of what was learned, and at what distance from the reference.
"""

from pathlib import Path

import matplotlib as mpl

from .follow import History

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(history: History, title: str, path: Path) -> None:
    """Writes the picture; reward on the left axis, KL on the right."""
    figure, left = plt.subplots(figsize=(9, 4.5), layout="constrained")
    right = left.twinx()
    series = (("reward", left, "tab:blue", "mean reward"), ("kl", right, "tab:orange", "KL to the reference"))
    for key, axis, colour, label in series:
        points = history.series(key)
        axis.plot([step for step, _ in points], [value for _, value in points], color=colour)
        axis.set_ylabel(label, color=colour)
        axis.set_ylim(bottom=0)
    left.set_xlabel("optimizer step")
    left.set_title(title)
    left.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
