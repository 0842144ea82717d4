"""Weight of a row or a message, by which its loss terms count; margin of a preference."""

import math
from decimal import Decimal
from typing import Any

import attrs
import numpy as np

from forge_data._errors import DataError
from forge_data._values import describe
from forge_data.formats._samples import Chat, Document, Pieces, Preference, Sample, Text, Tokens, Unpaired

_MOST = float(np.finfo(np.float32).max)
_LEAST = float(np.finfo(np.float32).tiny)


def weight_of(place: str, field: str, value: Any) -> float:
    """Read a weight as float32 keeps it: 0 learns nothing, 1 is what no weight means.

    Raises:
        DataError: no number, one that is negative or not finite, or one that float32 cannot hold.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (value == 0 or (math.isfinite(value) and _LEAST <= value <= _MOST)):
        raise DataError(f"{place}: field {field} is {describe(value)}; a weight is a finite number from 0, or not there")
    return float(np.float32(value))


def _own(sample: Chat | Text | Pieces | Document | Tokens) -> set[float]:
    """Return the weights within a row that are not 0."""
    weights = sample.weights if isinstance(sample, Chat | Tokens) else None
    return set() if weights is None else {float(weight) for weight in np.unique(weights) if weight}


def weighted(place: str, sample: Sample, value: Any) -> Sample:
    """Return a sample with the weight of its row.

    Raises:
        DataError: no weight, or a row of preferences, which are compared and have none.
    """
    weight = weight_of(place, "weight", value)
    if weight == 1:
        return sample
    for own in set() if isinstance(sample, Preference | Unpaired) else _own(sample):
        if weight and not _LEAST <= weight * own <= _MOST:
            raise DataError(
                f"{place}: field weight is {weight:g}, which times a weight of {own:g} within the row is none that float32 can "
                "hold; change one of them"
            )
    match sample:
        case Preference() | Unpaired():
            raise DataError(
                f"{place}: field weight is {weight:g}, and preferences have no weights; take it out, and the row too if it is "
                "not to be learned, or repeat the row"
            )
        case Chat() | Text() | Pieces() | Document() | Tokens():
            return attrs.evolve(sample, weight=weight)


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
