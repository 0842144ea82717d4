"""Row as it was read → rows in a known format: by `preprocess`, then by `rename_columns`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._own_reading import OwnReading
from forge_data._values import nearest
from forge_data.reading._preprocess import Preprocess, load_preprocess
from forge_data.reading._sources import Source


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

    def check(self, seen: Iterable[str], whose: str = "") -> None:
        """Refuse a column that is to be renamed and that no row has.

        Raises:
            DataError: naming the column that is spelled most like it.
        """
        known = sorted(seen)
        for name in self.rename:
            if name not in known:
                has, near = ", ".join(map(repr, known)) or "none", nearest(name, known)
                columns = f"{near} The columns are {has}" if near else f"; the columns are {has}"
                which = f"`data_path`: of the entry {whose} rename_columns" if whose else "`rename_columns`"
                raise DataError(f"{which} names the column {name!r}, which no row has{columns}")

    def of(self, own: OwnReading) -> "RowChanges":
        """Return the changes of rows of a data set that may have some of its own.

        Raises:
            DataError: nothing of the name of its `preprocess` can be imported and called.
        """
        if own.rename_columns is None and own.preprocess is None:
            return self
        return RowChanges(
            self.preprocess if own.preprocess is None else load_preprocess(own.preprocess),
            self.rename if own.rename_columns is None else own.rename_columns,
        )


class SourceChanges:
    """Changes of the rows of each source, and the columns that were seen in them.

    The columns that a data set itself renames are looked for in its rows alone, those of the run in all others.
    """

    def __init__(self, sources: Sequence[Source], changes: RowChanges) -> None:
        self._groups = [None if each.own.rename_columns is None else each.group for each in sources]
        """Of each source its group, if that renames columns itself."""
        of_entry = {source.group: changes.of(source.own) for source in sources}
        self._of_source = [of_entry[source.group] for source in sources]
        first = dict(reversed(list(zip(self._groups, sources, strict=True))))
        self._changes = {group: changes.of(source.own) for group, source in first.items()}
        self._whose = {group: "" if group is None else source.name for group, source in first.items()}
        self._seen: dict[int | None, set[str]] = {group: set() for group in first}

    def __call__(self, source: int, place: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows that a row of a source becomes; `source` is its number.

        Raises:
            DataError: as `RowChanges`.
        """
        return self._of_source[source](place, fields, self._seen[self._groups[source]])

    def see(self, source: int, columns: Iterable[str]) -> None:
        """Record columns of a source's rows."""
        self._seen[self._groups[source]].update(columns)

    @property
    def complete(self) -> bool:
        """Whether every column that is to be renamed was seen."""
        return all(changes.rename.keys() <= self._seen[group] for group, changes in self._changes.items())

    def check(self) -> None:
        """Refuse a column that is to be renamed and that no row has.

        Raises:
            DataError: as `RowChanges.check`, and whose rows they are where they are a data set's own.
        """
        for group, changes in self._changes.items():
            changes.check(self._seen[group], self._whose[group])


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
