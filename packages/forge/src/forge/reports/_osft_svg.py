"""One target's spectrum, and where its change lies → two SVGs, which stand inside a page and take their colours from its style.

Drawn for a narrow page, so that words stay readable on a telephone; told apart by lightness and pattern as well as by hue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_algos.adaptations import Portrait

_WIDTH, _LEFT, _RIGHT = 340.0, 40.0, 8.0
_PLOT = _WIDTH - _LEFT - _RIGHT
_POINTS = 300
_LOWEST = 1e-6
"""Singular values below this share of the largest are drawn there."""
_SHADES = (0.8, 0.6, 0.4, 0.2, 0.1, 1e-2, 1e-3, 1e-4)
"""From which share of the strongest a field has a shade, darkest first: close together where training moved, and powers of ten for what
leaked. Fields below the last are left blank."""


def spectrum(portrait: Portrait) -> str:
    """Draw the singular values on a logarithmic axis, the protected ones filled and the free ones hatched."""
    values, kept = portrait.singular_values.tolist(), portrait.protected
    top, height = 34.0, 266.0
    base, count = top + height, len(values)
    high = math.log10(values[0] or 1.0)
    low = max(math.log10(max(values[-1], _LOWEST * 10**high)), high + math.log10(_LOWEST))
    low -= 0.08 * (high - low) or 0.5

    def x(index: float) -> float:
        return _LEFT + _PLOT * index / count

    def y(value: float) -> float:
        return base - height * (max(math.log10(value), low) - low) / (high - low) if value > 0 else base

    def area(first: int, last: int) -> str:
        stride = max(1, (last - first) // _POINTS)
        points = [(index, values[index]) for index in (*range(first, last, stride), last - 1)]
        line = "".join(f"L{x(index):.1f} {y(value):.1f}" for index, value in points)
        return f"M{x(first):.1f} {base:.1f}{line}L{x(last):.1f} {y(values[last - 1]):.1f}L{x(last):.1f} {base:.1f}Z"

    parts = [_text(0, 12, "singular value (logarithmic)", "dim")]
    for tick in _ticks(10**low, 10**high):
        parts += [
            _line(_LEFT, y(tick), _WIDTH - _RIGHT, y(tick), "grid"),
            _text(_LEFT - 5, y(tick) + 4, _short(tick), "dim", "end"),
        ]
    if kept:
        parts.append(f'<path class="kept" d="{area(0, kept)}"/>')
    if kept < count:
        parts += [f'<path class="{kind}" d="{area(kept, count)}"/>' for kind in ("loose", "hatched")]
    parts += [_line(_LEFT, base, _WIDTH - _RIGHT, base, "axis"), *_sides(kept, count, base)]
    name = f"Singular values of {count} directions, from {values[0]:.3g} to {values[-1]:.3g}: the first {kept} are protected"
    return _svg(name, base + 34, parts)


def change(portrait: Portrait) -> str:
    """Draw the root mean square of UᵀΔW V in each field, as a share of the strongest."""
    rows, columns, kept = portrait.rows, portrait.columns, portrait.protected
    top, size = 52.0, _PLOT - 14
    left = _LEFT + 14
    strongest = float(portrait.rms.max())
    d = min(rows[-1], columns[-1])
    ys, xs = _places(rows, d, top, size), _places(columns, d, left, size)
    bottom, right = ys[-1], xs[-1]
    parts = [_text(0, 12, "output directions ↓", "dim"), _text(right, 12, "input directions →", "dim", "end")]
    parts += _bands(xs, columns, kept, d, across=True, at=top - 8)
    parts += _bands(ys, rows, kept, d, across=False, at=left - 8)
    parts.append(f'<rect class="field" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"/>')
    for number, row in enumerate(portrait.rms.tolist()):
        parts += _runs([_shade(value, strongest) for value in row], xs, ys[number], ys[number + 1])
    for edges, places, flat in ((rows, ys, True), (columns, xs, False)):
        for edge in {kept, d} - {0, edges[-1]}:
            at = places[edges.index(edge)]
            ends = (left, at, right, at) if flat else (at, top, at, bottom)
            parts.append(_line(*ends, "border" if edge == kept else "axis"))
    parts += _legend(left, right, bottom + 14, strongest)
    name = f"Change between {d} directions on each side, of which {kept} are protected, relative to the strongest field"
    return _svg(name, bottom + 62, parts)


def _sides(kept: int, count: int, base: float) -> Iterator[str]:
    """Under the axis: which part is which."""
    edge = _LEFT + _PLOT * kept / count
    # A narrow part's words stand at its outer end.
    if kept:
        yield _line(_LEFT + 1, base + 6, edge - 1, base + 6, "bar-kept")
        yield _text(_LEFT, base + 23, f"{kept:,} protected", "")
    if kept < count:
        yield _line(edge + 1, base + 6, _WIDTH - _RIGHT - 1, base + 6, "bar-loose")
        yield _text(_WIDTH - _RIGHT, base + 23, f"{count - kept:,} free", "", "end")


def _bands(places: Sequence[float], edges: Sequence[int], kept: int, d: int, *, across: bool, at: float) -> Iterator[str]:
    """Beside a side of the fields: protected, free, and what the weights do not use."""
    spans = [("protected", "bar-kept", 0, kept), ("free", "bar-loose", kept, d), ("unused", "bar-unused", d, edges[-1])]
    for word, kind, first, last in spans:
        if first == last:
            continue
        begin, end = places[edges.index(first)] + 1, places[edges.index(last)] - 1
        yield _line(begin, at, end, at, kind) if across else _line(at, begin, at, end, kind)
        if end - begin < 7 * len(word):
            continue
        middle = (begin + end) / 2
        turned = "" if across else f' transform="rotate(-90 {at - 6:.1f} {middle:.1f})"'
        x, y = (middle, at - 6) if across else (at - 6, middle)
        yield f'<text class="dim" x="{x:.1f}" y="{y:.1f}" text-anchor="middle"{turned}>{word}</text>'


def _places(edges: Sequence[int], d: int, first: float, size: float) -> list[float]:
    """Where the edges lie; what the weights do not use is one band of fixed width, however many directions it holds."""
    band = 0.0 if edges[-1] == d else 18.0
    return [first + (size - band) * min(edge, d) / d + (band if edge > d else 0.0) for edge in edges]


def _shade(value: float, strongest: float) -> int:
    """The number of a field's shade; one more than there are for what is left blank."""
    return next((number for number, share in enumerate(_SHADES) if value >= share * strongest > 0), len(_SHADES))


