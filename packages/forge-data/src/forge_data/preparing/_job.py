"""Chunk of rows → `Batch`: preprocessed, read by format, tokenised, cut to length, linted.

The same code runs in every process.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from forge_data._accounting import EMPTY_DOCUMENT, PREPROCESS
from forge_data._bad_rows import of_a_row, refuse
from forge_data._errors import ForgeDataError
from forge_data._example import TokenizedExample
from forge_data._formats import AUTO
from forge_data._options import Options
from forge_data._own_reading import NOTHING_OWN, OwnReading
from forge_data.findings._finding import STOP, WARN
from forge_data.findings._rules import SET_RULES, Where
from forge_data.formats._documents import is_empty
from forge_data.formats._registry import convert, detect, format_named
from forge_data.formats._samples import Encoded, Sample, Tokens
from forge_data.formats._system_prompt import field_of_sample, system_form
from forge_data.linting._kind import kind_of
from forge_data.linting._lost import reason_of, refused
from forge_data.linting._readings import Reading, Readings
from forge_data.preparing._batch import Batch, BatchBuilder
from forge_data.reading._preprocess import Preprocess
from forge_data.reading._record import Chunk, Record, place_of
from forge_data.reading._row_changes import RowChanges
from forge_data.tokenizing._encode_apart import encode_apart
from forge_data.tokenizing._encoder import Encoder, Pending
from forge_data.tokenizing._overflow import Fitted, fit
from forge_data.tokenizing._token_weights import row_weights, with_weights

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from transformers import PreTrainedTokenizerBase

# Rows and bytes of one call to the tokenizer: enough to be quick, few enough to fit into memory.
_ROWS = 512
_BYTES = 4 << 20
_EMPTY = "empty_turn"
"""Rule that stops at a row whose every answer is empty."""


class Task(NamedTuple):
    """A chunk of a source."""

    source: int
    """Number of the source."""
    file: str
    """Name of the source, for findings."""
    indexed: bool
    """Whether its rows are numbered from 0, as for `place_of`."""
    chunk: Chunk
    directory: str | None = None
    """Where relative paths in its rows begin."""


class Preprocessed(NamedTuple):
    """Rows of a chunk after the user's changes, up to the first that ends the preparation."""

    source: int
    file: str
    last_row: int
    records: list[tuple[Record, bool | ForgeDataError]]
    """Rows in order; beside one false where preprocess left it out, or the error for which it is left out."""
    columns: frozenset[str]
    """Columns of the rows, where some are renamed."""
    error: Exception | None
    directory: str | None = None


class _Row(NamedTuple):
    """A row that waits for the tokenizer."""

    record: Record
    format: str
    sample: Sample


class _Call(NamedTuple):
    """Rows of one call to the tokenizer."""

    rows: list[_Row]
    pending: Pending | None
    """None without a tokenizer, or where one of the rows is refused."""


class Started(NamedTuple):
    """A chunk whose texts are with the tokenizer."""

    rows: Preprocessed
    builder: BatchBuilder
    calls: list[_Call]
    error: ForgeDataError | None
    """Error of the row after those of the calls."""


@attrs.frozen(kw_only=True)
class Job:
    """Everything that a process needs to make batches. It pickles if its preprocess does."""

    tokenizer: "PreTrainedTokenizerBase | None"
    """None where rows are token ids, of whose text nothing is known."""
    options: Options
    preprocess: Preprocess | None = None
    own: Mapping[int, OwnReading] = attrs.field(factory=dict)
    """Settings that the rows of a source have in place of the options, by its number."""

    @property
    def changes(self) -> RowChanges:
        """What is done to each row before its format is known, but for settings of its source."""
        return RowChanges(self.preprocess, self.options.rename_columns)

    def own_of(self, source: int) -> OwnReading:
        """Return the settings that a source has of its own."""
        return self.own.get(source, NOTHING_OWN)


