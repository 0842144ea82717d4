"""Plot of continual learning: how well each method learns the new task, and how much it forgets."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from _continual_table import Cell, spread

# Okabe and Ito's colours, which the colour-blind tell apart, and a shape for each besides.
LOOKS = {
    "full": ("#000000", "o"),
    "lora": ("#E69F00", "s"),
    "peft-osf": ("#56B4E9", "^"),
    "mini-trainer": ("#CC79A7", "v"),
    "strict/direct": ("#D55E00", "D"),
    "strict/factors": ("#009E73", "P"),
    "paper": ("#0072B2", "X"),
}


def plot(reported: Mapping[str, Sequence[Sequence[Cell]]], before: Mapping[str, float], file: Path) -> None:
    """Plot each method as a line through its rates, the lowest first: means over the reported seeds, with standard errors."""
    mpl.rcParams["svg.hashsalt"] = "forge"
    panels = (("backward", "backward transfer, points"), ("skills", "skills of the pretraining, % right"))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for axis, (name, label) in zip(axes, panels, strict=True):
        for method, rows in reported.items():
            colour, shape = LOOKS[method]
            points = [[100 * value for f in ("new_task", name) for value in spread(cells, f)] for cells in rows]
            x, x_error, y, y_error = zip(*points, strict=True)
            axis.errorbar(
                x, y, y_error, x_error, color=colour, marker=shape, markersize=7, capsize=2, linewidth=1.2, label=method
            )
        axis.set_xlabel("accuracy on the task just learned, %")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].axhline(0, color="gray", linestyle=":")
    axes[1].axhline(100 * before["skills"], color="gray", linestyle=":")
    axes[0].legend(fontsize=8)
    figure.savefig(file, metadata={"Date": None})
