"""First row of each file → what `prepare` would refuse it for, without a tokenizer."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_data._errors import BadPairError, DataError
from forge_data._formats import AUTO
from forge_data._own_reading import listed
from forge_data.formats._registry import check_name, convert, detect
from forge_data.formats.questions._prompts import question
from forge_data.formats.questions._text_pairs import text_pair
from forge_data.formats.questions._texts import labelled as read_labelled
from forge_data.reading._dataset_info import description, is_described
from forge_data.reading._huggingface import is_saved
from forge_data.reading._memory import InMemoryRows
from forge_data.reading._row_changes import RowChanges, SourceChanges
from forge_data.reading._sources import DataPath, Source, resolve


def check_first_row(
    data_path: DataPath,
    *,
    format: str = AUTO,  # noqa: A002 - what it is called everywhere else
    prompts: bool = False,
    labelled: bool = False,
    pairs: bool = False,
    rename_columns: Mapping[str, str] | None = None,
    on_bad_row: str = "error",
    preprocess: object = None,
    media: bool = False,
    max_samples: int | None = None,
) -> None:
    """Refuse files for their first row, or for columns to rename that no row has.

    It is what `prepare`, `prepare_prompts`, `prepare_labelled` or `prepare_text_pairs` would refuse, and nothing else: it reads
    one row of each file, and all only where that one lacks a column that is to be renamed. Rows in memory, rows of the hub and
    of URLs, and what `preprocess` makes are left to them, and so is a pair that prefers nothing.

    Args:
        data_path: as for `prepare`.
        format: as for `prepare`.
        prompts: whether the rows are prompts, as for `prepare_prompts`.
        labelled: whether they are labelled texts, as for `prepare_labelled`.
        pairs: whether they are queries and documents, as for `prepare_text_pairs`.
        rename_columns: as for `prepare`.
        on_bad_row: as for `prepare`; with `skip` only columns are looked at.
        preprocess: as for `prepare`; with any, nothing is looked at.
        media: as for `prepare`.
        max_samples: as for `prepare`.

    Raises:
        DataError: nothing is there, the first row of a file cannot be read or has no known format, or no row has a column
            that is to be renamed.
    """
    if not prompts and not labelled and not pairs:
        check_name(format)
    if InMemoryRows.of(data_path, "data_path") is not None or preprocess is not None or not _is_local(data_path):
        return
    # What a preprocess makes of a row is known once it has run.
    sources = [each for each in resolve(data_path, max_samples=max_samples) if each.own.preprocess is None]
    changes = SourceChanges(sources, RowChanges(None, rename_columns or {}))
    first: list[tuple[str, dict[str, Any], Source]] = []
    for number, source in enumerate(sources):
        check_name(source.own.data_format or AUTO)
        try:
            record = next(source.records(), None)
            if record is not None:
                first += [(record.place, fields, source) for fields in changes(number, record.place, record.fields)]
        except DataError:
            if on_bad_row == "error":
                raise
    if not changes.complete:
        _see_all(sources, changes)
        changes.check()
    for place, fields, source in first if on_bad_row == "error" else ():
        directory = source.directory
        with suppress(BadPairError):  # which a setting may allow
            if prompts:
                question(place, fields, media=media, directory=directory)
            elif labelled:
                read_labelled(place, fields, media=media, directory=directory)
            elif pairs:
                text_pair(place, fields, media=media, directory=directory, as_messages=media)
            else:
                name = source.own.data_format or format
                name = detect(place, fields) if name == AUTO else name
                convert(name, place, fields, None, media=media, directory=directory)


def _is_local(data_path: Any) -> bool:
    """Return whether every entry is a file, glob or directory on this machine, or nothing."""
    for entry in (str(path) for path, _ in listed(data_path)):
        if is_described(entry):
            with suppress(DataError):  # resolving it says why
                described = description(entry)
                if described is not None and not Path(described.path).exists():
                    return False
            continue
        path = Path(entry).expanduser()
        try:
            there = path.exists()
        except (OSError, ValueError):
            continue  # resolving it says why
        if "://" in entry or (not there and ":" in entry) or (there and is_saved(path)):
            return False
    return True


def _see_all(sources: list[Source], changes: SourceChanges) -> None:
    """Add the columns of every row that can be read, until those to rename were seen."""
    for number, source in enumerate(sources):
        try:
            for record in source.records(lambda *_: None):
                changes.see(number, record.fields)
                if changes.complete:
                    return
        except DataError:
            continue
