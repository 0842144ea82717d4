"""Sources to a store that is being written: chunks to workers, batches back in order, the books kept."""

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
from forge_data._errors import DataError, ForgeDataError
from forge_data.findings._report import Findings
from forge_data.formats import _registry as _formats
from forge_data.formats._margins import Margins
from forge_data.preparing._batch import Batch, Seen
from forge_data.preparing._job import Job, Rows, Task, read
from forge_data.preparing._workers import batches
from forge_data.reading._record import Record
from forge_data.store._manifest import MARGINS, PREFERENCE, SourceFile

if TYPE_CHECKING:
    from forge_data.reading._sources import Source
    from forge_data.store._writer import StoreWriter

_CHUNK_BYTES = 1 << 20
"""Bytes of input a task; where one ends never depends on how many processes there are, so neither does a byte of the store."""
_WORTH_WORKERS = 8 << 20
"""Bytes of input; starting a worker takes as long as tokenising so many."""
_MOST_WORKERS = 16
_SURVEYED = 10_000
"""Rows that are looked at to say which formats a mixed file holds."""


@attrs.define
class Outcome:
    """What a run over all rows came to."""

    kind: str | None = None
    read: int = 0
    kept: int = 0
    tokens_read: int = 0
    dropped: Counter[str] = attrs.field(factory=Counter)
    tokens_lost: Counter[str] = attrs.field(factory=Counter)
    samples: Counter[int] = attrs.field(factory=Counter)
    """By number of the source."""
    shortest_too_long: int | None = None
    findings: Findings = attrs.field(factory=Findings)
    format: Seen | None = None
    format_name: str | None = None
    margins: Margins = attrs.field(factory=Margins)

    def accounting(self, writer: "StoreWriter") -> Accounting:
        """The books, which balance or are none."""
        return Accounting(self.read, self.kept, self.dropped, writer.samples, self.tokens_read, writer.tokens, self.tokens_lost)

    def files(self, sources: Sequence["Source"]) -> list[SourceFile]:
        """The sources as the store names them."""
        return [
            SourceFile(each.name, each.path, self.samples[number], each.group, each.weight, each.indexed)
            for number, each in enumerate(sources)
        ]


def run(
    job: Job,
    sources: Sequence["Source"],
    writer: "StoreWriter",
    num_proc: int | None,
    tell: Callable[[int], None],
) -> Outcome:
    """Every row of every source into the writer; what is written is the same for any number of processes.

    Raises:
        ForgeDataError: of the first row that is at fault, in the order of the sources.
    """
    outcome = Outcome()
    rows_before = 0
    at = 0
    reached = 0
    processes, tasks = _processes(_tasks(sources), num_proc)
    # Closed however this ends: what it holds (workers, the collector of cycles) is not to wait for an error to be forgotten.
    with contextlib.closing(batches(job, tasks, processes)) as done:
        for batch in done:
            _check(outcome, batch, job, sources)
            writer.add(batch.arrays)
            if batch.dropped:
                source = sources[batch.source]
                writer.drop(source.name, batch.dropped, indexed=source.indexed)
            _book(outcome, batch)
            if batch.source != at:
                rows_before, at = rows_before + reached, batch.source
            reached = batch.last_row + sources[at].indexed
            tell(rows_before + reached)
    return outcome


def _book(outcome: Outcome, batch: Batch) -> None:
    outcome.kind = outcome.kind or batch.kind
    outcome.read += batch.read
    outcome.kept += batch.kept
    outcome.tokens_read += batch.tokens_read
    outcome.tokens_lost += batch.tokens_lost
    outcome.dropped.update(each.reason for each in batch.dropped)
    outcome.samples[batch.source] += len(batch.arrays["offsets.bin"])
    outcome.findings.add(batch.findings)
    shortest = [size for size in (outcome.shortest_too_long, batch.shortest_too_long) if size is not None]
    outcome.shortest_too_long = min(shortest, default=None)


def _check(outcome: Outcome, batch: Batch, job: Job, sources: Sequence["Source"]) -> None:
    """Raise what is wrong with the first row of a batch that is at fault, if one is."""
    _check_margins(outcome.margins, batch, sources[batch.source])
    names = list(batch.formats)
    if names and outcome.format_name is None:
        outcome.format_name, outcome.format = names[0], batch.formats[names[0]]
    stranger = next((name for name in names if name != outcome.format_name), None)
    if stranger is not None and (stranger == names[0] or batch.error is None):
        assert outcome.format is not None
        raise DataError(
            f"{batch.formats[stranger].first} is a row of {stranger}, but {outcome.format.first} is one of "
            f"{outcome.format_name}; {_survey(sources, job)}; put them into files of their own and prepare one at a time, "
            "or make them one format with preprocess"
        )
    if batch.error is not None:
        raise batch.error


def _check_margins(margins: Margins, batch: Batch, source: "Source") -> None:
    """Refuse the first pair of a batch that has a margin where others have none, or none where others have one.

    Raises:
        DataError: naming both rows.
    """
    rows = batch.arrays["rows.bin"][::2]
    if batch.kind == PREFERENCE and len(rows):
        given = ~np.isnan(batch.arrays[MARGINS]) if MARGINS in batch.arrays else np.zeros(len(rows), dtype=np.bool_)
        margins.see(source.place(int(rows[0])), given=bool(given[0]))
        at = int(np.argmax(given != given[0]))
        margins.see(source.place(int(rows[at])), given=bool(given[at]))


def _survey(sources: Sequence["Source"], job: Job) -> str:
    """Which formats the first rows have, in words."""
    seen: dict[str, Seen] = {}
    looked = 0
    for record, stays in itertools.islice(_records(sources, job), _SURVEYED):
        looked += 1
        if not stays:
            continue
        try:
            name = _formats.detect(record.place, record.fields)
        except ForgeDataError:
            name = "no known format"
        first, count = seen.get(name, Seen(record.place, 0))
        seen[name] = Seen(first, count + 1)
    told = ", ".join(f"{count:,} of {name} (the first is {first})" for name, (first, count) in seen.items())
    return f"the first {looked:,} rows are {told}"


def _records(sources: Sequence["Source"], job: Job) -> Iterator[tuple[Record, bool]]:
    for task in _tasks(sources):
        rows = read(task, job.preprocess) if isinstance(task, Task) else task
        yield from rows.records
        if rows.error is not None:
            return


def _tasks(sources: Sequence["Source"]) -> Iterator[Task | Rows]:
    """Every chunk of every source. A source that cannot be read on is a task too, so that rows before it count first."""
    for number, source in enumerate(sources):
        try:
            for chunk in source.chunks(_CHUNK_BYTES):
                yield Task(number, source.name, chunk)
        except ForgeDataError as error:
            yield Rows(number, source.name, 0, [], error)
            return


def _processes(tasks: Iterator[Task | Rows], num_proc: int | None) -> tuple[int | None, Iterator[Task | Rows]]:
    """How many processes to use, and the tasks: where nobody said, what the machine gives.

    That is None for little data: this process, in which the tokenizer takes the threads that it likes.
    """
    if num_proc is not None:
        return num_proc, tasks
    most = min(_cores(), _MOST_WORKERS)
    if most == 1:
        return 1, tasks
    seen: list[Task | Rows] = []
    size = 0
    for task in tasks:
        seen.append(task)
        size += task.chunk.size if isinstance(task, Task) else 0
        if size >= _WORTH_WORKERS:
            return most, itertools.chain(seen, tasks)
    return None, iter(seen)


def _cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its container is given the time of."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
