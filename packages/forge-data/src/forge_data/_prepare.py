"""A file of rows to a token store: read, checked, tokenised, counted, written."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forge_data._accounting import NO_TRAINED_TOKEN, TOO_LONG, Accounting
from forge_data._encode import Encoder
from forge_data._errors import DataError
from forge_data._format import SourceFile
from forge_data._read import Record, open_source, read
from forge_data._samples import Sample, parse, shape_of
from forge_data._store import TokenStore
from forge_data._tokenize import check_max_seq_len
from forge_data._tokenizer import as_tokenizer
from forge_data._writer import StoreWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A batch is tokenised in one call; these keep it large enough to be quick and small enough to fit anywhere.
_ROWS = 512
_BYTES = 4 << 20


def prepare(
    data_path: str | os.PathLike[str],
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    store_dir: str | os.PathLike[str],
    *,
    max_seq_len: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenStore:
    """The rows of a file as a token store in `store_dir`, a new directory.

    Rows without a learned token and rows longer than `max_seq_len` tokens are left out and counted, nothing is
    truncated. If anything fails, `store_dir` is not there.

    Args:
        data_path: a JSONL or Parquet file; all its rows have one shape.
        tokenizer: a loaded tokenizer, a directory or a name on the hub.
        store_dir: where the store is to be; new, or an empty directory.
        max_seq_len: longest sample in tokens; no limit by default.
        progress: called with (row reached, last row) after every batch.

    Raises:
        DataError: the file, or a row of it by `file:row`; no row that can be trained on.
        TemplateError: no chat template, or one that leaves open which tokens the assistant wrote.
        TokenizerError: no tokenizer there, or one without offsets.
        StoreError: `store_dir` is taken or cannot be written.
    """
    check_max_seq_len(max_seq_len)
    source = open_source(os.fspath(data_path))
    loaded = as_tokenizer(tokenizer)
    encoder = Encoder(loaded)
    last = source.count() if progress is not None else 0
    dropped: Counter[str] = Counter()
    shortest_left_out: int | None = None
    with StoreWriter(Path(store_dir).expanduser()) as writer:
        for records in _batches(_checked(read(source), source.path.name, encoder.vocabulary)):
            rows, samples = zip(*records, strict=True)
            kept, kept_rows = [], []
            for row, example in zip(rows, encoder.encode(samples), strict=True):
                if not example.loss_count:
                    dropped[NO_TRAINED_TOKEN] += 1
                elif max_seq_len is not None and len(example) > max_seq_len:
                    dropped[TOO_LONG] += 1
                    shortest_left_out = min(len(example), shortest_left_out or len(example))
                else:
                    kept.append(example)
                    kept_rows.append(row.row)
            writer.add(kept, kept_rows)
            if progress is not None:
                progress(rows[-1].row, last)
        accounting = Accounting(writer.samples + dropped.total(), writer.samples, dropped)
        if not writer.samples:
            raise DataError(_nothing_left(source.path, accounting, max_seq_len, shortest_left_out))
        settings = {"tokenizer": loaded.name_or_path, "max_seq_len": max_seq_len}
        writer.commit([SourceFile(source.path.name, str(source.path.absolute()), writer.samples)], accounting, settings)
    return TokenStore.open(writer.directory)


def _checked(records: Iterable[Record], name: str, vocabulary: int) -> Iterator[tuple[Record, Sample]]:
    """Rows as samples, all of the shape that the first one has."""
    first: tuple[str, str] | None = None
    for record in records:
        place = f"{name}:{record.row}"
        shape = shape_of(place, record.fields)
        first = first or (place, shape)
        if shape != first[1]:
            raise DataError(
                f"{place} is a row of {shape}, but {first[0]} is one of {first[1]}; put them into files of their own"
            )
        yield record, parse(shape, place, record.fields, vocabulary)


def _batches(samples: Iterable[tuple[Record, Sample]]) -> Iterator[list[tuple[Record, Sample]]]:
    batch: list[tuple[Record, Sample]] = []
    size = 0
    for record, sample in samples:
        batch.append((record, sample))
        size += record.size
        if len(batch) >= _ROWS or size >= _BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _nothing_left(path: Path, accounting: Accounting, max_seq_len: int | None, shortest: int | None) -> str:
    told = f"{path}: no row is left to train on: {accounting}"
    if shortest is not None:
        return f"{told}; the shortest that was too long has {shortest} tokens, max_seq_len is {max_seq_len}: raise it"
    return f"{told}; rows need an assistant turn, a completion, or labels that are not -100"
