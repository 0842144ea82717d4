"""Rows of files → store of prompts: read, tokenised, counted, written."""

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np

from forge_data._accounting import EMPTY_PROMPT, LONG_PROMPT, PREPROCESS, TOO_LONG, TRUNCATED, Accounting
from forge_data._bad_rows import BadRows, name_remedy, of_a_row, refuse
from forge_data._errors import DataError, ForgeDataError, StoreError
from forge_data._media import Media
from forge_data._options import PairOptions, PromptOptions, TextOptions
from forge_data._settings import MAX_BAD_ROWS
from forge_data._shard import Shard
from forge_data.findings._rules import Where
from forge_data.formats._samples import Chat
from forge_data.formats._system_prompt import system_form
from forge_data.formats.questions._prompts import Question, question, with_lengths, with_text
from forge_data.linting._lost import reason_of, refused
from forge_data.linting._readings import check_own
from forge_data.preparing._fingerprint import check_stamps, fingerprint_of_inputs, stamps_of
from forge_data.preparing._prepare import (
    check_system_prompts,
    check_whole,
    checked_directory,
    known_part,
    own_settings,
    reusable,
)
from forge_data.reading._preprocess import load_preprocess
from forge_data.reading._record import Record
from forge_data.reading._row_changes import RowChanges, SourceChanges
from forge_data.reading._sources import DataPath, Source, resolve
from forge_data.store._dropped import Dropped
from forge_data.store._manifest import PROMPTS, SourceFile
from forge_data.store._media import arrays_of_media
from forge_data.store._partial import remove_leftovers
from forge_data.store._prompt_store import PromptStore
from forge_data.store._writer import StoreWriter
from forge_data.tokenizing._chat_template import with_template
from forge_data.tokenizing._encode_apart import encode_apart
from forge_data.tokenizing._prompt_encoder import Asked, PromptEncoder
from forge_data.tokenizing._tokenizer import as_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_counts = logging.getLogger("forge_data.accounting")
ReadRow = Callable[..., Question]
"""(place, fields of a row) → question; of rows that may have images with `images` and `directory` too."""
_NEEDS = {
    PromptOptions: "rows need a prompt, or messages that end with the user's",
    TextOptions: "rows need a text, or messages, that is not empty",
    PairOptions: "rows need a query and a positive that are not too long",
}
AnyOptions = PromptOptions | TextOptions | PairOptions
_ROWS = 512
_BYTES = 4 << 20


def prepare_prompts(
    data_path: DataPath,
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    store_dir: str | os.PathLike[str],
    *,
    preprocess: str | Callable[[dict[str, Any]], Any] | None = None,
    rename_columns: Mapping[str, str] | None = None,
    on_bad_row: str = "error",
    max_bad_rows: float = MAX_BAD_ROWS,
    max_samples: int | None = None,
    max_prompt_len: int | None = None,
    on_overflow: str = "drop",
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    media: bool = False,
    seed: int = 0,
    shard: str | None = None,
) -> PromptStore:
    """Write the prompts of files as a store in `store_dir`, to be answered while training.

    A row has `prompt`, text or messages, or `messages` that end where the assistant is to answer; they are tokenised with the
    chat template's generation prompt, and with the row's `tools`, `documents` and `chat_template_kwargs`. Every further field
    is kept as it is. A store that was made there from the same content, tokenizer, template and settings is opened again; if
    anything fails, `store_dir` is as it was.

    Args:
        data_path: a file, glob, directory, URL or `name:split`; a list of them; or a mapping of them to their weights. Or
            rows in memory: a `datasets.Dataset`, a list of dicts, any iterable of them, streamed where it is an iterator.
        tokenizer: a loaded tokenizer, a directory or a name on the Hub.
        store_dir: directory of the store: missing, empty, or a store.
        preprocess: a function of a row's fields, or its name as "package.module:function", that returns the row to use, a list
            of rows, or None to leave it out.
        rename_columns: columns that are read under another name, each with that name, such as {"question": "prompt"}; renamed
            after `preprocess`.
        on_bad_row: what becomes of a row that is refused: `error`, or `skip`, which leaves it out, counts it by reason and
            lists it with its error in `dropped()`.
        max_bad_rows: share of the rows that `on_bad_row="skip"` may leave out.
        max_samples: as for `prepare`.
        max_prompt_len: longest prompt in tokens; no limit by default.
        on_overflow: what becomes of a row with a longer one: `drop` (left out and counted) or `error`.
        chat_template: a file of a chat template, or the name of one of the tokenizer's, in place of its own.
        chat_template_kwargs: arguments of the chat template for rows that do not give them.
        system_prompt: first message, of the role system, of messages that have none; a prompt that is text stays as it is.
        media: whether messages may have images, as `forge grpo` trains with them; a row with one is refused otherwise.
        seed: seed of `store.split` where it is given no other.
        shard: "3/16" prepares the third of sixteen equal parts of all rows, as `prepare` does; `merge` joins them.

    Raises:
        DataError: a file, or a row of it by `file:row`; no row with a prompt.
        TemplateError: rows of messages and no chat template, or one that does not use an argument of the row.
        TokenizerError: no tokenizer there, or one without offsets; or there are images, and the model has no processor of them.
        StoreError: `store_dir` holds something else, or cannot be written.
    """
    options = PromptOptions(
        max_prompt_len=max_prompt_len,
        on_overflow=on_overflow,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        rename_columns=rename_columns,
        on_bad_row=on_bad_row,
        max_bad_rows=max_bad_rows,
        max_samples=max_samples,
        media=media,
    )
    return prepare_questions(data_path, tokenizer, store_dir, options, question, preprocess=preprocess, seed=seed, shard=shard)


