"""`data_path` in any form, or rows in memory → sources that know name, weight and digest."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import attrs

from forge_data._errors import DataError, printable
from forge_data._own_reading import NOTHING_OWN, Entry, OwnReading, entries_of, listed, numbered
from forge_data._shard import Shard
from forge_data._values import describe
from forge_data.reading._arrow import ArrowFile
from forge_data.reading._csv import CsvFile
from forge_data.reading._dataset_info import DescribedRows, Description, description
from forge_data.reading._file import DataFile
from forge_data.reading._huggingface import DatasetSplit
from forge_data.reading._json import open_json
from forge_data.reading._jsonl import JsonLines
from forge_data.reading._locate import located
from forge_data.reading._memory import InMemoryRows, check_no_table
from forge_data.reading._parquet import ParquetFile
from forge_data.reading._random_rows import choose_rows, chosen_of
from forge_data.reading._record import CHUNK_BYTES, Chunk, Reader, Record, Refused, place_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DataPath = (
    str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str] | Mapping[str, Any]]
    | Mapping[str, float | Mapping[str, Any]]
    | Iterable[Mapping[str, Any]]
    | InMemoryRows
)
"""A path, glob, directory, URL, `org/name:split` or `dataset_info.json:name`; several of them; or several with weights and
settings of their own, as a mapping or as a list of mappings with a `path`. Or rows in memory."""


@attrs.frozen
class Source:
    """One file, or split of a dataset, with rows."""

    name: str
    """Name for messages: `train.jsonl`; two files of one name are distinguished by their directories."""

    path: str
    """Absolute path, URL, or `org/name:split`."""

    reader: Reader

    group: int = 0
    """Entry of `data_path` that it belongs to, from 0: a glob or a directory is one entry of several files."""

    weight: float | None = None
    """Weight given to its group; None where none was."""

    rows: tuple[int, int] | None = None
    """Numbers of the first and last row that are read of it; None for all, and a last one before the first for none."""

    own: OwnReading = NOTHING_OWN
    """Settings of its group, in place of the run's."""

    chosen: "NDArray[np.int64] | None" = attrs.field(default=None, eq=False)
    """Numbers of the rows that are read, rising, where they are chosen at random."""

    @property
    def indexed(self) -> bool:
        """Whether its rows are named `train.json[416]` (from 0) and not `train.jsonl:417`."""
        return self.reader.indexed

    def place(self, row: int) -> str:
        """Name the place of a row, for a message."""
        return place_of(self.name, row, indexed=self.indexed)

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield the rows in order, in chunks of about `size` bytes.

        Raises:
            DataError: the file cannot be read, or holds no rows.
        """
        if self.chosen is not None:
            yield from chosen_of(attrs.evolve(self, chosen=None).chunks(size), self.chosen)
            return
        if self.rows is not None:
            yield from self._part(size, *self.rows)
            return
        empty = True
        for chunk in self.reader.chunks(size):
            empty = False
            yield chunk
        if empty:
            raise DataError(f"{self.path} holds no rows")

    def _part(self, size: int, first: int, last: int) -> Iterator[Chunk]:
        if last < first:
            return
        empty = True
        for chunk in self.reader.chunks(size):
            empty = False
            if chunk.first_row > last:
                return
            if chunk.last_row >= first:
                yield chunk if first <= chunk.first_row and chunk.last_row <= last else chunk.part(first, last)
            if chunk.last_row >= last:
                return
        if empty:
            raise DataError(f"{self.path} holds no rows")

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield every row; one that cannot be read is passed to `refused`, or raised.

        Raises:
            DataError: the file, or a row of it by its place.
        """
        for chunk in self.chunks():
            yield from chunk.records(refused)

    def count(self) -> int | None:
        """Return the number of the last row that is read; None if that needs a slow pass."""
        count = self.reader.count()
        return count if count is None or self.rows is None else min(count, self.rows[1] + self.indexed)

    def digest(self) -> str | None:
        """Hash the content: SHA-256 in hex; None where it is read only once."""
        return self.reader.digest()

    @property
    def directory(self) -> str | None:
        """Directory where relative paths in its rows begin; None where it has none on this machine."""
        match self.reader:
            case InMemoryRows():
                return os.getcwd()
            case DescribedRows(description=described):
                return described.directory
            case DatasetSplit():
                path = os.path.abspath(os.path.expanduser(self.path))
                return next((each for each in (path, path.rpartition(":")[0]) if each and os.path.isdir(each)), None)
            case _:
                return None if "://" in self.path else os.path.dirname(self.path)

    @property
    def origin(self) -> str:
        """What a store records: the path; of rows in memory their kind, number and hash."""
        return self.reader.description if isinstance(self.reader, InMemoryRows) else self.path