class Processor:
    """Makes the batches of one job, chunk by chunk."""

    def __init__(self, job: Job, thread: "Executor | None" = None) -> None:
        self._job = job
        self._readings = Readings(job.tokenizer, job.options, job.own, thread)

    def __call__(self, task: "Task | Preprocessed") -> Batch:
        """Make the batch of a chunk.

        A row that is refused becomes the batch's `error` and is not raised, since the rows before it count first.
        """
        return self.finish(self.begin(task))

    def begin(self, task: "Task | Preprocessed") -> Started:
        """Read the rows of a chunk and start tokenising them."""
        rows = task if isinstance(task, Preprocessed) else read(task, self._job)
        reading = self._readings.of(rows.source)
        builder = BatchBuilder(rows.columns)
        calls: list[_Call] = []
        waiting: list[_Row] = []
        size = 0
        error: ForgeDataError | None = None
        for record, stays in rows.records:
            if stays is False:
                builder.leave_out(record.row, PREPROCESS)
                continue
            try:
                if isinstance(stays, ForgeDataError):
                    raise stays
                row = _read_row(record, builder, rows, reading)
            except ForgeDataError as found:
                if not reading.options.skips(found):
                    error = of_a_row(found)
                    break
                where = Where(rows.file, record.row, record.place)
                builder.leave_out(record.row, *_skipped(where, found, builder, reading.options))
                continue
            if row is None:
                break
            if is_empty(row.sample):
                builder.leave_out(record.row, EMPTY_DOCUMENT)
                continue
            waiting.append(row)
            size += record.size
            if len(waiting) >= _ROWS or size >= _BYTES:
                calls.append(_started(waiting, reading.encoder))
                waiting, size = [], 0
                if calls[-1].pending is None and reading.encoder is not None and reading.options.on_bad_row == "error":
                    break
        if waiting:
            calls.append(_started(waiting, reading.encoder))
        return Started(rows, builder, calls, error)

    def finish(self, started: Started) -> Batch:
        """Make the batch of a chunk that `begin` started."""
        rows, builder, calls, error = started
        try:
            for call in calls:
                _finish_call(call, builder, rows.file, self._readings.of(rows.source))
            if error is None and len(builder.formats) < 2 and len(builder.kinds) < 2:
                error = rows.error
        except ForgeDataError as found:
            error = found
        if isinstance(error, ForgeDataError):
            self._job.own_of(rows.source).named_in(error)
        return builder.build(rows.source, rows.last_row, error)


def _started(rows: list[_Row], encoder: Encoder | None) -> _Call:
    if encoder is None:
        return _Call(rows, None)
    try:
        return _Call(rows, encoder.begin([row.sample for row in rows]))
    except ForgeDataError:
        return _Call(rows, None)


def _read_row(record: Record, builder: BatchBuilder, rows: Preprocessed, reading: Reading) -> _Row | None:
    """Read a row by its format; None, which ends the batch, where the rows before had another."""
    options, name = reading.options, reading.options.format
    if name == AUTO:
        name = detect(record.place, record.fields)
    # A row that is left out is of no format; any other must have that of the rows before it, readable or not.
    counts = options.on_bad_row == "error"
    if counts and not builder.see_format(name, record.place):
        return None
    vocabulary = reading.encoder.vocabulary if reading.encoder is not None else None
    sample = convert(
        name,
        record.place,
        record.fields,
        vocabulary,
        media=options.media,
        directory=rows.directory,
        system_prompt=options.system_prompt,
    )
    if not counts and not builder.see_format(name, record.place):
        return None
    return _Row(record, name, sample) if builder.see_kind(kind_of(sample), record.place) else None


def _skipped(where: Where, error: ForgeDataError, builder: BatchBuilder, options: Options) -> tuple[str, str]:
    """Report a row that is left out; return the reason, and the error where only so many may be."""
    finding = refused(where, error, skipped=True)
    # What is lost to `max_seq_len` is one finding of all rows, as where such rows are dropped.
    if finding.rule not in SET_RULES:
        builder.findings.append(finding)
    return reason_of(error, finding), "" if options.allows(error) else str(error)