def prepare_questions(
    data_path: DataPath,
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    store_dir: str | os.PathLike[str],
    options: AnyOptions,
    read: ReadRow,
    *,
    preprocess: str | Callable[[dict[str, Any]], Any] | None,
    seed: int,
    shard: str | None,
) -> PromptStore:
    """Write what `read` makes of each row as a store in `store_dir`; see `prepare_prompts`."""
    check_whole("seed", seed)
    function = load_preprocess(preprocess)
    directory = checked_directory(store_dir)
    sources = whole = resolve(data_path, max_samples=options.max_samples)
    changes = SourceChanges(sources, RowChanges(function, options.rename_columns))
    part = Shard.parse(shard) if shard is not None else None
    loaded = as_tokenizer(tokenizer)
    if not isinstance(options, PairOptions):
        loaded = with_template(loaded, options.chat_template, options.chat_template_kwargs)
    check_own(sources, options, loaded)
    stamps = stamps_of(sources)
    inputs = fingerprint_of_inputs(sources, loaded, options, function, seed)
    if part is not None:
        sources, part = known_part(sources, part, inputs)
    remove_leftovers(directory)
    if (existing := reusable(PromptStore, directory, inputs, part, sources)) is not None:
        return existing
    with StoreWriter(directory) as writer:
        made = _PairWriter if isinstance(options, PairOptions) else _PromptWriter
        prompts = made(sources, writer, loaded, options)
        try:
            for number, source in enumerate(sources):
                of_source = partial(read, media=True, directory=source.directory) if options.media else read
                own = prompts.begin(source)
                if not isinstance(own, PairOptions) and own.system_prompt is not None:
                    of_source = partial(of_source, system_prompt=own.system_prompt)
                for rows in _batches(number, source, changes, own, of_source):
                    prompts.add(number, rows)
        except ForgeDataError as error:
            if writer.samples:
                name_remedy(error)
            raise
        if part is not None:
            _add_columns(whole, changes)
        changes.check()
        if part is None:
            prompts.check_bad_rows()
        check_stamps(sources, stamps)
        accounting = prompts.accounting()
        if not writer.samples and part is None:
            paths = ", ".join(source.path for source in sources[:3]) + (" and more" if len(sources) > 3 else "")
            too_long = set(accounting.dropped) <= {TOO_LONG, LONG_PROMPT}
            limit = "max_prompt_len" if isinstance(options, PromptOptions) else "max_seq_len"
            needs = f"raise {limit}" if too_long and accounting.dropped else _NEEDS[type(options)]
            raise DataError(f"{paths}: no prompt is left: {accounting}; {needs}")
        if not isinstance(options, PairOptions) and part is None:
            check_system_prompts(options.system_prompt, sources, prompts.conversations, prompts.kept)
        settings = {"tokenizer": loaded.name_or_path, **attrs.asdict(options)}
        settings |= {"preprocess": function.name if function is not None else None, "seed": seed}
        settings |= {"own": own} if (own := own_settings(whole)) else {}
        manifest = writer.finish(
            PROMPTS, prompts.files(), accounting, tokenizer=loaded, inputs=inputs, settings=settings, shard=part
        )
        try:
            writer.commit(manifest, None)
        except StoreError:
            # Several processes may prepare the same store at once, as ranks do; all of them use the one that is there.
            if (existing := reusable(PromptStore, directory, inputs, part, sources)) is None:
                raise
            return existing
    if accounting.dropped:
        _counts.warning("%s: %s", ", ".join(source.name for source in sources[:3]), accounting)
    return PromptStore.open(directory)


