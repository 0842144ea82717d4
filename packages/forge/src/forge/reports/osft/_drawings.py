"""One OSFT target's spectrum → a chart, its change → an SVG in a page with its style.

Drawn for a narrow page, so that words stay readable on a telephone; distinguished by lightness and pattern as well as by hue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from forge.reports._svg import line, rect, svg, text

if TYPE_CHECKING:
    from forge_algos.adaptations import Portrait

_WIDTH, _LEFT, _RIGHT = 340.0, 40.0, 8.0
_PLOT = _WIDTH - _LEFT - _RIGHT
_POINTS = 300
_LOWEST = 1e-6
"""Singular values below this share of the largest are drawn there."""
_SHADES = (0.8, 0.6, 0.4, 0.2, 0.1, 1e-2, 1e-3, 1e-4)
"""Smallest share of the strongest field for each shade, darkest first; a field below the last is left blank.

Close together where training moved, and powers of ten for what leaked."""


def spectrum(portrait: Portrait) -> dict[str, Any]:
    """Return the singular values, protected and free, as a chart for pages/plots.js."""
    values, kept = portrait.singular_values.tolist(), portrait.protected
    lowest = _LOWEST * (values[0] or 1.0)
    axes, lines = [], []
    for name, first, last in (("protected", 0, kept), ("free", kept, len(values))):
        if first == last:
            continue
        places = sorted({*range(first, last, max(1, (last - first) // _POINTS)), last - 1})
        lines.append({"name": name, "run": 0, "axis": len(axes), "stride": 1, "sparse": False})
        lines[-1]["y"] = [float(f"{max(values[place], lowest):.6g}") for place in places]
        axes.append([place + 1 for place in places])
    title = "Root mean square of inputs" if portrait.of_inputs else "Singular values"
    chart = {"name": "spectrum", "title": title, "note": "", "bytes": False, "lines": lines}
    return {"renew": 0, "runs": 1, "unit": "direction", "log": ["spectrum"], "axes": axes, "charts": [chart]}


def draw_change(portrait: Portrait) -> str:
    """Draw the root mean square of UᵀΔW V in each field, as a share of the strongest."""
    rows, columns, kept = portrait.rows, portrait.columns, portrait.protected
    top, size = 52.0, _PLOT - 14
    left = _LEFT + 14
    strongest = float(portrait.rms.max())
    d = min(rows[-1], columns[-1])
    ys, xs = _places(rows, d, top, size), _places(columns, d, left, size)
    bottom, right = ys[-1], xs[-1]
    parts = [text(0, 12, "output directions ↓", "dim"), text(right, 12, "input directions →", "dim", "end")]
    parts += _bands(xs, columns, kept, d, horizontal=True, at=top - 8)
    parts += _bands(ys, rows, kept, d, horizontal=False, at=left - 8)
    parts.append(rect(left, top, right - left, bottom - top, "field"))
    for number, row in enumerate(portrait.rms.tolist()):
        parts += _runs([_shade(value, strongest) for value in row], xs, ys[number], ys[number + 1])
    for edges, places, flat in ((rows, ys, True), (columns, xs, False)):
        for edge in {kept, d} - {0, edges[-1]}:
            at = places[edges.index(edge)]
            ends = (left, at, right, at) if flat else (at, top, at, bottom)
            parts.append(line(*ends, "border" if edge == kept else "axis"))
    parts += _legend(left, right, bottom + 14, strongest)
    name = f"Change between {d} directions on each side, of which {kept} are protected, relative to the strongest field"
    return svg(name, _WIDTH, bottom + 62, parts, hatching="stripe")


def _bands(places: Sequence[float], edges: Sequence[int], kept: int, d: int, *, horizontal: bool, at: float) -> Iterator[str]:
    """Label one side of the fields: protected, free, and what the weights do not use."""
    spans = [("protected", "bar-kept", 0, kept), ("free", "bar-loose", kept, d), ("unused", "bar-unused", d, edges[-1])]
    for word, kind, first, last in spans:
        if first == last:
            continue
        begin, end = places[edges.index(first)] + 1, places[edges.index(last)] - 1
        yield line(begin, at, end, at, kind) if horizontal else line(at, begin, at, end, kind)
        if end - begin < 7 * len(word):
            continue
        middle = (begin + end) / 2
        x, y = (middle, at - 6) if horizontal else (at - 6, middle)
        turned = "" if horizontal else f' transform="rotate(-90 {x:.1f} {y:.1f})"'
        yield text(x, y, word, "dim", "middle", turned)


def _places(edges: Sequence[int], d: int, first: float, size: float) -> list[float]:
    """Return the coordinates of the edges; unused directions are one band of fixed width."""
    band = 0.0 if edges[-1] == d else 18.0
    return [first + (size - band) * min(edge, d) / d + (band if edge > d else 0.0) for edge in edges]


def _shade(value: float, strongest: float) -> int:
    """Return the index of a field's shade, `len(_SHADES)` for a blank one."""
    return next((number for number, share in enumerate(_SHADES) if value >= share * strongest > 0), len(_SHADES))


def _runs(shades: Sequence[int], xs: Sequence[float], top: float, bottom: float) -> Iterator[str]:
    """Draw neighbours of one shade as one rectangle, slightly larger so that no seam shows."""
    first = 0
    for number in range(1, len(shades) + 1):
        if number < len(shades) and shades[number] == shades[first]:
            continue
        if shades[first] < len(_SHADES):
            yield rect(xs[first], top, xs[number] - xs[first] + 0.2, bottom - top + 0.2, f"s{shades[first]}")
        first = number


def _legend(left: float, right: float, top: float, strongest: float) -> Iterator[str]:
    """Draw the scale of the shades."""
    width = (right - left) / (len(_SHADES) + 1)
    for number in range(len(_SHADES) + 1):
        kind = "field" if number == len(_SHADES) else f"s{number}"
        yield rect(left + number * width, top, width, 10, kind)
    for number, share in enumerate(_SHADES):
        yield text(left + (number + 1) * width, top + 24, _short(share), "dim", "middle")
    yield text(left, top + 40, f"of the strongest, {strongest:.1e}; blank: less", "dim")


def _short(number: float) -> str:
    return f"{number:g}" if 0.05 <= number < 1e4 else f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")
