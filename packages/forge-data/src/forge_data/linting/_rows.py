"""Sources → findings, row by row and past rows that `prepare` refuses; nothing is written."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from forge_data._bad_rows import BadRows
from forge_data._errors import DataError, ForgeDataError
from forge_data._formats import AUTO
from forge_data._options import Options
from forge_data.findings._finding import Finding
from forge_data.findings._report import Findings
from forge_data.findings._rules import Where, found
from forge_data.formats._documents import is_empty
from forge_data.formats._format import FieldOf, Fields
from forge_data.formats._registry import convert, detect, format_named
from forge_data.formats._samples import Document, Encoded, Sample
from forge_data.formats._system_prompt import field_of_sample
from forge_data.formats._weights import Margins
from forge_data.linting._kind import kind_of, two_kinds
from forge_data.linting._lost import REASONS, lost_to_length, reason_of, refused
from forge_data.linting._readings import Reading, Readings
from forge_data.linting._sample_table import SampleTable, TableBuilder, mark_of
from forge_data.reading._record import Record
from forge_data.reading._row_changes import RowChanges, SourceChanges
from forge_data.reading._sources import Source
from forge_data.tokenizing._encode_apart import encode_apart
from forge_data.tokenizing._overflow import fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = 512
_BYTES = 4 << 20


class _Row(NamedTuple):
    """A row that waits for the tokenizer."""

    where: Where
    fields: Fields
    sample: Sample
    field_of: FieldOf


class DataLint:
    """Linter of all rows of a data set, which also collects what rules about the whole set need."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", options: Options, sources: list[Source], changes: RowChanges
    ) -> None:
        self.findings = Findings()
        self.rows = 0
        self._options = options
        self._sources = sources
        self._changes = SourceChanges(sources, changes)
        own = {number: source.own for number, source in enumerate(sources)}
        self._readings = Readings(tokenizer, options, own)
        self._bad = BadRows()
        self._first_bad: Where | None = None
        self._kind: tuple[str, str] | None = None
        self._formats: dict[str, tuple[str, str]] = {}
        self._margins = Margins()
        self._table = TableBuilder()
        self._tokens_read = 0
        self._tokens_lost: Counter[str] = Counter()
        self._longest: tuple[int, Where | None] = (0, None)
        # Of the batch: rows to tokenise, and findings on rows that are not tokenised.
        self._pending: list[_Row] = []
        self._known: list[Finding] = []

    def read(self) -> None:
        """Lint every row of every source.

        Raises:
            DataError: a source that cannot be read at all; a column to be renamed that no row has.
        """
        for number, source in enumerate(self._sources):
            size, reading = 0, self._readings.of(number)
            for record in source.records(lambda row, error, of=source: self._refuse(Where(of.name, row, of.place(row)), error)):
                self._add(number, source, record, reading)
                size += record.size
                if len(self._pending) >= _ROWS or size >= _BYTES:
                    self._flush(reading)
                    size = 0
            self._flush(reading)
        self._changes.check()

    def table(self) -> SampleTable:
        """Make the table of all samples, for the rules that need all of them."""
        return self._table.build()

    def lost(self) -> list[Finding]:
        """Find what was lost to `max_seq_len`."""
        tokens, where = self._longest
        file = where.file if where else ""
        return list(lost_to_length(self._tokens_read, self._tokens_lost, where, tokens, file))

    def too_many_refused(self) -> list[Finding]:
        """Find whether more rows are refused than may be left out."""
        if self._options.on_bad_row == "error" or self._first_bad is None:
            return []
        what = self._bad.too_many(self.rows, self._options.max_bad_rows)
        return [] if what is None else [found("too_many_bad_rows", self._first_bad, "", what)]

    def _add(self, number: int, source: Source, record: Record, reading: Reading) -> None:
        where = Where(source.name, record.row, record.place)
        try:
            rows = self._changes(number, record.place, record.fields)
        except ForgeDataError as error:
            self._refuse(where, error)
            return
        # A row that preprocess leaves out counts as read, as in the accounting of a store.
        self.rows += max(1, len(rows))
        for fields in rows:
            try:
                name = reading.options.format
                name = detect(record.place, fields) if name == AUTO else name
                sample = convert(
                    name,
                    record.place,
                    fields,
                    None if reading.encoder is None else reading.encoder.vocabulary,
                    media=self._options.media,
                    directory=source.directory,
                    system_prompt=reading.options.system_prompt,
                )
            except ForgeDataError as error:
                self._known.append(self._refused(where, error))
                continue
            first, at = self._formats.setdefault(source.name, (name, record.place))
            if name != first:
                why = DataError(
                    f"{record.place} is a row of {name}, but {at} is one of {first}; put them into files of their own"
                )
                self._known.append(refused(where, why))
                continue
            kind, at = self._kind = self._kind or (kind_of(sample), record.place)
            if kind_of(sample) != kind:
                why = DataError(two_kinds(kind_of(sample), record.place, kind, at))
                self._known.append(refused(where, why))
            elif is_empty(sample):
                self._known.append(found("no_trained_token", where, "", "the document is empty"))
            else:
                self._pending.append(_Row(where, fields, sample, field_of_sample(sample, format_named(name).field_of)))

    def _refuse(self, where: Where, error: ForgeDataError) -> None:
        self.rows += 1
        self._known.append(self._refused(where, error))

    def _refused(self, where: Where, error: ForgeDataError) -> Finding:
        finding = refused(where, error, skipped=self._options.skips(error))
        if not self._options.allows(error):
            self._bad.add(reason_of(error, finding), str(error))
            self._first_bad = self._first_bad or where
        return finding

    def _flush(self, reading: Reading) -> None:
        findings, self._known = self._known, []
        pending, self._pending = self._pending, []
        samples = [row.sample for row in pending]
        results: Iterable[Encoded | ForgeDataError]
        encoder, lint = reading.encoder, reading.lint
        assert encoder is not None
        assert lint is not None
        try:
            results = encoder.encode(samples)
        except ForgeDataError as error:
            results = encode_apart(encoder.encode, samples, error)
        for row, encoded in zip(pending, results, strict=True):
            if isinstance(encoded, ForgeDataError):
                findings.append(self._refused(row.where, encoded))
            made = encoded if isinstance(encoded, Encoded) else None
            findings += lint.check(row.where, row.fields, row.sample, made, row.field_of)
            if made is not None:
                findings += self._fit(row, made, reading.options)
        # Findings of rows that were not tokenised come first; a reader wants the order of the rows.
        self.findings.add(sorted(findings, key=lambda finding: finding.row or 0))

    def _fit(self, row: _Row, encoded: Encoded, options: Options) -> list[Finding]:
        where = row.where
        tokens = sum(map(len, encoded.examples))
        self._tokens_read += tokens
        try:
            fitted = fit(where.place, encoded, options)
        except ForgeDataError as error:
            return [self._refused(where, error)]
        if fitted.kept and encoded.pair:
            try:
                self._margins.see(where.place, given=encoded.margin is not None)
            except ForgeDataError as error:
                return [refused(where, error)]
        self._tokens_lost.update(fitted.lost)
        if any(reason in REASONS for reason in fitted.lost):
            self._longest = max(self._longest, (tokens, where), key=lambda each: each[0])
        self._table.add(where, fitted.kept, pair=encoded.pair, mark=_mark(row, encoded))
        return []


def _mark(row: _Row, encoded: Encoded) -> int:
    """Return the mark of a row.

    Of an answer it is whether it is wanted, of a pair its margin, of a classifier's text its label.
    """
    if encoded.desirable is not None or encoded.margin is not None:
        return mark_of(encoded.margin if encoded.desirable is None else encoded.desirable)
    if not isinstance(row.sample, Document):
        return 0
    labels = row.fields.get("labels", row.fields.get("label"))
    return mark_of(sorted(map(str, labels)) if isinstance(labels, list) else labels if labels is None else str(labels))