class _Row(NamedTuple):
    """A row and its question: None where preprocess left it out, the error where it is refused."""

    row: int
    place: str
    question: Question | ForgeDataError | None


class _Tokens(NamedTuple):
    """Tokens of a question: of each of its texts, of which a prompt is one."""

    texts: list["NDArray[np.int32]"]
    media: tuple[Media, ...] = ()
    written: str | None = None
    """As `Asked.text`."""


class _Kept(NamedTuple):
    """What is written of a row."""

    row: int
    ids: "NDArray[np.int32]"
    record: bytes
    media: tuple[Media, ...]


class _PromptWriter:
    """Writes prompts, and counts what became of every row."""

    def __init__(
        self, sources: Sequence[Source], writer: StoreWriter, tokenizer: "PreTrainedTokenizerBase", options: AnyOptions
    ) -> None:
        self._sources, self._writer, self._tokenizer, self._of_run = sources, writer, tokenizer, options
        self._encoders: dict[str, PromptEncoder] = {}
        self._options, self._encoder = options, self._encoder_of({})
        self.conversations: set[int] = set()
        """Numbers of the sources with messages that a system prompt is for."""
        self._tokens_read = 0
        self._bad = BadRows()
        self._read: Counter[int] = Counter()
        self._dropped: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._prompts: Counter[int] = Counter()
        self._forms: Counter[str] = Counter()

    @property
    def kept(self) -> set[int]:
        """Numbers of the sources of which a row is kept."""
        return set(+self._prompts)

    def begin(self, source: Source) -> AnyOptions:
        """Take the settings of a source, whose rows come next, and return them."""
        self._options = source.own.over(self._of_run, source.path)
        self._encoder = self._encoder_of(source.own.chat_template_kwargs or {})
        return self._options

    def _encoder_of(self, arguments: Mapping[str, Any]) -> PromptEncoder:
        """Return the encoder with arguments of the chat template that an entry has of its own."""
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._encoders:
            options, asked = self._of_run, isinstance(self._of_run, PromptOptions)
            opening = isinstance(options, PromptOptions) or options.generation_prompt
            self._encoders[key] = PromptEncoder(
                with_template(self._tokenizer, None, arguments), whole=not asked, opening=opening
            )
        return self._encoders[key]

    def add(self, source: int, rows: list[_Row]) -> None:
        """Tokenise rows of one source, and write those that stay."""
        questions = [row.question for row in rows if isinstance(row.question, Question) and not row.question.empty]
        tokens: Iterator[_Tokens | ForgeDataError]
        try:
            tokens = iter(self._encode(questions))
        except ForgeDataError as error:
            # In order, so that of two faults the first row's is reported.
            tokens = encode_apart(self._encode, questions, error)
        kept: list[_Kept] = []
        dropped: list[Dropped] = []
        for row, place, asked in rows:
            self._read[source] += 1
            if asked is None:
                dropped.append(Dropped(row, PREPROCESS, 0))
                continue
            if isinstance(asked, ForgeDataError):
                dropped.append(self._refused(source, row, place, asked))
                continue
            made = next(tokens) if not asked.empty else _Tokens([np.zeros(0, dtype=np.int32)])
            try:
                if isinstance(made, ForgeDataError):
                    raise made
                texts = made.texts
                reason = self._reason(place, asked, texts)
            except ForgeDataError as error:
                if not self._options.skips(error):
                    of_a_row(error)
                    raise
                dropped.append(self._refused(source, row, place, error))
                continue
            number = sum(map(len, texts))
            self._tokens_read += number
            if reason is None:
                ids, record, media = self._kept(asked, made)
                self._lost[TRUNCATED] += number - len(ids)
                record = record if made.written is None else with_text(record, made.written)
                kept.append(_Kept(row, ids, record, media))
                prompted = not isinstance(self._options, PairOptions) and self._options.system_prompt is not None
                if prompted and isinstance(asked.prompt, Chat):
                    self._forms.update(system_form(asked.prompt))
                    self.conversations.add(source)
            else:
                dropped.append(Dropped(row, reason, number))
                self._lost[reason] += number
        self._write(source, kept, dropped)

    def accounting(self) -> Accounting:
        """Make the accounting, which checks that its numbers add up."""
        writer, lost = self._writer, {reason: count for reason, count in self._lost.items() if count}
        read = self._read.total()
        return Accounting(
            read, writer.samples, self._dropped, writer.samples, self._tokens_read, writer.tokens, lost, self._forms
        )

    def check_bad_rows(self) -> None:
        """Refuse more bad rows than may be left out.

        Raises:
            DataError: how many there are, by reason, and the first few.
        """
        self._bad.check(self._read.total(), self._of_run.max_bad_rows)

    def files(self) -> list[SourceFile]:
        """List the sources as the store names them."""
        return [
            SourceFile(
                each.name,
                each.origin,
                self._prompts[number],
                each.group,
                each.weight,
                each.indexed,
                read=self._read[number],
                kept=self._prompts[number],
                directory=each.directory,
            )
            for number, each in enumerate(self._sources)
        ]

    def _refused(self, source: int, row: int, place: str, error: ForgeDataError) -> Dropped:
        reason = reason_of(error, refused(Where(self._sources[source].name, row, place), error))
        self._bad.add(reason, str(error))
        return Dropped(row, reason, 0, str(error))

    def _encode(self, questions: Sequence[Question]) -> list[_Tokens]:
        """Tokenise questions, in order."""
        return [_Tokens([ids], media, text) for ids, media, text in self._encoder.encode_with_media(questions)]

    def _kept(self, asked: Question, made: _Tokens) -> tuple["NDArray[np.int32]", bytes, tuple[Media, ...]]:
        """Return what is written of a question: tokens, record and media."""
        (ids,), limit = made.texts, self._options.limit
        if limit is None or len(ids) <= limit:
            return ids, asked.record, made.media
        # Up to a medium that would be cut.
        stop = next((medium.start for medium in made.media if medium.start < limit < medium.stop), limit)
        return ids[:stop], asked.record, tuple(medium for medium in made.media if medium.stop <= stop)

    def _check_cut(self, place: str, asked: Question) -> None:
        """Refuse to cut messages of which an embedding is made."""
        texts = asked.prompt if isinstance(asked.prompt, tuple) else (asked.prompt,) if self._as_messages else ()
        if any(isinstance(text, Chat) for text in texts):
            raise DataError(
                f"{place}: a text of more than `max_seq_len` ({self._options.limit}) tokens is of messages, which the chat "
                "template ends, and cannot be cut; set `on_overflow` to drop, or raise it"
            )

    @property
    def _as_messages(self) -> bool:
        return not isinstance(self._options, PromptOptions) and self._options.as_messages

    def _reason(self, place: str, asked: Question, texts: list["NDArray[np.int32]"]) -> str | None:
        limit, of_texts = self._options.limit, not isinstance(self._options, PromptOptions)
        longest = max(map(len, texts))
        if not min(map(len, texts)):
            return EMPTY_PROMPT
        if limit is None or longest <= limit:
            return None
        if self._options.on_overflow == "error":
            raise DataError(
                f"{place}: the {'text' if of_texts else 'prompt'} has {longest} tokens, and "
                f"`{'max_seq_len' if of_texts else 'max_prompt_len'}` is {limit}; raise it, shorten the row, or leave such "
                "rows out by setting `on_overflow` to drop"
            )
        if self._options.on_overflow == "truncate":
            self._check_cut(place, asked)
            return None
        return TOO_LONG if of_texts else LONG_PROMPT

    def _write(self, source: int, kept: list[_Kept], dropped: list[Dropped]) -> None:
        if kept:
            rows, ids, records, media = zip(*kept, strict=True)
            self._writer.add(
                {
                    "input_ids.bin": np.concatenate(ids),
                    "offsets.bin": np.array([len(each) for each in ids], dtype=np.int64),
                    "rows.bin": np.array(rows, dtype=np.int64),
                    "records.bin": np.frombuffer(b"".join(records), dtype=np.uint8),
                    "record_offsets.bin": np.array([len(each) for each in records], dtype=np.int64),
                    **(arrays_of_media(media) if any(media) else {}),
                }
            )
            self._prompts[source] += len(kept)
        if dropped:
            file = self._sources[source]
            self._writer.drop(file.name, dropped, indexed=file.indexed)
            self._dropped.update(each.reason for each in dropped)


