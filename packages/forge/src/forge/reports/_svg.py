"""Coordinates and words → SVG elements, with every word escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", more: str = "") -> str:
    """Write a text of one line; `more` is further attributes."""
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> str:
    """Write a straight line, with a title that is shown when it is pointed at."""
    about = f"<title>{escape(title)}</title>" if title else ""
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}">{about}</line>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Write a rectangle."""
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>'


def group(title: str, parts: Iterable[str]) -> str:
    """Write elements that share a title, which is shown when they are pointed at."""
    return f"<g><title>{escape(title)}</title>{''.join(parts)}</g>"


def svg(name: str, width: float, height: float, parts: Iterable[str], *, hatching: str, more: str = "", head: str = "") -> str:
    """Write a drawing.

    Args:
        name: what it shows, for whoever cannot see it.
        width: of the drawing.
        height: of the drawing.
        parts: its elements.
        hatching: class of the line in the pattern `#hatch`, which a style may fill with.
        more: further attributes of the root.
        head: elements before the parts, such as a style.

    """
    body = "\n".join(parts)
    name = escape(name)
    return (
        f'<svg viewBox="0 0 {width:g} {height:.0f}" role="img" aria-label="{name}"{more}><title>{name}</title>\n'
        f'{head}<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<line class="{hatching}" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>\n{body}\n</svg>'
    )
