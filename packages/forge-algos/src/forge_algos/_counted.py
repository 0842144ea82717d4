"""Number and what it counts → words: "1 row", "1,200 rows"."""


def counted(number: int, things: str) -> str:
    """Write a number with its unit, which is given in the plural.

    >>> counted(1200, "rows"), counted(1, "rows")
    ('1,200 rows', '1 row')
    """
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"