def resolve(data_path: DataPath, name: str = "data_path", *, max_samples: int | None = None) -> list[Source]:
    """Find the sources that `data_path` names, in its order; a directory's or glob's by path.

    Rows in memory are one source, called `name`. Of each entry only the first `max_samples` rows are read.

    Raises:
        DataError: nothing there, a file that no reader knows, one that is named twice, a weight that is not one.
    """
    if (rows := InMemoryRows.of(data_path, name)) is not None:
        return _first_rows([Source(rows.name, rows.name, rows)], max_samples)
    entries = _entries(data_path)
    found: list[tuple[int, Description | None, DataFile | DatasetSplit]] = []
    for group, (entry, _) in enumerate(entries):
        described = description(entry)
        named = located(entry if described is None else described.path)
        found += [(group, described, each) for each in (named if isinstance(named, list) else [named])]
    _check_once([(described, _real(each, entries[group][0]), *entries[group]) for group, described, each in found])
    files = iter(_names([(each.path, described) for _, described, each in found if isinstance(each, DataFile)]))
    names = numbered([each.name if isinstance(each, DatasetSplit) else next(files) for _, _, each in found])
    sources = [
        Source(name, entries[group][0], _described(attrs.evolve(each, name=name), described), group)
        if isinstance(each, DatasetSplit)
        else Source(name, each.path, _described(_reader(name, each), described), group)
        for name, (group, described, each) in zip(names, found, strict=True)
    ]
    said = [entry for _, entry in entries]
    sources = [attrs.evolve(each, weight=said[each.group].weight, own=said[each.group].own) for each in sources]
    sources = [_with_number(each) for each in sources]
    return _first_rows(_random_rows(sources), max_samples)


def _with_number(source: Source) -> Source:
    """Take `num_samples` of `dataset_info.json`, unless the entry chooses rows itself."""
    number = source.reader.description.num_samples if isinstance(source.reader, DescribedRows) else None
    if number is None or source.own.random_rows is not None or source.own.max_samples is not None:
        return source
    return attrs.evolve(source, own=attrs.evolve(source.own, random_rows=number))


def _random_rows(sources: list[Source]) -> list[Source]:
    """Choose the rows of each entry that has random ones."""
    found = list(sources)
    for group in {source.group: None for source in sources if source.own.random_rows is not None}:
        at = [number for number, source in enumerate(sources) if source.group == group]
        own, path = sources[at[0]].own, sources[at[0]].path
        assert own.random_rows is not None
        chosen = choose_rows(path, [sources[number].reader for number in at], own.random_rows, own.random_seed or 0)
        for number, rows in zip(at, chosen, strict=True):
            found[number] = attrs.evolve(sources[number], chosen=rows)
    return found


def _first_rows(sources: list[Source], number: int | None) -> list[Source]:
    """Restrict the sources of each entry to its first rows; of random ones to the first of them."""
    entries = Counter(source.group for source in sources)
    left = {source.group: source.own.max_samples or number for source in sources}
    found = []
    for source in sources:
        if (most := left[source.group]) is None:
            found.append(source)
            continue
        if source.chosen is not None:
            found.append(attrs.evolve(source, chosen=source.chosen[:most]))
            left[source.group] = most - len(source.chosen[:most])
            continue
        zeroth, wanted = 0 if source.indexed else 1, most
        last, count = _last_of(source.reader, wanted) if wanted else (zeroth - 1, 0)
        found.append(attrs.evolve(source, rows=(zeroth, zeroth + wanted - 1 if last is None else last)))
        if entries[source.group] > 1 and wanted:
            left[source.group] = wanted - (_count_rows(found[-1]) if last is None else count)
    return found


def _last_of(reader: Reader, number: int) -> tuple[int | None, int]:
    """Return the number of the last of the first so many rows, and how many there are.

    None where rows are numbered one after the other: lines may be blank, and a CSV file's first names fields.
    """
    match reader:
        case DescribedRows(reader=inner):
            return _last_of(inner, number)
        case JsonLines() | CsvFile():
            numbers = list(itertools.islice(reader.row_numbers(), number))
            return (numbers[-1] if numbers else None), len(numbers)
        case _:
            return None, 0


def _real(found: DataFile | DatasetSplit, entry: str) -> str:
    """Return what tells two files apart: a link to a file is that file.

    With `**`, a link to a directory above leads to every file again.
    """
    if isinstance(found, DatasetSplit):
        return entry
    return found.path if "://" in found.path else os.path.realpath(found.path)


