"""Where the assistant's text stands in a rendered conversation to which tokens are learned.

The ids are never touched: spans are characters, tokens say which characters they stand for, and this file lays the one
over the other.
"""

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
    empty = begins == ends
    trained = np.zeros(len(offsets), dtype=np.bool_)
    for span in spans:
        closings = np.flatnonzero(added & (ends > span.content_end) & (begins < span.stop))
        stop = int(ends[closings[-1]]) if len(closings) else span.closing_end
        # An empty token is one that the tokenizer put in of itself; it goes with the text after it.
        inside = np.where(empty, begins > span.start, ends > span.start) & (begins < stop)
        straddling = ~empty & (begins < span.start)
        trained |= inside & ~(straddling & (added | (ends <= span.content)))
    return trained
