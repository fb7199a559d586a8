"""Draws reward, KL and entropy over the steps of a run into one PNG.

The demo ends with this picture of what was learned, at what distance from the reference, and how
much the policy still varies.
"""

from pathlib import Path

import matplotlib as mpl

from .follow import History

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def draw(history: History, title: str, path: Path) -> None:
    """Write the picture: one panel each for reward, KL and entropy, above one axis of steps."""
    figure, (reward, kl, entropy) = plt.subplots(
        3, sharex=True, figsize=(8, 7), height_ratios=(2, 1, 1), layout="constrained"
    )
    draw_reward(history, reward)
    draw_line(history, "kl", kl, "tab:orange", "KL to the reference\n(nats per token)")
    draw_line(history, "entropy", entropy, "tab:green", "entropy\n(nats per token)")
    reward.set_title(title)
    entropy.set_xlabel("optimizer step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_reward(history: History, axis: Axes) -> None:
    """Draw the mean reward and, around it, the standard deviation within a group of completions."""
    draw_line(history, "reward", axis, "tab:blue", "reward")
    means, spreads = dict(history.series("reward")), dict(history.series("reward_std"))
    steps = sorted(means.keys() & spreads.keys())
    low = [means[step] - spreads[step] for step in steps]
    high = [means[step] + spreads[step] for step in steps]
    axis.fill_between(steps, low, high, color="tab:blue", alpha=0.15, linewidth=0)
    axis.legend(["mean of a step", "± standard deviation within a group"], loc="lower right")


def draw_line(history: History, key: str, axis: Axes, colour: str, label: str) -> None:
    """Draw a metric by step, on an axis that begins at 0."""
    points = history.series(key)
    axis.plot([step for step, _ in points], [value for _, value in points], color=colour)
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
