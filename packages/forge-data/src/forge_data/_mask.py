"""Where the assistant's text stands in a rendered conversation to which tokens are learned.

The ids are never touched: spans are characters, tokens say which characters they stand for, and this file lays the one
over the other.
"""

from bisect import bisect_left
from collections.abc import Iterable
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
