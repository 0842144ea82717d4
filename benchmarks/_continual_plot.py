"""Curves and cells -> a plot: how well each method learns the new task, and what it forgets for that."""

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


def plot(
    curves: Mapping[str, Mapping[float, Mapping[str, float]]],
    tables: Mapping[str, Mapping[str, Sequence[Cell]]],
    before: Mapping[str, float],
    file: Path,
) -> None:
    """Lines: every rate that the search tried. Marks with bars: the matched rates on the reported seeds, with standard errors."""
    panels = (("backward", "backward transfer, points"), ("skills", "skills of the pretraining, % right"))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for axis, (name, label) in zip(axes, panels, strict=True):
        for method, rows in curves.items():
            colour, shape = LOOKS[method]
            points = [(100 * row["new_task"], 100 * row[name]) for _, row in sorted(rows.items())]
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=1, alpha=0.5, marker=shape, markersize=3)
            x, y = (spread(tables["matched"][method], f) for f in ("new_task", name))
            axis.errorbar(
                100 * x[0],
                100 * y[0],
                100 * y[1],
                100 * x[1],
                color=colour,
                marker=shape,
                markersize=9,
                capsize=3,
                linestyle="",
                label=method,
            )
        axis.set_xlabel("accuracy on the task just learned, %")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[1].axhline(100 * before["skills"], color="gray", linestyle=":")
    axes[0].axhline(0, color="gray", linestyle=":")
    axes[0].legend(fontsize=8)
    plt.rcParams["svg.hashsalt"] = "forge"
    figure.savefig(file, metadata={"Date": None})