def _check_once(found: Sequence[tuple[Description | None, str, str, Entry]]) -> None:
    """Refuse a file that is read twice in the same way.

    Entries of `dataset_info.json` may read one file each in its own, and so may entries of one path.

    Args:
        found: of each file the description, what tells it apart, the path of its entry, and what is said of that.

    Raises:
        DataError: naming the file.
    """
    plain = {path for described, path, _, _ in found if described is None}
    seen: dict[tuple[str, str | None], list[tuple[Description | None, str, Entry]]] = {}
    for described, path, entry, said in found:
        key = (path, None if described is None or path in plain else described.digest())
        before = seen.setdefault(key, [])
        if (alike := next((each for each in before if each[1] != entry or each[2].own.reads_as(said.own)), None)) is not None:
            (first, other, before_it), named = alike, ""
            remedy = "; name it once, and to see its rows more often, give it a weight"
            if before_it.weight is not None and said.weight is not None and other == entry:
                remedy = (
                    f" and read alike each time; name it once, with the sum of its weights, {before_it.weight + said.weight:g}"
                )
            if path not in plain and first is not None and described is not None and first.place != described.place:
                named = f" (by {first.place} and by {described.place}, which read it alike)"
            if not before_it.own.reads_as(said.own):
                remedy = ", to be read in two ways: give both entries the path of this file alone"
            raise DataError(f"{path} is named more than once in the data{named}{remedy}")
        before.append((described, entry, said))


def part_of(sources: Sequence[Source], shard: Shard) -> tuple[list[Source], Shard]:
    """Restrict sources to one of several equal parts of all their rows, by row number.

    Returns:
        All sources, each with the rows of it that are in the part; and the shard, which names them.

    Raises:
        DataError: a source cannot be read.
    """
    ends = list(itertools.accumulate(_count_rows(source) for source in sources))
    start, stop = shard.bounds(ends[-1])
    parts, named = [], []
    for source, begin, end in zip(sources, [0, *ends], ends, strict=False):
        if begin == end and source.rows is None:
            raise DataError(f"{source.path} holds no rows")
        zeroth = 0 if source.indexed else 1
        first, last = max(start, begin) - begin + zeroth, min(stop, end) - begin + zeroth - 1
        parts.append(attrs.evolve(source, rows=(first, last)))
        if first <= last:
            named.append(f"{source.place(first)} to {source.place(last)}")
    return parts, attrs.evolve(shard, rows=named)


def _count_rows(source: Source) -> int:
    """Count the numbers that rows of a source have; blank lines have one too."""
    if (count := source.count()) is not None:
        return count
    last = -1 if source.indexed else 0
    for chunk in source.chunks():
        last = chunk.last_row
    return last + source.indexed


def _entries(data_path: DataPath) -> list[tuple[str, Entry]]:
    """List each entry with what is said of it."""
    given = listed(data_path)
    if not given:
        raise DataError("`data_path` is empty: no rows were given, and no file; give rows, a file, or several")
    for path, said in given:
        if path is not None or said == {}:  # what has other names than a path's is said below
            _check_path(path)
    try:
        return entries_of(data_path)
    except DataError as error:
        raise DataError(f"`data_path`: {error}") from error


def _check_path(entry: object) -> None:
    if not isinstance(entry, (str, os.PathLike)) or not os.fspath(entry):
        check_no_table(entry)
        raise DataError(
            f"`data_path` holds {describe(entry)}; it must be a path, a glob, a URL, 'org/name:split', or rows (dicts)"
        )


def _described(reader: Reader, described: Description | None) -> Reader:
    if described is None:
        return reader
    rows = DescribedRows(reader, described)
    rows.check_columns()
    return rows


def _reader(name: str, file: DataFile) -> Reader:
    match file.suffixes[0]:
        case ".parquet":
            return ParquetFile(name, file)
        case ".arrow" | ".feather":
            return ArrowFile(name, file)
        case ".csv":
            return CsvFile(name, file, ",")
        case ".tsv":
            return CsvFile(name, file, "\t")
        case ".json":
            return open_json(name, file)
        case _:
            return JsonLines(name, file)


def _names(files: Sequence[tuple[str, Description | None]]) -> list[str]:
    """Name each file: its own name, with as many directories as distinguish it from others.

    A file that several descriptions read is `rows.jsonl:NAME` of each.
    """
    paths = list(dict.fromkeys(path for path, _ in files))
    short = dict(zip(paths, _shortest(paths), strict=True))
    times = Counter(path for path, _ in files)
    readings = list(dict.fromkeys(each.name for path, each in files if each is not None and times[path] > 1))
    labels = dict(zip(readings, _shortest(readings), strict=True))
    return [
        printable(f"{short[path]}:{labels[described.name]}" if described is not None and times[path] > 1 else short[path])
        for path, described in files
    ]


def _shortest(paths: Sequence[str]) -> list[str]:
    """Shorten different paths to their last parts, of each as many as no other path ends with."""
    parts = [PurePosixPath((path.split("?")[0] if "://" in path else path).replace(os.sep, "/")).parts for path in paths]
    depths = [1] * len(paths)
    while True:
        names = ["/".join(each[-depth:]) for each, depth in zip(parts, depths, strict=True)]
        counts = Counter(names)
        longer = [
            depth + 1 if counts[name] > 1 and depth <= len(each) else depth
            for name, depth, each in zip(names, depths, parts, strict=True)
        ]
        if longer == depths:
            # Addresses may differ in their queries alone.
            return [name if counts[name] == 1 else path for name, path in zip(names, paths, strict=True)]
        depths = longer
