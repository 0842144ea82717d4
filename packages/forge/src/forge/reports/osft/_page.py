"""What OSFT moved → one HTML page: no network, readable without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from forge.reports._page import PLOTS, page
from forge.reports.osft._drawings import draw_change, spectrum

if TYPE_CHECKING:
    from forge_algos.adaptations import Moved, Portrait

_NEGLIGIBLE = 1e-5
"""Largest leak that float32 arithmetic explains."""


def osft_page(
    name: str,
    rule: Literal["strict", "paper"],
    dtype: str,
    targets: Sequence[Moved],
    shown: Moved,
    portrait: Portrait,
    others: Mapping[str, float | None],
) -> str:
    """Write the page.

    Args:
        name: of the run.
        rule: what its protected directions forbid.
        dtype: of the exported targets.
        targets: in the model's order.
        shown: the target that is drawn.
        portrait: of that target.
        others: every other tensor of the model → ‖Δ‖/‖W‖, or None where it is new.

    """
    rows = {target.name: _row(target, rule) for target in targets}
    energy = portrait.singular_values.square()
    return page(
        "osft.html",
        styles=("osft.css", "vendor/uPlot.min.css", "plots.css"),
        scripts=PLOTS,
        data=spectrum(portrait),
        name=name,
        rule=rule,
        dtype=dtype,
        targets=list(rows.values()),
        most=max(rows.values(), key=lambda row: row["moved"]),
        worst=max(rows.values(), key=lambda row: row["leak"]),
        leaking=sum(row["leaks"] for row in rows.values()),
        negligible=_NEGLIGIBLE,
        shown=rows[shown.name],
        portrait=portrait,
        energy=float(energy[: portrait.protected].sum() / energy.sum()),
        change=draw_change(portrait),
        others=len(others),
        changed={other: size for other, size in others.items() if size != 0},
    )


def leaks(target: Moved, rule: Literal["strict", "paper"]) -> bool:
    """Return whether more went to protected directions than rounding explains."""
    return target.leak(rule) > max(_NEGLIGIBLE, 4 * target.rounding)


def _row(target: Moved, rule: Literal["strict", "paper"]) -> dict[str, Any]:
    """Return what the page says of a target."""
    found, E = attrs.asdict(target), target.experts or 1
    counted = {"free": E * target.free, "directions": E * min(target.shape)}
    size = " × ".join(f"{n:,}" for n in ([E, *target.shape] if target.experts else target.shape))
    return found | counted | {"size": size, "leak": target.leak(rule), "leaks": leaks(target, rule)}
