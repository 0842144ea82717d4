"""Values of `data_path`'s mapping → weight of each entry, and settings of its own."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import attrs

from forge_data._errors import DataError
from forge_data._formats import AUTO, fault_of, is_known
from forge_data._values import describe, nearest

_WEIGHT = "weight"


@attrs.frozen(kw_only=True)
class OwnReading:
    """Settings that an entry of `data_path` has in place of the run's; None where it has none."""

    data_format: str | None = None
    """Name of the format of its rows."""
    rename_columns: Mapping[str, str] | None = None
    """Columns that its format reads under another name, each with that name."""


OWN = tuple(field.name for field in attrs.fields(OwnReading))
"""Settings that an entry may have of its own."""
NOTHING_OWN = OwnReading()


class Entry(NamedTuple):
    """What a mapping of data sets says of one."""

    weight: float | None
    """Share in what is trained on; None where none is given."""
    own: OwnReading


def entries_of(data_sets: Mapping[Any, object]) -> dict[str, Entry]:
    """Read what a mapping says of each data set: a weight, or one and settings of its own.

    >>> entries_of({"a.jsonl": {"data_format": "alpaca"}, "b.jsonl": {}})["a.jsonl"].own.data_format
    'alpaca'

    Raises:
        DataError: something else, naming the data set; or some have a weight and others have none.
    """
    found = {str(path): _entry(str(path), value) for path, value in data_sets.items()}
    weighted = next((path for path, entry in found.items() if entry.weight is not None), None)
    without = next((path for path, entry in found.items() if entry.weight is None), None)
    if weighted is not None and without is not None:
        raise DataError(
            f"{weighted} has the weight {found[weighted].weight:g}, and {without} has none; give every path a weight, or no "
            "path one"
        )
    return found


def _entry(path: str, value: object) -> Entry:
    if not isinstance(value, Mapping):
        return Entry(_weight(path, value), NOTHING_OWN)
    known = (_WEIGHT, *OWN)
    for name in value:
        if name not in known:
            meant = {"type": "data_format", "path": "the key"}.get(str(name))
            near = f"; here it is {meant}" if meant else nearest(name, known)
            raise DataError(f"the entry {path} has {name!r}, which is not known{near}; known: {', '.join(known)}")
    given = {name: each for name, each in value.items() if each is not None}
    weight = _weight(path, given.pop(_WEIGHT)) if _WEIGHT in given else None
    named = given.get("data_format", AUTO)
    if not isinstance(named, str) or not is_known(named):
        raise DataError(f"data_format of the entry {path} is {describe(named)}; {fault_of(named)}")
    _check_columns(path, given.get("rename_columns"))
    return Entry(weight, OwnReading(**given))


def _weight(path: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight <= 0:
        raise DataError(
            f"the weight of {path} is {describe(weight)}; it must be a number above 0, or the entry taken out"
            + ("" if isinstance(weight, (int, float)) else " (a mapping gives files their weights; one row is given as [row])")
        )
    return float(weight)


def _check_columns(path: str, columns: object) -> None:
    if columns is None:
        return
    if not isinstance(columns, Mapping) or not columns:
        raise DataError(
            f"rename_columns of the entry {path} is {describe(columns)}; it must be a mapping of columns to the names of fields"
        )
    for name in (*columns, *columns.values()):
        if not isinstance(name, str) or not name:
            raise DataError(f"rename_columns of the entry {path} holds {describe(name)}; columns and fields have names")


def without_effect(given: Collection[str], *data_sets: object) -> str | None:
    """Return the first of the run's settings that every data set has of its own.

    It would have no effect.

    Args:
        given: settings that are not as by default, by their names in `OwnReading`.
        data_sets: what is trained on, and what is held out; None where there is none.
    """
    present = [each for each in data_sets if each is not None]
    return next(
        (
            name
            for name in OWN
            if name in given and all(isinstance(each, Mapping) and _all_have(name, each) for each in present)
        ),
        None,
    )


def _all_have(name: str, data_sets: Mapping[str, object]) -> bool:
    return all(isinstance(value, Mapping) and value.get(name) is not None for value in data_sets.values())
