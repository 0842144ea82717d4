"""Character spans that are learned → mask of the tokens that are learned.

The ids are never changed: spans are characters, and each token stands for certain characters.
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
    """End of the header, where the model takes over."""

    content: int
    """First character of the content; between `start` and here is what the template writes before it."""

    content_end: int
    """One past the last character of the content."""

    closing_end: int
    """One past the last character that is not blank: the end of a turn end written in plain text."""

    stop: int
    """One past the last character that the template writes for this turn."""

    @classmethod
    def plain(cls, start: int, stop: int) -> "Span":
        """Make a stretch that is learned from one end to the other."""
        return cls(start, start, stop, stop, stop)


def trained_tokens(offsets: "NDArray[np.int64]", spans: Iterable[Span], added: "NDArray[np.bool_]") -> "NDArray[np.bool_]":
    """Mark the tokens that are learned: bool[S].

    The turn end is the last added token after the content (`<|im_end|>`, `<end_of_turn>`, `</s>`, EOS or not); where there is
    none, the non-blank text that closes the turn. A token that begins in the header is learned if it holds a character of the
    content, unless it is a special token that took blanks along.

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
    """Mark the learned tokens of many texts at once, as `trained_tokens` does for one: bool[T].

    Args:
        offsets: int64[T, 2], as for `trained_tokens`, text after text, at places that no two texts share; neither begins nor
            ends ever decrease.
        spans: the learned stretches, at the same places.
        added: bool[T], true for special and added tokens that are not blank.
        first_tokens: for each span, the first token of its text.
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
