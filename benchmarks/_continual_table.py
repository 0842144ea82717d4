"""Tables of continual learning: the rate of each method, and means with standard errors.

Two rules choose the rates, the same for every method, by the tuning seeds alone:

- tuned: the lowest rate whose accuracy on the task just learned comes within two points of the method's best.
- level: two points below what the slowest learner reaches at its best, where all methods learn equally well. Every figure is
interpolated
  linearly, seed by seed, between the two neighbouring rates whose accuracies on tasks just learned are on either side of it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

Cell = dict[str, Any]
CLOSE = 0.02
"""Difference up to which two accuracies count as equal."""
LEVELS = (0.85, 0.875, 0.9, 0.925)
"""Accuracies on tasks just learned at which methods are compared, where there are measurements on both sides."""


def curve(cells: Sequence[Cell], method: str) -> dict[float, dict[str, float]]:
    """Return, by rate, the means over seeds of a method's cells."""
    found: dict[float, dict[str, float]] = {}
    for rate in sorted({c["rate"] for c in cells if c["method"] == method}):
        of_rate = [c for c in cells if c["method"] == method and c["rate"] == rate]
        found[rate] = {name: float(np.mean([c[name] for c in of_rate])) for name in FIGURES}
    return found


FIGURES = ("new_task", "average", "backward", "kept", "text_loss", "skills")


def best(found: dict[float, dict[str, float]]) -> float:
    """Return the highest accuracy on tasks just learned."""
    return max(row["new_task"] for row in found.values())


def lowest_rate(found: dict[float, dict[str, float]], wanted: float) -> float:
    """Return the lowest rate that learns as well as `wanted`, or else as the method's best."""
    wanted = min(wanted, best(found))
    return min(rate for rate, row in found.items() if row["new_task"] >= wanted)


def at_level(lower: Sequence[Cell], upper: Sequence[Cell], level: float) -> list[Cell]:
    """Interpolate the cells of two neighbouring rates, seed by seed, to where their mean accuracy is `level`."""
    low, high = (spread(cells, "new_task")[0] for cells in (lower, upper))
    share = 1.0 if high <= level else 0.0 if low >= level else (level - low) / (high - low)
    rate = f"{lower[0]['rate']:g} to {upper[0]['rate']:g}"
    # Cells of former versions have no kl_base.
    figures = (*FIGURES, *(f for f in ("kl_base",) if f in lower[0] and f in upper[0]))
    return [
        {"method": a["method"], "rate": rate, "seed": a["seed"]} | {f: (1 - share) * a[f] + share * b[f] for f in figures}
        for a, b in zip(lower, upper, strict=True)
    ]


def spread(cells: Sequence[Cell], figure: str) -> tuple[float, float]:
    """Return (mean, standard error) over cells."""
    values = [c[figure] for c in cells]
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def along(rows: Sequence[Sequence[Cell]], level: float) -> list[Cell] | None:
    """Interpolate a method's cells, given by rate, at `level`; None where it never learns so well."""
    ordered = sorted(rows, key=lambda cells: cells[0]["rate"])
    for lower, upper in pairwise(ordered):
        if spread(lower, "new_task")[0] <= level <= spread(upper, "new_task")[0]:
            return at_level(lower, upper, level)
    return None


def levels_table(rows: Mapping[str, Sequence[Sequence[Cell]]]) -> tuple[str, dict[str, dict[str, float]]]:
    """Return (markdown, means) of the backward transfer of each method at each of `LEVELS`."""
    found: dict[str, dict[str, float]] = {}
    lines = ["| method | " + " | ".join(f"{100 * level:g} %" for level in LEVELS) + " |", "|---" * (1 + len(LEVELS)) + "|"]
    for method, cells in rows.items():
        found[method] = {}
        written = []
        for level in LEVELS:
            there = along(cells, level)
            if there is None:
                written.append("")
                continue
            mean, error = spread(there, "backward")
            found[method][f"{level:g}"] = mean
            written.append(f"{100 * mean:.1f} ± {100 * error:.1f}")
        lines.append(f"| {method} | {' | '.join(written)} |")
    return "\n".join(lines), found


def table(chosen: dict[str, Sequence[Cell]], before: dict[str, float], reference: str) -> str:
    """Write a markdown table: a row a method, means over seeds with standard errors, in percent but for the text's loss.

    The last column is a method's backward transfer less that of `reference`, seed by seed.
    """
    lines = [
        "| method | rate | new tasks | average accuracy | backward transfer | old tasks | skills | text, nats "
        f"| less {reference} |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| before | | | | | | {100 * before['skills']:.1f} | {before['text_loss']:.3f} | |",
    ]
    for method, cells in chosen.items():
        percent = [spread(cells, f) for f in ("new_task", "average", "backward", "kept", "skills")]
        text = spread(cells, "text_loss")
        figures = " | ".join(f"{100 * m:.1f} ± {100 * e:.1f}" for m, e in percent)
        less = ""
        if reference in chosen and method != reference:
            pairs = zip(cells, chosen[reference], strict=True)
            mean, error = spread([{"less": a["backward"] - b["backward"]} for a, b in pairs], "less")
            less = f"{100 * mean:+.1f} ± {100 * error:.1f}"
        lines.append(f"| {method} | {cells[0]['rate']} | {figures} | {text[0]:.2f} ± {text[1]:.2f} | {less} |")
    return "\n".join(lines)
