"""Number and what it counts → words: "1 row", "1,200 rows"."""

import re

_PLURAL = re.compile("ies$|(?<=ch|ss)es$|s$")


def counted(number: int, things: str) -> str:
    """Write a number with its unit, which is given in the plural.

    >>> counted(1200, "rows"), counted(1, "micro-batches"), counted(1, "queries")
    ('1,200 rows', '1 micro-batch', '1 query')
    """
    one = "y" if things.endswith("ies") else ""
    return f"{number:,} {_PLURAL.sub(one, things) if number == 1 else things}"
