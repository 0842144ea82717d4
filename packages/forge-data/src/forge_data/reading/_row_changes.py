"""Row as it was read → rows in a known format: by `preprocess`, then by `rename_columns`."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._values import nearest
from forge_data.reading._preprocess import Preprocess


@attrs.frozen
class RowChanges:
    """What is done to every row before its format is known; pickles if its preprocess does.

    `preprocess` comes first: it was written for the columns of the file. Renaming is for the formats, so it acts on what
    `preprocess` returns.
    """

    preprocess: Preprocess | None = None
    rename: Mapping[str, str] = attrs.field(factory=dict)
    """Column → the name that a format reads."""

    def __call__(self, place: str, fields: dict[str, Any], seen: set[str]) -> list[dict[str, Any]]:
        """Return the rows that a row becomes; add their columns, before any is renamed, to `seen`.

        Raises:
            DataError: `preprocess` failed, or two columns would have one name; by place.
        """
        rows = [fields] if self.preprocess is None else self.preprocess(place, fields)
        if not self.rename:
            return rows
        seen.update(*rows)
        return [_renamed(place, row, self.rename) for row in rows]

    def check(self, seen: Iterable[str]) -> None:
        """Refuse a column that is to be renamed and that no row has.

        Raises:
            DataError: naming the column that is spelled most like it.
        """
        known = sorted(seen)
        for name in self.rename:
            if name not in known:
                has, near = ", ".join(map(repr, known)) or "none", nearest(name, known)
                columns = f"{near} The columns are {has}" if near else f"; the columns are {has}"
                raise DataError(f"`rename_columns` names the column {name!r}, which no row has{columns}")


def _renamed(place: str, row: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in row.items():
        new = names.get(name, name)
        if new in renamed:
            both = [column for column in row if names.get(column, column) == new]
            raise DataError(
                f"{place} has the columns {' and '.join(map(repr, both))}, and `rename_columns` would name both {new!r}; "
                "rename one of them otherwise, or take it out"
            )
        renamed[new] = value
    return renamed