def _runs(shades: Sequence[int], xs: Sequence[float], top: float, bottom: float) -> Iterator[str]:
    """Neighbours of one shade as one rectangle, a hair larger than they are so that no seam shows."""
    first = 0
    for number in range(1, len(shades) + 1):
        if number < len(shades) and shades[number] == shades[first]:
            continue
        if shades[first] < len(_SHADES):
            width, height = xs[number] - xs[first] + 0.2, bottom - top + 0.2
            yield f'<rect class="s{shades[first]}" x="{xs[first]:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        first = number


def _legend(left: float, right: float, top: float, strongest: float) -> Iterator[str]:
    width = (right - left) / (len(_SHADES) + 1)
    for number in range(len(_SHADES) + 1):
        kind = "field" if number == len(_SHADES) else f"s{number}"
        yield f'<rect class="{kind}" x="{left + number * width:.1f}" y="{top:.1f}" width="{width:.1f}" height="10"/>'
    for number, share in enumerate(_SHADES):
        yield _text(left + (number + 1) * width, top + 24, _short(share), "dim", "middle")
    yield _text(left, top + 40, f"of the strongest, {strongest:.1e}; blank: less", "dim")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten where few fit, powers alone where more do, about six at most."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def _short(number: float) -> str:
    return f"{number:g}" if 0.05 <= number < 1e4 else f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _svg(name: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {height:.0f}" role="img" aria-label="{escape(name)}"><title>{escape(name)}</title>\n'
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<line class="stripe" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>\n{body}\n</svg>'
    )


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
