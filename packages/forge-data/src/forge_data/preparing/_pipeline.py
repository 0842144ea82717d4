"""Sources → a store being written: chunks to workers, batches back in order, counted."""

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from forge_data._accounting import Accounting
from forge_data._bad_rows import BadRows, name_remedy
from forge_data._errors import BadPairError, DataError, ForgeDataError
from forge_data.findings._report import Findings
from forge_data.formats._registry import detect
from forge_data.formats._system_prompt import ADDED, OWN
from forge_data.formats._weights import Margins
from forge_data.linting._kind import two_kinds
from forge_data.preparing._batch import Batch, Seen
from forge_data.preparing._job import Job, Preprocessed, Task, read
from forge_data.preparing._workers import batches
from forge_data.reading._memory import InMemoryRows
from forge_data.reading._record import Record
from forge_data.reading._row_changes import SourceChanges
from forge_data.store._manifest import MARGINS, PREFERENCE, SourceFile

if TYPE_CHECKING:
    from forge_data.reading._sources import Source
    from forge_data.store._writer import StoreWriter

_CHUNK_BYTES = 1 << 20
"""Bytes of input in a task. Its end never depends on the number of processes, so the bytes of the store do not."""
_MIN_BYTES_FOR_WORKERS = 8 << 20
"""Bytes of input; starting a worker takes as long as tokenising so many."""
_MAX_WORKERS = 16
_COUNTED_ROWS = 10_000
"""Rows that are read to name the formats of a mixed file."""


@attrs.define
class Outcome:
    """What all rows became."""

    read: Counter[int] = attrs.field(factory=Counter)
    """Rows by number of the source."""
    kept: Counter[int] = attrs.field(factory=Counter)
    """Rows that became samples, by number of the source."""
    tokens_read: int = 0
    dropped: Counter[str] = attrs.field(factory=Counter)
    tokens_lost: Counter[str] = attrs.field(factory=Counter)
    forms: Counter[str] = attrs.field(factory=Counter)
    conversations: set[int] = attrs.field(factory=set)
    """Numbers of the sources with rows that a system prompt is for: those that are conversations."""
    samples: Counter[int] = attrs.field(factory=Counter)
    """Samples by number of the source."""
    shortest_too_long: int | None = None
    findings: Findings = attrs.field(factory=Findings)
    bad: BadRows = attrs.field(factory=BadRows)
    formats: dict[int, tuple[str, str]] = attrs.field(factory=dict)
    """Format of the rows of each source, by its number, and the place of the first."""
    first: tuple[str, str] | None = None
    """Kind of the samples, as in the manifest, and the place of the first; None without a row."""
    margins: Margins = attrs.field(factory=Margins)

    def accounting(self, writer: "StoreWriter") -> Accounting:
        """Make the accounting, which checks that its numbers add up."""
        return Accounting(
            self.read.total(),
            self.kept.total(),
            self.dropped,
            writer.samples,
            self.tokens_read,
            writer.tokens,
            self.tokens_lost,
            self.forms,
        )

    def files(self, sources: Sequence["Source"]) -> list[SourceFile]:
        """List the sources as the store names them."""
        return [
            SourceFile(
                each.name,
                each.origin,
                self.samples[number],
                each.group,
                each.weight,
                each.indexed,
                self.formats[number][0] if number in self.formats else None,
                self.read[number],
                self.kept[number],
                each.directory,
            )
            for number, each in enumerate(sources)
        ]


def run(
    job: Job,
    sources: Sequence["Source"],
    writer: "StoreWriter",
    num_proc: int | None,
    report_row: Callable[[int], None],
    whole: Sequence["Source"] | None = None,
) -> Outcome:
    """Write every row of every source; what is written is the same for any number of processes.

    Args:
        job: what to make batches with.
        sources: rows.
        writer: the store.
        num_proc: as of `batches`, or None to choose it.
        report_row: called with the number of rows so far.
        whole: the same sources with all their rows, where `sources` are a part of them. A column to be renamed is looked for in
            all rows; their bad ones are counted once the parts are merged.

    Raises:
        ForgeDataError: of the first row that is refused, in the order of the sources; a column to be renamed that no row has;
            more bad rows than `max_bad_rows` allows.
    """
    outcome = Outcome()
    changes = SourceChanges(sources, job.changes)
    rows_before = 0
    at = 0
    reached = 0
    processes, tasks = _processes(_tasks(sources), num_proc)
    # Closed however this ends: workers and the collector of cycles must not wait until an error is forgotten.
    with contextlib.closing(batches(job, tasks, processes)) as done:
        for batch in done:
            _check_batch(outcome, batch, job, sources)
            writer.add(batch.arrays)
            if batch.dropped:
                source = sources[batch.source]
                writer.drop(source.name, batch.dropped, indexed=source.indexed)
            _count(outcome, batch)
            changes.see(batch.source, batch.columns)
            if batch.source != at:
                rows_before, at = rows_before + reached, batch.source
            reached = batch.last_row + sources[at].indexed
            report_row(rows_before + reached)
    if whole is not None:
        _add_columns(changes, whole, job)
    changes.check()
    if whole is None:
        outcome.bad.check(outcome.read.total(), job.options.max_bad_rows)
    return outcome


def _add_columns(changes: SourceChanges, whole: Sequence["Source"], job: Job) -> None:
    """Add the columns of all rows, where a part lacks one that is to be renamed."""
    for task in _tasks(whole):
        if changes.complete:
            return
        changes.see(task.source, read(task, job).columns if isinstance(task, Task) else task.columns)


