"""Number and what it counts → words: "1 row", "1,200 rows"."""

import re

_LEAST, _SMALL = 1e-6, 1e-2
_PLURAL = re.compile("ies$|(?<=ch|ss)es$|s$")


def counted(number: float, things: str) -> str:
    """Write a number with its unit, which is given in the plural.

    >>> counted(1200, "rows"), counted(1, "micro-batches"), counted(1, "queries")
    ('1,200 rows', '1 micro-batch', '1 query')
    """
    one = "y" if things.endswith("ies") else ""
    return f"{number:,} {_PLURAL.sub(one, things) if number == 1 else things}"


def counted_are(number: int, things: str) -> str:
    """Write a number with its unit and its verb.

    >>> counted_are(1200, "tokens"), counted_are(1, "tokens")
    ('1,200 tokens are', '1 token is')
    """
    return f"{counted(number, things)} {'is' if number == 1 else 'are'}"


def figure(value: float) -> str:
    """Write a loss or another figure: four decimals, or three digits below 0.01.

    Below 1e-6, where float32 holds what is nothing (the loss of advantages that add up to 0), it is 0.

    >>> figure(2.34567), figure(0.0000123), figure(-1e-9)
    ('2.3457', '1.23e-05', '0.0000')
    """
    return f"{value:.3g}" if _LEAST <= abs(value) < _SMALL else f"{value:z.4f}"


def first_of(number: int, things: str) -> str:
    """Name the first of several.

    >>> first_of(20, "steps"), first_of(1, "steps")
    ('the first 20 steps', 'the first step')
    """
    return f"the first {counted(number, things).removeprefix('1 ' if number == 1 else '')}"
