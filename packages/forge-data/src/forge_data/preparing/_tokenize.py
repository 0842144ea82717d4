"""One row, in memory → one example."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from forge_data._errors import DataError
from forge_data._example import TokenizedExample
from forge_data._formats import AUTO, BUILT_IN
from forge_data._options import ON_OVERFLOW, Options
from forge_data._values import describe
from forge_data.formats._registry import check_name, convert, detect, formats
from forge_data.reading._memory import plain_values
from forge_data.reading._preprocess import load_preprocess
from forge_data.reading._row_changes import RowChanges
from forge_data.tokenizing._kept_encoders import kept_encoder, known_encoder
from forge_data.tokenizing._overflow import fit
from forge_data.tokenizing._tokenizer import as_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE, _MESSAGES = "row", "messages"


def tokenize(
    row: Mapping[str, Any],
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    *,
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
    preprocess: str | Callable[[dict[str, Any]], Any] | None = None,
    rename_columns: Mapping[str, str] | None = None,
    media: bool = False,
) -> TokenizedExample:
    """Tokenise one row, in any format that `prepare` reads.

    The ids are those of the tokenizer's own chat template; assistant turns are learned, their turn-end token included. A row
    that `prepare` would leave out, or that would become several samples, is refused with the reason. With a loaded tokenizer
    the next rows are quicker: what was made of it is kept, until its template or its tokens change.

    Raises:
        DataError: no known format, a field that is wrong, no token that is learned, more than `max_seq_len` tokens.
        TemplateError: no chat template, or one that leaves open which tokens the assistant wrote.
        TokenizerError: no tokenizer there, or one without offsets.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"row is {describe(row)}; it must be one row, a mapping of its fields; prepare takes many rows")
    if chat_template is chat_template_kwargs is system_prompt is preprocess is rename_columns is None and format in (
        AUTO,
        _MESSAGES,
    ):
        example = _known(row, tokenizer, format, (train_on, turns, turn_end, train_on_turn_end))
        if example is not None and _fits(example, max_seq_len, on_overflow):
            return example
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
        rename_columns=rename_columns,
        media=media,
    )
    check_name(format)
    changes = RowChanges(load_preprocess(preprocess), options.rename_columns)
    encoder = kept_encoder(as_tokenizer(tokenizer), options)
    fields = {name: plain_values(value) for name, value in row.items() if value is not None}
    columns: set[str] = set()
    made = changes(_PLACE, fields, columns)
    if len(made) != 1:
        raise DataError(f"{_PLACE}: `preprocess` returned {len(made)} rows; tokenize makes one sample of one row")
    changes.check(columns)
    (fields,) = made
    name = detect(_PLACE, fields) if options.format == AUTO else options.format
    sample = convert(
        name,
        _PLACE,
        fields,
        encoder.vocabulary,
        media=media,
        directory=os.getcwd(),
        system_prompt=options.system_prompt,
    )
    (encoded,) = encoder.encode([sample])
    if encoded.pair:
        raise DataError(
            f"{_PLACE}: a row of {name} becomes two samples, chosen and rejected; prepare makes both, or give each side as "
            "prompt and completion"
        )
    if len(encoded.examples) > 1:
        raise DataError(
            f"{_PLACE}: it becomes {len(encoded.examples)} samples, one for each learned turn, since the chat template writes "
            "a turn otherwise once others follow; prepare makes them all, `train_on` set to last makes one"
        )
    # The only row cannot be left out for its length.
    strict = attrs.evolve(options, on_overflow="error") if options.on_overflow == "drop" else options
    fitted = fit(_PLACE, encoded, strict)
    if not fitted.kept:
        raise DataError(
            f"{_PLACE}: no token of it is learned{_within(fitted.reason, options)}; it needs an assistant turn, a completion, "
            "or labels that are not -100"
        )
    if len(fitted.kept) > 1:
        raise DataError(f"{_PLACE}: it becomes {len(fitted.kept)} samples of {max_seq_len} tokens; prepare makes them all")
    return fitted.kept[0]


def _known(
    row: Mapping[str, Any],
    tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]",
    format: str,  # noqa: A002 - as above
    learned: tuple[Any, Any, Any, Any],
) -> TokenizedExample | None:
    """Tokenise a row of plain messages with known roles; None where it must be looked at."""
    if type(row) is not dict or row.keys() != {_MESSAGES} or type(row[_MESSAGES]) is not list:
        return None
    # A format of another package may claim the row.
    if (format == AUTO and len(formats()) > len(BUILT_IN)) or not all(isinstance(each, (str, type(None))) for each in learned):
        return None
    encoder = None if isinstance(tokenizer, (str, os.PathLike)) else known_encoder(tokenizer, *learned)
    return None if encoder is None else encoder.encode_known(row[_MESSAGES])


def _fits(example: TokenizedExample, max_seq_len: object, on_overflow: object) -> bool:
    """Tell whether an example is not too long, and something of it is learned."""
    limited = max_seq_len is not None and not (type(max_seq_len) is int and len(example) <= max_seq_len)
    return not limited and on_overflow in ON_OVERFLOW and example.loss_count > 0


def _within(reason: str | None, options: Options) -> str:
    return f" within `max_seq_len` ({options.max_seq_len} tokens)" if reason and reason.endswith("max_seq_len") else ""
