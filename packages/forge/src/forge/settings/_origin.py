"""Origin of a setting's value → where it comes from, in a message."""

from __future__ import annotations


def origin_note(origin: str) -> str:
    """Return where a value comes from, for a message; nothing for what this very call gives.

    >>> origin_note("recipe r.yaml"), origin_note("flag")
    (' (recipe r.yaml)', '')

    """
    return "" if origin in ("", "flag", "argument") else f" ({origin})"