def _finish_call(call: _Call, builder: BatchBuilder, file: str, reading: Reading) -> None:
    samples = [row.sample for row in call.rows]
    encoded: Iterable[Encoded | ForgeDataError]
    try:
        if reading.encoder is not None and call.pending is not None:
            encoded = reading.encoder.finish(call.pending)
        else:
            encoded = encode(reading.encoder, samples)
    except ForgeDataError as error:
        # In order, so that the first row with any fault is the one that is named.
        encoded = encode_apart(partial(encode, reading.encoder), samples, error)
    for row, made in zip(call.rows, encoded, strict=True):
        _add(row, made, builder, file, reading)


def _add(row: _Row, made: Encoded | ForgeDataError, builder: BatchBuilder, file: str, reading: Reading) -> None:
    record, name, sample = row
    options = reading.options
    where, error = Where(file, record.row, record.place), ""
    try:
        if isinstance(made, ForgeDataError):
            raise made
        fitted = fit(record.place, made, options)
    except ForgeDataError as found:
        if not options.skips(found):
            of_a_row(found)
            raise
        reason, error = _skipped(where, found, builder, options)
        if isinstance(made, ForgeDataError):
            builder.leave_out(record.row, reason, error)
            return
        fitted = Fitted((), reason, {reason: sum(map(len, made.examples))})
    field_of = format_named(name).field_of
    if options.system_prompt is not None:
        field_of = field_of_sample(sample, field_of)
        made = attrs.evolve(made, forms=made.forms | system_form(sample))
    findings = [] if reading.lint is None else reading.lint.check(where, record.fields, sample, made, field_of)
    if options.on_bad_row == "skip" and fitted.reason is None:
        # What would stop the run after all rows were tokenised is left out as any other bad row.
        empty = next((each for each in findings if each.rule == _EMPTY and each.severity == STOP), None)
        if empty is not None:
            fitted = Fitted((), _EMPTY, {_EMPTY: sum(map(len, made.examples))})
            error = f"{record.place}: field {empty.field}: {empty.what}; {empty.fix}"
            findings = [attrs.evolve(each, severity=WARN) for each in findings]
    builder.add(record.row, made, fitted, error)
    builder.findings += findings


def encode(encoder: Encoder | None, samples: Sequence[Sample]) -> list[Encoded]:
    """Tokenise samples, in order; without a tokenizer they must be token ids."""
    if encoder is not None:
        return encoder.encode(samples)
    tokens = [sample for sample in samples if isinstance(sample, Tokens)]
    return [Encoded((as_example(sample),)) for sample in tokens]


def as_example(tokens: Tokens) -> TokenizedExample:
    """Make an example of a row of token ids; all of it is one segment."""
    whole = np.array([[0, len(tokens.input_ids)]], dtype=np.int32)
    example = TokenizedExample.from_mask(tokens.input_ids, tokens.trained, whole, ("tokens",))
    return with_weights(example, row_weights(tokens))


def read(task: Task, job: Job) -> Preprocessed:
    """Read the rows of a chunk and change them as the user wishes."""
    records: list[tuple[Record, bool | ForgeDataError]] = []
    columns: set[str] = set()
    error: Exception | None = None
    changes = job.changes.of(job.own_of(task.source))

    def leave_out(row: int, error: ForgeDataError) -> None:
        records.append((Record(row, {}, 0, place_of(task.file, row, indexed=task.indexed)), error))

    skips = job.options.on_bad_row == "skip"
    try:
        for record in task.chunk.records(leave_out if skips else refuse):
            try:
                made = changes(record.place, record.fields, columns)
            except ForgeDataError as found:
                (leave_out if skips else refuse)(record.row, found)
                continue
            records += [(record._replace(fields=fields), True) for fields in made] or [(record._replace(fields={}), False)]
    except ForgeDataError as found:
        error = found
    return Preprocessed(task.source, task.file, task.chunk.last_row, records, frozenset(columns), error, task.directory)
