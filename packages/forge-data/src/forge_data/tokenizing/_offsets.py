"""Offsets that a tokenizer reports → offsets with the white space at the ends of tokens.

A byte-level tokenizer with `trim_offsets` (GPT-2, RoBERTa, Llama-3) reports a token without its leading and trailing blanks,
and a token of blanks alone as an empty place where they end. A mask over such places would lose the indentation that an answer
begins with, so what was trimmed is put back.
"""

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_BLANK = "\u0120"
"""Letter of byte-level vocabularies that stands for a space."""
_PROBE = "a  \n  b c"


class Offsets:
    """Character offsets of tokens, for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def of(self, ids: "NDArray[np.int32]", reported: list[list[tuple[int, int]]]) -> "NDArray[np.int64]":
        """Return int64[T, 2]: token t stands for the characters [a, b) of its text.

        Args:
            ids: int32[T], tokens of several texts, text after text.
            reported: offsets of each token by text, as the tokenizer reports them.
        """
        flat = chain.from_iterable(chain.from_iterable(reported))
        offsets = np.fromiter(flat, dtype=np.int64, count=2 * len(ids)).reshape(-1, 2)
        if not self._trims or not len(ids):
            return offsets
        leading, trailing = self._blanks
        begins, ends = offsets[:, 0], offsets[:, 1]
        first = np.maximum(begins - leading[ids], 0)
        # A token of blanks alone is left as an empty place where they end, or one before that at the very beginning.
        last = np.where(begins == ends, np.maximum(ends, first + leading[ids]), ends + trailing[ids])
        return np.stack([first, last], axis=1)

    @cached_property
    def _trims(self) -> bool:
        """Whether white space is missing from the places that are reported."""
        probe = self._tokenizer(_PROBE, add_special_tokens=False, return_offsets_mapping=True)
        tokens = self._tokenizer.convert_ids_to_tokens(probe["input_ids"])
        places = probe["offset_mapping"]
        return any(
            token.startswith(_BLANK) and (begin == end or not _PROBE[begin].isspace())
            for token, (begin, end) in zip(tokens, places, strict=True)
        )

    @cached_property
    def _blanks(self) -> tuple["NDArray[np.int64]", "NDArray[np.int64]"]:
        """int64[V] twice: number of blanks that each token of the vocabulary begins and ends with."""
        tokens = [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(range(len(self._tokenizer))))]
        # The tokenizer trims these two: the letter for a blank, and whatever is white space as it stands.
        leading = [len(token) - len(_lstripped(token)) for token in tokens]
        trailing = [len(token) - len(_lstripped(token[::-1])) for token in tokens]
        return np.array(leading, dtype=np.int64), np.array(trailing, dtype=np.int64)


def _lstripped(token: str) -> str:
    place = 0
    while place < len(token) and (token[place] == _BLANK or token[place].isspace()):
        place += 1
    return token[place:]
