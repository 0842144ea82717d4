"""A chunk of rows to a `Batch`: preprocessed, understood, tokenised, fitted, looked over. The same code in every process."""

from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from forge_data._accounting import EMPTY_DOCUMENT, PREPROCESS
from forge_data._errors import BadPairError, ForgeDataError
from forge_data._example import TokenizedExample
from forge_data._options import Options
from forge_data.findings._rules import Where
from forge_data.formats import _registry as _formats
from forge_data.formats._documents import is_empty
from forge_data.formats._samples import Encoded, Sample, Tokens
from forge_data.linting._lost import refused
from forge_data.linting._row import RowLint
from forge_data.preparing._batch import Batch, BatchBuilder, Seen
from forge_data.reading._preprocess import Preprocess
from forge_data.reading._record import Chunk, Record
from forge_data.tokenizing._encoder import Begun as Asked, Encoder
from forge_data.tokenizing._overflow import Fitted, fit

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from transformers import PreTrainedTokenizerBase

# One call to the tokenizer takes so many rows, or so many bytes: enough to be quick, few enough to fit anywhere.
_ROWS = 512
_BYTES = 4 << 20


class Task(NamedTuple):
    """A chunk, and whose it is."""

    source: int
    """Number of the source."""
    file: str
    """Its name, for findings."""
    chunk: Chunk


class Rows(NamedTuple):
    """What a chunk holds once the user's own preprocessing has seen it, up to the first row that is at fault."""

    source: int
    file: str
    last_row: int
    records: list[tuple[Record, bool]]
    """Rows in order; false beside one that preprocess left out."""
    error: Exception | None


class _Flush(NamedTuple):
    """Rows for one call to the tokenizer."""

    rows: list[tuple[Record, Sample]]
    asked: Asked | None
    """What the tokenizer was asked; None without one, or if one of the rows is at fault."""


class Begun(NamedTuple):
    """A chunk that waits for the tokenizer."""

    rows: Rows
    builder: BatchBuilder
    flushes: list[_Flush]
    error: ForgeDataError | None
    """What is wrong with the row after those of the flushes."""


@attrs.frozen(kw_only=True)
class Job:
    """All that a process needs to know. It pickles where its preprocess does."""

    tokenizer: "PreTrainedTokenizerBase | None"
    """None where rows are tokens already and nothing can be said about their text."""
    options: Options
    preprocess: Preprocess | None = None


