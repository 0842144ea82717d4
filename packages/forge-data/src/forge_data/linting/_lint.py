"""Rows or a token store → report of what would train a model wrongly."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from forge_data._errors import DataError, ForgeDataError
from forge_data._options import Options
from forge_data._paths import expand_user
from forge_data._settings import MAX_BAD_ROWS
from forge_data.findings._finding import Finding
from forge_data.findings._report import Findings, LintReport
from forge_data.findings._rules import SET_RULES, Where
from forge_data.linting._dataset import duplicates, extreme_lengths, outliers, overlap
from forge_data.linting._lost import REASONS, lost_to_length
from forge_data.linting._row import RowLint
from forge_data.linting._sample_table import SampleTable
from forge_data.linting._tokens import TokenLint
from forge_data.reading._record import place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forge_data.linting._rows import DataLint
    from forge_data.reading._sources import DataPath
    from forge_data.store._token_store import TokenStore

__all__ = ["Finding", "Findings", "LintReport", "RowLint", "lint", "store_findings"]


def lint(
    data_or_store: "DataPath | TokenStore",
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str] | None" = None,
    *,
    eval_data: "DataPath | TokenStore | None" = None,
    format: str = "auto",  # noqa: A002 - what it is called everywhere else
    train_on: str = "assistant",
    turns: str = "auto",
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    turn_end: str | None = None,
    train_on_turn_end: str = "turn",
    max_seq_len: int | None = None,
    on_overflow: str = "drop",
    on_bad_pair: str = "error",
    preprocess: str | Callable[[dict[str, Any]], Any] | None = None,
    rename_columns: Mapping[str, str] | None = None,
    on_bad_row: str = "error",
    max_bad_rows: float = MAX_BAD_ROWS,
    max_samples: int | None = None,
    media: bool = False,
) -> LintReport:
    """Find what would train a model wrongly, or make an evaluation misleading.

    Rows are read as `prepare` reads them, but past those that it refuses: each is a finding. A store brings what was found when
    it was prepared; the rules about the whole set run anew, so a view (`select`, `split`) has its own findings.

    Args:
        data_or_store: rows, named as for `prepare`, or a token store.
        tokenizer: a loaded tokenizer, a directory or a name on the Hub; a store has its own.
        eval_data: held-out rows or their store; those that are also trained on are found.
        format: as for `prepare`; for rows.
        train_on: as for `prepare`; for rows.
        turns: as for `prepare`; for rows.
        chat_template: as for `prepare`; for rows.
        chat_template_kwargs: as for `prepare`; for rows.
        system_prompt: as for `prepare`; for rows.
        turn_end: as for `prepare`; for rows.
        train_on_turn_end: as for `prepare`; for rows.
        max_seq_len: as for `prepare`; for rows.
        on_overflow: as for `prepare`; for rows.
        on_bad_pair: as for `prepare`; for rows.
        preprocess: as for `prepare`; for rows.
        rename_columns: as for `prepare`; for rows.
        on_bad_row: as for `prepare`; for rows.
        max_bad_rows: as for `prepare`; for rows.
        max_samples: as for `prepare`; for rows, held-out ones too.
        media: as for `prepare`; for rows.

    Returns:
        The findings, each with file, row, field and remedy.

    Raises:
        DataError: data that cannot be read at all, rows without a tokenizer, or an argument for rows where there are none.
        TokenizerError: no tokenizer there, or one without offsets.
        StoreError: no store, or a torn one.
    """
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

    options = Options(
        format=format,
        train_on=train_on,
        turns=turns,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        turn_end=turn_end,
        train_on_turn_end=train_on_turn_end,
        max_seq_len=max_seq_len,
        on_overflow=on_overflow,
        on_bad_pair=on_bad_pair,
        rename_columns=rename_columns,
        on_bad_row=on_bad_row,
        max_bad_rows=max_bad_rows,
        max_samples=max_samples,
        media=media,
    )
    findings = Findings()
    if isinstance(data_or_store, PromptStore):
        raise DataError(f"{data_or_store.path} is a store of prompts: nothing of them is learned, so there is nothing to lint")
    if isinstance(data_or_store, TokenStore):
        if eval_data is None or isinstance(eval_data, TokenStore):
            _check_defaults(data_or_store, options, preprocess)
        rows = data_or_store.accounting.read
        table = _of_store(data_or_store, tokenizer, findings)
        if tokenizer is None and eval_data is not None and not isinstance(eval_data, TokenStore):
            tokenizer = _own_tokenizer(data_or_store)
    else:
        read = _of_rows(data_or_store, tokenizer, options, preprocess)
        findings, rows, table = read.findings, read.rows, read.table()
        findings.add(read.lost())
        findings.add(read.too_many_refused())
        findings.add(_of_table(table))
    if eval_data is not None:
        findings.add(overlap(table, _eval_table(eval_data, tokenizer, options, preprocess)))
    return findings.report(rows)


def _check_defaults(store: "TokenStore", options: Options, preprocess: object) -> None:
    """Refuse arguments for rows where there are none, since they would have no effect.

    Raises:
        DataError: naming the first.
    """
    given = attrs.asdict(options) | {"preprocess": preprocess}
    for name, default in (attrs.asdict(Options()) | {"preprocess": None}).items():
        if given[name] != default:
            raise DataError(
                f"`{name}` is for rows, and {store.path} is a token store, which was prepared already; leave it out, or lint "
                "the rows with it"
            )


def store_findings(store: "TokenStore") -> Iterator[Finding]:
    """Find duplicates, outliers and tokens lost to `max_seq_len` in a store."""
    yield from _of_table(SampleTable.of(store))
    yield from _lost(store)


def _of_table(table: SampleTable) -> Iterator[Finding]:
    yield from duplicates(table)
    yield from outliers(table)
    yield from extreme_lengths(table)


def _of_store(store: "TokenStore", tokenizer: Any, findings: Findings) -> SampleTable:
    findings.resume(store.lint, without=SET_RULES)
    table = SampleTable.of(store)
    findings.add(_of_table(table))
    findings.add(_lost(store))
    # A store of token ids was made without a tokenizer, so its ids were not linted.
    if tokenizer is not None and _own_tokenizer(store) is None:
        findings.add(_of_tokens(store, tokenizer))
    return table


def _of_tokens(store: "TokenStore", tokenizer: Any) -> Iterator[Finding]:
    from forge_data.tokenizing._tokenizer import as_tokenizer

    rules = TokenLint(as_tokenizer(tokenizer))
    for index, example in enumerate(store):
        yield from rules.example(Where.of(store.source(index)), "input_ids", example, tokens=True)


def _lost(store: "TokenStore") -> Iterator[Finding]:
    accounting = store.accounting
    if not any(reason in accounting.tokens_lost for reason in REASONS):
        return
    rows = (row for row in store.dropped() if row["reason"] in REASONS)
    longest = max(rows, key=lambda row: row["tokens"], default=None)
    first = Where.of(store.source(0))
    where = None
    if longest:
        indexed = first.file == longest["file"] and first.place.endswith("]")
        where = Where(longest["file"], longest["row"], place_of(longest["file"], longest["row"], indexed=indexed))
    yield from lost_to_length(
        accounting.tokens_read, accounting.tokens_lost, where, longest["tokens"] if longest else 0, first.file
    )


def _of_rows(data: "DataPath", tokenizer: Any, options: Options, preprocess: Any, name: str = "data_path") -> "DataLint":
    from forge_data.formats._registry import check_name
    from forge_data.linting._readings import check_own
    from forge_data.linting._rows import DataLint
    from forge_data.reading._preprocess import load_preprocess
    from forge_data.reading._row_changes import RowChanges
    from forge_data.reading._sources import resolve
    from forge_data.tokenizing._chat_template import with_template
    from forge_data.tokenizing._tokenizer import as_tokenizer

    check_name(options.format)
    if tokenizer is None:
        if isinstance(data, str) and expand_user(data, DataError).is_file():
            resolve(data)  # what holds no rows needs no tokenizer
        raise DataError("rows are linted as a tokenizer sees them; give a `tokenizer`")
    chosen = with_template(as_tokenizer(tokenizer), options.chat_template, options.chat_template_kwargs)
    changes = RowChanges(load_preprocess(preprocess), options.rename_columns)
    sources = resolve(data, name, max_samples=options.max_samples)
    check_own(sources, options, chosen)
    read = DataLint(chosen, options, sources, changes)
    read.read()
    return read


def _eval_table(data: "DataPath | TokenStore", tokenizer: Any, options: Options, preprocess: Any) -> SampleTable:
    from forge_data.store._token_store import TokenStore

    if isinstance(data, TokenStore):
        return SampleTable.of(data)
    return _of_rows(data, tokenizer, options, preprocess, "eval_data").table()


def _own_tokenizer(store: "TokenStore") -> "PreTrainedTokenizerBase | None":
    try:
        return store.tokenizer()
    except ForgeDataError:
        return None