def _count(outcome: Outcome, batch: Batch) -> None:
    outcome.read[batch.source] += batch.read
    outcome.kept[batch.source] += batch.kept
    outcome.tokens_read += batch.tokens_read
    outcome.tokens_lost += batch.tokens_lost
    outcome.forms += batch.forms
    if ADDED in batch.forms or OWN in batch.forms:
        outcome.conversations.add(batch.source)
    for each in batch.dropped:
        outcome.dropped[each.reason] += 1
        if each.error:
            outcome.bad.add(each.reason, each.error)
    outcome.samples[batch.source] += len(batch.arrays["offsets.bin"])
    outcome.findings.add(batch.findings)
    shortest = [size for size in (outcome.shortest_too_long, batch.shortest_too_long) if size is not None]
    outcome.shortest_too_long = min(shortest, default=None)


def _check_batch(outcome: Outcome, batch: Batch, job: Job, sources: Sequence["Source"]) -> None:
    """Raise the error of the first row of a batch that is refused, if any."""
    _check_margins(outcome.margins, batch, sources[batch.source])
    for at, (kind, place) in enumerate(batch.kinds.items()):
        outcome.first = outcome.first or (kind, place)
        # What comes after the first row of the batch counts after an error of the rows before it.
        if kind != outcome.first[0] and (at == 0 or batch.error is None):
            raise DataError(two_kinds(kind, place, *outcome.first))
    for at, (name, seen) in enumerate(batch.formats.items()):
        first = outcome.formats.setdefault(batch.source, (name, seen.first))
        if name != first[0] and (at == 0 or batch.error is None):
            raise DataError(
                f"{seen.first} is a row of {name}, but {first[1]} is one of {first[0]}; "
                f"{_count_formats(sources[batch.source], job)}a file holds one format, so that no stray row is learned "
                "otherwise than it was meant: put them into files of their own, make them one format with `preprocess`, or "
                f"leave out all but one format: `format` {first[0]} with on_bad_row=skip"
            )
    if batch.error is not None:
        others = batch.kept or any(outcome.kept.values())
        if isinstance(batch.error, BadPairError) or (isinstance(batch.error, ForgeDataError) and others):
            name_remedy(batch.error)
        raise batch.error


def _check_margins(margins: Margins, batch: Batch, source: "Source") -> None:
    """Refuse the first pair that has a margin where others have none, or the other way round.

    Raises:
        DataError: naming both rows.
    """
    rows = batch.arrays["rows.bin"][::2]
    if PREFERENCE in batch.kinds and len(rows):
        given = ~np.isnan(batch.arrays[MARGINS]) if MARGINS in batch.arrays else np.zeros(len(rows), dtype=np.bool_)
        margins.see(source.place(int(rows[0])), given=bool(given[0]))
        at = int(np.argmax(given != given[0]))
        margins.see(source.place(int(rows[at])), given=bool(given[at]))


def _count_formats(source: "Source", job: Job) -> str:
    """Count the formats of the first rows of a source, in words.

    Nothing is said of a stream, which cannot be read again.
    """
    if isinstance(source.reader, InMemoryRows) and source.reader.is_stream:
        return ""
    seen: dict[str, Seen] = {}
    count_all = 0
    alone = attrs.evolve(job, own={0: source.own})  # as the only source it has another number
    for record, stays in itertools.islice(_records([source], alone), _COUNTED_ROWS):
        count_all += 1
        if stays is not True:
            continue
        try:
            name = detect(record.place, record.fields)
        except ForgeDataError:
            name = "no known format"
        first, count = seen.get(name, Seen(record.place, 0))
        seen[name] = Seen(first, count + 1)
    listed = ", ".join(f"{count:,} of {name} (the first is {first})" for name, (first, count) in seen.items())
    return f"the first {count_all:,} rows are {listed}; "


def _records(sources: Sequence["Source"], job: Job) -> Iterator[tuple[Record, bool | ForgeDataError]]:
    for task in _tasks(sources):
        rows = read(task, job) if isinstance(task, Task) else task
        yield from rows.records
        if rows.error is not None:
            return


def _tasks(sources: Sequence["Source"]) -> Iterator[Task | Preprocessed]:
    """List every chunk of every source.

    A source that cannot be read further is a task too, so that the rows before it count first.
    """
    for number, source in enumerate(sources):
        try:
            for chunk in source.chunks(_CHUNK_BYTES):
                yield Task(number, source.name, source.indexed, chunk, source.directory)
        except ForgeDataError as error:
            yield Preprocessed(number, source.name, 0, [], frozenset(), error)
            return


def _processes(tasks: Iterator[Task | Preprocessed], num_proc: int | None) -> tuple[int | None, Iterator[Task | Preprocessed]]:
    """Choose how many processes to use, where no number was given, and return the tasks with it.

    None for little data: this process, in which the tokenizer uses its own threads.
    """
    if num_proc is not None:
        return num_proc, tasks
    most = min(_cores(), _MAX_WORKERS)
    if most == 1:
        return 1, tasks
    seen: list[Task | Preprocessed] = []
    size = 0
    for task in tasks:
        seen.append(task)
        size += task.chunk.size if isinstance(task, Task) else 0
        if size >= _MIN_BYTES_FOR_WORKERS:
            return most, itertools.chain(seen, tasks)
    return None, iter(seen)


def _cores() -> int:
    """Count the cores that this process may use: its affinity, and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
