"""Where the assistant's text stands in a rendered conversation to which tokens are learned.

The ids are never touched: spans are characters, tokens say which characters they stand for, and this file lays the one
over the other.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Span(NamedTuple):
    """One learned stretch of a text, in characters of it."""

    start: int
    """Where the header ends and the model takes over."""

    content: int
    """The first character of what was said; between start and here stands what the template sets before it."""

    content_end: int
    """One past the last character of what was said."""

    closing_end: int
    """One past the last character that is no blank: where a turn end written in plain text ends."""

    stop: int
    """One past the last character that the template writes for this turn."""

    @classmethod
    def plain(cls, start: int, stop: int) -> "Span":
        """A stretch that is learned from one end to the other."""
        return cls(start, start, stop, stop, stop)


def trained_tokens(offsets: "NDArray[np.int64]", spans: Iterable[Span], added: "NDArray[np.bool_]") -> "NDArray[np.bool_]":
    """bool[S]: the tokens that are learned.

    The turn end is the last added token after the content (`<|im_end|>`, `<end_of_turn>`, `</s>`, EOS or not); where
    there is none, the non-blank text that closes the turn. A token that begins in the header is learned if it holds a
    character of the content, unless it is a special token that swallowed blanks.

    Args:
        offsets: int64[S, 2], the characters [a, b) that each token stands for.
        spans: the learned stretches.
        added: bool[S], true for special and added tokens that are not blank.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    trained = np.zeros(len(offsets), dtype=np.bool_)
    closings = np.flatnonzero(added)
    closing_begins = begins[closings].tolist()
    for span in spans:
        last = bisect_left(closing_begins, span.stop) - 1
        closed = last >= 0 and ends[closings[last]] > span.content_end
        stop = ends[closings[last]] if closed else span.closing_end
        # A token that the tokenizer put in of itself stands for no character, and goes with the text after it.
        inside = (ends > span.start) & (begins < stop)
        trained |= inside & ((begins >= span.start) | ~(added | (ends <= span.content)))
    return trained


def trained_in_order(
    offsets: "NDArray[np.int64]", spans: Sequence[Span], added: "NDArray[np.bool_]", first_tokens: Sequence[int]
) -> "NDArray[np.bool_]":
    """bool[T]: what `trained_tokens` says of each of many texts, all at once.

    Args:
        offsets: int64[T, 2], as of `trained_tokens`, text after text, no two of which share a place; neither begins nor ends
            ever go back.
        spans: the learned stretches, in the same places.
        added: bool[T], true for special and added tokens that are not blank.
        first_tokens: of each span, the first token of its text.
    """
    trained = np.zeros(len(offsets), dtype=np.bool_)
    if not spans or not len(offsets):
        return trained
    begins, ends = np.ascontiguousarray(offsets[:, 0]), np.ascontiguousarray(offsets[:, 1])
    start, content, content_end, closing_end, stop = np.array(spans, dtype=np.int64).T
    closings = np.flatnonzero(added)
    if len(closings):
        last = np.searchsorted(begins[closings], stop) - 1
        closing = closings[last]
        closed = (last >= 0) & (closing >= np.asarray(first_tokens)) & (ends[closing] > content_end)
        closing_end = np.where(closed, ends[closing], closing_end)
    first = np.searchsorted(ends, start, side="right")
    inner = np.maximum(first, np.searchsorted(begins, start))
    after = np.searchsorted(begins, closing_end)
    turns = np.zeros(len(offsets) + 1, dtype=np.int64)
    whole = after > inner
    np.add.at(turns, inner[whole], 1)
    np.add.at(turns, after[whole], -1)
    trained = np.cumsum(turns[:-1]) > 0
    for span in np.flatnonzero(inner > first).tolist():
        over = slice(first[span], min(inner[span], after[span]))
        trained[over] |= ~(added[over] | (ends[over] <= content[span]))
    return trained
