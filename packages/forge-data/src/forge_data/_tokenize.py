"""One row, in memory, to one example."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_data._encode import Encoder
from forge_data._errors import DataError
from forge_data._example import TokenizedExample
from forge_data._samples import parse, shape_of
from forge_data._tokenizer import as_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize(
    row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str]", *, max_seq_len: int | None = None
) -> TokenizedExample:
    """The tokens and labels of one row: `messages`, `prompt` and `completion`, or `input_ids` and `labels`.

    The ids are those of the tokenizer's own chat template; assistant turns are learned, their turn-end token included.

    Raises:
        DataError: no known shape, a field that is wrong, no token that is learned, more than `max_seq_len` tokens.
        TemplateError: no chat template, or one that leaves open which tokens the assistant wrote.
        TokenizerError: no tokenizer there, or one without offsets.
    """
    check_max_seq_len(max_seq_len)
    encoder = Encoder(as_tokenizer(tokenizer))
    fields = {name: value for name, value in row.items() if value is not None}
    sample = parse(shape_of("row", fields), "row", fields, encoder.vocabulary)
    (example,) = encoder.encode([sample])
    if not example.loss_count:
        raise DataError("row: no token of it is learned; it needs an assistant turn, a completion, or labels that are not -100")
    if max_seq_len is not None and len(example) > max_seq_len:
        raise DataError(f"row: {len(example)} tokens, and max_seq_len is {max_seq_len}; raise it or shorten the row")
    return example


def check_max_seq_len(max_seq_len: object) -> None:
    """Refuse a limit that is no positive whole number.

    Raises:
        DataError: naming the value.
    """
    if max_seq_len is not None and (isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 1):
        raise DataError(f"max_seq_len must be a whole number of at least 1, or None for no limit; got {max_seq_len!r}")
