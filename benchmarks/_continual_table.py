"""Cells -> the rate of each method, the table and the sentences about it.

The rules, the same for every method, looked at on the tuning seeds alone:

- tuned: the lowest rate whose accuracy on the task just learned comes within two points of the method's best.
- matched: the lowest rate whose accuracy on the task just learned comes within two points of what the slowest learner reaches at its best,
  so that all are compared where they learn equally well.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Cell = dict[str, Any]
CLOSE = 0.02
"""Two accuracies count as equal up to here."""


def curve(cells: Sequence[Cell], method: str) -> dict[float, dict[str, float]]:
    """Rate -> the means over seeds of a method's cells."""
    found: dict[float, dict[str, float]] = {}
    for rate in sorted({c["rate"] for c in cells if c["method"] == method}):
        of_rate = [c for c in cells if c["method"] == method and c["rate"] == rate]
        found[rate] = {name: float(np.mean([c[name] for c in of_rate])) for name in FIGURES}
    return found


FIGURES = ("new_task", "average", "backward", "kept", "text_loss", "skills")


def best(found: dict[float, dict[str, float]]) -> float:
    """The highest accuracy on tasks just learned."""
    return max(row["new_task"] for row in found.values())


def lowest_rate(found: dict[float, dict[str, float]], wanted: float) -> float:
    """The lowest rate that comes within `CLOSE` of it, or else of the method's best."""
    wanted = min(wanted, best(found)) - CLOSE
    return min(rate for rate, row in found.items() if row["new_task"] >= wanted)


def spread(cells: Sequence[Cell], figure: str) -> tuple[float, float]:
    """(mean, standard error) over seeds."""
    values = [c[figure] for c in cells]
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def table(chosen: dict[str, Sequence[Cell]], before: dict[str, float]) -> str:
    """A markdown table: a row a method, means over seeds with standard errors."""
    lines = [
        "| method | rate | new tasks | average accuracy | backward transfer | kept | skills | text loss |",
        "|---|---|---|---|---|---|---|---|",
        f"| before the tasks | | | | | | {100 * before['skills']:.1f} | {before['text_loss']:.3f} |",
    ]
    for method, cells in chosen.items():
        percent = [spread(cells, f) for f in ("new_task", "average", "backward", "kept", "skills")]
        text = spread(cells, "text_loss")
        figures = " | ".join(f"{100 * m:.1f} ± {100 * e:.1f}" for m, e in percent)
        lines.append(f"| {method} | {cells[0]['rate']:g} | {figures} | {text[0]:.3f} ± {text[1]:.3f} |")
    return "\n".join(lines)