class _PairWriter(_PromptWriter):
    """Writes queries with their documents, one text after another, and the length of each."""

    def _encode(self, questions: Sequence[Question]) -> list[_Tokens]:
        return [
            _Tokens([asked.ids for asked in texts], _moved(texts) if any(asked.media for asked in texts) else ())
            for texts in self._encoder.encode_texts(questions)
        ]

    def _kept(self, asked: Question, made: _Tokens) -> tuple["NDArray[np.int32]", bytes, tuple[Media, ...]]:
        texts, limit = made.texts, self._options.limit
        if limit is not None and max(map(len, texts)) > limit:
            (cut,) = self._encoder.encode_texts([asked], limit)
            texts = [text.ids for text in cut]
        return np.concatenate(texts), with_lengths(asked.record, [len(ids) for ids in texts]), made.media


def _moved(texts: Sequence[Asked]) -> tuple[Media, ...]:
    """Return the media of texts by their tokens among those of all, one text after another."""
    starts = np.cumsum([0, *(len(asked.ids) for asked in texts)]).tolist()
    return tuple(
        attrs.evolve(medium, start=medium.start + start, stop=medium.stop + start)
        for start, asked in zip(starts, texts, strict=False)
        for medium in asked.media
    )


def _add_columns(whole: Sequence[Source], changes: SourceChanges) -> None:
    """Add the columns of all rows, where a part lacks one that is to be renamed."""
    for number, source in enumerate(whole):
        # A row of another part that is refused is refused there.
        for record in source.records(lambda *_: None):
            if changes.complete:
                return
            with contextlib.suppress(ForgeDataError):
                changes(number, record.place, record.fields)


def _batches(number: int, source: Source, changes: SourceChanges, options: AnyOptions, read: ReadRow) -> Iterator[list[_Row]]:
    """Read the rows of a source, some at a time."""
    rows: list[_Row] = []
    size = 0

    def leave_out(row: int, error: ForgeDataError) -> None:
        rows.append(_Row(row, source.place(row), error))

    skips = options.on_bad_row == "skip"
    try:
        for record in source.records(leave_out if skips else refuse):
            try:
                rows += _rows_of(record, partial(changes, number), read)
            except ForgeDataError as error:
                (leave_out if skips else refuse)(record.row, error)
            size += record.size
            if len(rows) >= _ROWS or size >= _BYTES:
                yield rows
                rows, size = [], 0
    except ForgeDataError:
        # Errors of rows before this one count first.
        yield rows
        raise
    if rows:
        yield rows


def _rows_of(record: Record, changes: Callable[[str, dict[str, Any]], list[dict[str, Any]]], read: ReadRow) -> list[_Row]:
    made = changes(record.place, record.fields)
    if not made:
        return [_Row(record.row, record.place, None)]
    return [_Row(record.row, record.place, read(record.place, fields)) for fields in made]
