"""Sources → findings, row by row and past rows that `prepare` refuses; nothing is written."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from forge_data._errors import BadPairError, DataError, ForgeDataError
from forge_data._formats import AUTO
from forge_data._options import Options
from forge_data.findings._finding import Finding
from forge_data.findings._report import Findings
from forge_data.findings._rules import Where, found
from forge_data.formats._documents import is_empty
from forge_data.formats._format import FieldOf, Fields
from forge_data.formats._margins import Margins
from forge_data.formats._registry import convert, detect, format_named
from forge_data.formats._samples import Encoded, Sample
from forge_data.linting._lost import REASONS, lost_to_length, refused
from forge_data.linting._row import RowLint
from forge_data.linting._sample_table import SampleTable, TableBuilder
from forge_data.reading._preprocess import Preprocess
from forge_data.reading._record import Record
from forge_data.reading._sources import Source
from forge_data.tokenizing._encoder import Encoder
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

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: Options, preprocess: Preprocess | None) -> None:
        self.findings = Findings()
        self.rows = 0
        self._options = options
        self._preprocess = preprocess
        self._encoder = Encoder(
            tokenizer, options.train_on, turns=options.turns, arguments=options.chat_template_kwargs, turn_end=options.turn_end
        )
        self._lint = RowLint(tokenizer, options)
        self._format: tuple[str, str] | None = None
        self._margins = Margins()
        self._table = TableBuilder()
        self._tokens_read = 0
        self._tokens_lost: Counter[str] = Counter()
        self._longest: tuple[int, Where | None] = (0, None)
        # Of the batch: rows to tokenise, and findings on rows that are not tokenised.
        self._pending: list[_Row] = []
        self._known: list[Finding] = []

    def read(self, sources: list[Source]) -> None:
        """Lint every row of every source.

        Raises:
            DataError: a source that cannot be read at all.
        """
        for source in sources:
            size = 0
            for record in source.records(lambda row, error, of=source: self._refuse(Where(of.name, row, of.place(row)), error)):
                self._add(source, record)
                size += record.size
                if len(self._pending) >= _ROWS or size >= _BYTES:
                    self._flush()
                    size = 0
            self._flush()

    def table(self) -> SampleTable:
        """Make the table of all samples, for the rules that need all of them."""
        return self._table.build()

    def lost(self) -> list[Finding]:
        """Find what was lost to `max_seq_len`."""
        tokens, where = self._longest
        file = where.file if where else ""
        return list(lost_to_length(self._tokens_read, self._tokens_lost, where, tokens, file))

    def _add(self, source: Source, record: Record) -> None:
        where = Where(source.name, record.row, record.place)
        try:
            rows = [record.fields] if self._preprocess is None else self._preprocess(record.place, record.fields)
        except ForgeDataError as error:
            self._refuse(where, error)
            return
        # A row that preprocess leaves out counts as read, as in the accounting of a store.
        self.rows += max(1, len(rows))
        for fields in rows:
            try:
                name = self._name(record.place, fields)
                sample = convert(name, record.place, fields, self._encoder.vocabulary)
            except ForgeDataError as error:
                self._known.append(self._refused(where, error))
                continue
            if is_empty(sample):
                self._known.append(found("no_trained_token", where, "", "the document is empty"))
            else:
                self._pending.append(_Row(where, fields, sample, format_named(name).field_of))

    def _name(self, place: str, fields: "dict[str, object]") -> str:
        """Name the format of a row, which must be that of the rows before it."""
        if self._options.format != AUTO:
            return self._options.format
        name = detect(place, fields)
        self._format = self._format or (name, place)
        if name != self._format[0]:
            first, at = self._format
            raise DataError(f"{place} is a row of {name}, but {at} is one of {first}; put them into files of their own")
        return name

    def _refuse(self, where: Where, error: ForgeDataError) -> None:
        self.rows += 1
        self._known.append(refused(where, error))

    def _refused(self, where: Where, error: ForgeDataError) -> Finding:
        return refused(where, error, skipped=isinstance(error, BadPairError) and self._options.on_bad_pair == "skip")

    def _flush(self) -> None:
        findings, self._known = self._known, []
        pending, self._pending = self._pending, []
        for row, encoded in zip(pending, self._encoded(pending), strict=True):
            if isinstance(encoded, ForgeDataError):
                findings.append(refused(row.where, encoded))
            made = encoded if isinstance(encoded, Encoded) else None
            findings += self._lint.check(row.where, row.fields, row.sample, made, row.field_of)
            if made is not None:
                findings += self._fit(row.where, made)
        # Findings of rows that were not tokenised come first; a reader wants the order of the rows.
        self.findings.add(sorted(findings, key=lambda finding: finding.row or 0))

    def _encoded(self, pending: list[_Row]) -> list[Encoded | ForgeDataError]:
        """Encode samples; a batch with a refused row is halved until that row is alone."""
        if not pending:
            return []
        try:
            return list(self._encoder.encode([row.sample for row in pending]))
        except ForgeDataError as error:
            if len(pending) == 1:
                return [error]
            half = len(pending) // 2
            return self._encoded(pending[:half]) + self._encoded(pending[half:])

    def _fit(self, where: Where, encoded: Encoded) -> list[Finding]:
        tokens = sum(map(len, encoded.examples))
        self._tokens_read += tokens
        try:
            fitted = fit(where.place, encoded, self._options)
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
        self._table.add(where, fitted.kept, pair=encoded.pair)
        return []