class Work:
    """Does one job, chunk by chunk."""

    def __init__(self, job: Job, thread: "Executor | None" = None) -> None:
        self._job = job
        self._encoder = Encoder(job.tokenizer, job.options.train_on, thread) if job.tokenizer is not None else None
        self._lint = RowLint(job.tokenizer, job.options) if job.tokenizer is not None else None

    def __call__(self, task: "Task | Rows") -> Batch:
        """What became of a chunk. What is wrong with a row is an `error` of the batch, not raised: rows before it count first."""
        return self.finish(self.begin(task))

    def begin(self, task: "Task | Rows") -> "Begun":
        """All that is to be done with a chunk before the tokenizer is asked."""
        rows = task if isinstance(task, Rows) else read(task, self._job.preprocess)
        builder = BatchBuilder()
        flushes: list[_Flush] = []
        pending: list[tuple[Record, Sample]] = []
        size = 0
        error: ForgeDataError | None = None
        for record, stays in rows.records:
            if not stays:
                builder.leave_out(record.row, PREPROCESS)
                continue
            try:
                sample = self._understood(record, builder)
            except BadPairError as found:
                if self._job.options.on_bad_pair == "error":
                    error = found
                    break
                builder.leave_out(record.row, found.reason)
                builder.findings.append(refused(Where(rows.file, record.row, record.place), found, skipped=True))
                continue
            except ForgeDataError as found:
                error = found
                break
            if sample is None:
                break
            if is_empty(sample):
                builder.leave_out(record.row, EMPTY_DOCUMENT)
                continue
            pending.append((record, sample))
            size += record.size
            if len(pending) >= _ROWS or size >= _BYTES:
                flushes.append(self._asked(pending))
                pending, size = [], 0
                if flushes[-1].asked is None and self._encoder is not None:
                    break
        if pending:
            flushes.append(self._asked(pending))
        return Begun(rows, builder, flushes, error)

    def finish(self, begun: "Begun") -> Batch:
        """What became of the chunk of `begin`."""
        rows, builder, flushes, error = begun
        try:
            for flush in flushes:
                self._flush(flush, builder, rows.file)
            if error is None and len(builder.formats) < 2:
                error = rows.error
        except ForgeDataError as found:
            error = found
        return builder.build(rows.source, rows.last_row, error)

    def _asked(self, pending: list[tuple[Record, Sample]]) -> "_Flush":
        if self._encoder is None:
            return _Flush(pending, None)
        try:
            return _Flush(pending, self._encoder.begin([sample for _, sample in pending]))
        except ForgeDataError:
            return _Flush(pending, None)

    def _understood(self, record: Record, builder: BatchBuilder) -> Sample | None:
        """A row as a sample; None where it has another format than those before it, which ends the batch."""
        name = self._job.options.format
        if name == "auto":
            name = _formats.detect(record.place, record.fields)
            first, count = builder.formats.get(name, (record.place, 0))
            builder.formats[name] = Seen(first, count + 1)
            if len(builder.formats) > 1:
                return None
        vocabulary = self._encoder.vocabulary if self._encoder is not None else None
        return _formats.convert(name, record.place, record.fields, vocabulary)

    def _flush(self, flush: "_Flush", builder: BatchBuilder, file: str) -> None:
        samples = [sample for _, sample in flush.rows]
        try:
            if self._encoder is not None and flush.asked is not None:
                encoded = self._encoder.finish(flush.asked)
            else:
                encoded = encode(self._encoder, samples)
        except ForgeDataError:
            # The rows one by one, in order: the first of them that is at fault, for whatever reason, is the one to name.
            for each in flush.rows:
                self._add([each], encode(self._encoder, [each[1]]), builder, file)
            raise
        self._add(flush.rows, encoded, builder, file)

    def _add(self, rows: list[tuple[Record, Sample]], encoded: list[Encoded], builder: BatchBuilder, file: str) -> None:
        for (record, sample), made in zip(rows, encoded, strict=True):
            try:
                fitted = fit(record.place, made.examples, self._job.options)
            except BadPairError as error:
                if self._job.options.on_bad_pair == "error":
                    raise
                fitted = Fitted((), error.reason, {error.reason: sum(map(len, made.examples))})
                builder.findings.append(refused(Where(file, record.row, record.place), error, skipped=True))
            builder.add(record.row, made, fitted)
            if self._lint is not None:
                builder.findings += self._lint.check(file, record.row, record.fields, sample, made)


def encode(encoder: Encoder | None, samples: list[Sample]) -> list[Encoded]:
    """Samples tokenised, in order; without a tokenizer, such as are tokens already."""
    if encoder is not None:
        return encoder.encode(samples)
    tokens = [sample for sample in samples if isinstance(sample, Tokens)]
    return [Encoded((as_example(sample),)) for sample in tokens]


def as_example(tokens: Tokens) -> TokenizedExample:
    """A row that came as tokens, all of it one segment, as an example."""
    whole = np.array([[0, len(tokens.input_ids)]], dtype=np.int32)
    return TokenizedExample.from_mask(tokens.input_ids, tokens.trained, whole, ("tokens",))


def read(task: Task, preprocess: Preprocess | None) -> Rows:
    """The rows of a chunk as they stand after the user's own preprocessing."""
    records: list[tuple[Record, bool]] = []
    error: Exception | None = None
    try:
        for record in task.chunk.records():
            made = [record.fields] if preprocess is None else preprocess(record.place, record.fields)
            records += [(record._replace(fields=fields), True) for fields in made] or [(record._replace(fields={}), False)]
    except ForgeDataError as found:
        error = found
    return Rows(task.source, task.file, task.chunk.last_row, records, error)
