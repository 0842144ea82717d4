"""Margins of preferences, by how much the chosen answer is better: in every row or in none."""

import math
from decimal import Decimal
from typing import Any

import numpy as np

from forge_data._errors import DataError
from forge_data._values import describe


def margin_of(place: str, value: Any) -> float | None:
    """Read the margin of a row; None where it has none, or an empty cell of a CSV file.

    Raises:
        DataError: not a finite number, or one beyond float32.
    """
    if value is None or value == "":
        return None
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, (int, float, str, Decimal)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
        raise DataError(f"{place}: field margin is {describe(value)}; it must be a finite number that fits into float32")
    return number


class Margins:
    """Check, pair by pair, that either every row has a margin or none has."""

    def __init__(self) -> None:
        self._first: tuple[bool, str] | None = None

    def see(self, place: str, *, given: bool) -> None:
        """Compare one pair with the first.

        Raises:
            DataError: naming both rows.
        """
        self._first = self._first or (given, place)
        has, first = self._first
        if given != has:
            one, other = ("no margin", "one") if has else ("a margin", "none")
            raise DataError(f"{place} has {one}, but {first} has {other}; give every row a margin, or no row one")
