"""Blocks for pretraining: documents → blocks of at most `block_size` tokens, no padding."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import overload

import attrs
import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array, checked_integer, sample_lengths
from forge_packing._errors import PackingError

_MOST = 2**52
"""The most tokens of all documents together: positions in them are int64."""

Span = tuple[int, int, int]
"""(document, start, stop): tokens start to stop-1 of one document."""


@attrs.frozen(eq=False, repr=False)
class Blocks(Sequence[list[Span]]):
    """Sequence of blocks; `blocks[i]` is a list of spans `(document, start, stop)`."""

    document: Int64Array
    """int64[P]: the document of each span, block after block."""
    start: Int64Array
    """int64[P]: its first token."""
    stop: Int64Array
    """int64[P]: the token after its last."""
    block_starts: Int64Array
    """int64[blocks+1]: the first span of each block, and P at the end."""
    cross_documents: bool
    """True: a block is one sample, whose documents attend to each other. False: each span is a sample of its own."""

    @property
    def lengths(self) -> Int64Array:
        """int64[blocks]: tokens of each block, `plan`'s argument `lengths`."""
        return np.add.reduceat(self.stop - self.start, self.block_starts[:-1])

    @property
    def loss_counts(self) -> Int64Array:
        """int64[blocks]: predicted tokens of each block, `plan`'s argument `loss_counts`.

        All tokens but the first of each sample are predicted.
        """
        samples = np.ones(len(self), dtype=np.int64) if self.cross_documents else np.diff(self.block_starts)
        return self.lengths - samples

    def __len__(self) -> int:
        return self.block_starts.size - 1

    @overload
    def __getitem__(self, at: int) -> list[Span]: ...
    @overload
    def __getitem__(self, at: slice) -> list[list[Span]]: ...

    def __getitem__(self, at: int | slice) -> list[Span] | list[list[Span]]:
        places = range(len(self))[at]
        return [self._block(place) for place in places] if isinstance(places, range) else self._block(places)

    def __iter__(self) -> Iterator[list[Span]]:
        return (self._block(place) for place in range(len(self)))

    def __repr__(self) -> str:
        return f"Blocks({len(self):,} blocks of {self.document.size:,} spans)"

    def _block(self, at: int) -> list[Span]:
        these = slice(int(self.block_starts[at]), int(self.block_starts[at + 1]))
        return list(zip(self.document[these].tolist(), self.start[these].tolist(), self.stop[these].tolist(), strict=True))


def split_documents(lengths: npt.ArrayLike, block_size: int, *, cross_documents: bool = False) -> Blocks:
    """Cut documents, in their order, into blocks of at most `block_size` tokens.

    A piece that continues a document begins with the last token of the piece before, as context whose label does not count
    (`collate` masks the first label of every sample). So each token is the target of exactly one loss term, except a
    document's first, which no token precedes (with cross_documents, except the very first). Blocks are never padded: the last
    holds what is left, and another is a token short where that token could only be context.

    Args:
        lengths: N integers, the tokens of each document, its EOS included, each at least 1.
        block_size: Tokens of a block, at least 2.
        cross_documents: False makes each span a sample of its own, so that neither attention nor targets cross documents.
            True makes each block one sample, cut from all documents as one stream.

    Raises:
        PackingError: lengths or a size that cannot be used.


    >>> list(split_documents([5, 2, 4], block_size=4))
    [[(0, 0, 4)], [(0, 3, 5), (1, 0, 2)], [(2, 0, 4)]]
    >>> list(split_documents([5, 2, 4], block_size=4, cross_documents=True))
    [[(0, 0, 4)], [(0, 3, 5), (1, 0, 2)], [(1, 1, 2), (2, 0, 3)], [(2, 2, 4)]]
    """
    block_size = checked_integer("block_size", block_size, 2, MAX_TOKENS)
    lengths_N = sample_lengths(lengths, np.iinfo(np.int64).max, "block_size")
    total = float(lengths_N.sum(dtype=np.float64))  # float64, as int64 might overflow
    if total > _MOST:
        at = int(lengths_N.argmax())
        raise PackingError(
            f"the documents have {total:.3g} tokens in all, more than {_MOST:.3g}; the longest, {lengths_N[at]} tokens, is at "
            f"index {at}. lengths are counted in tokens"
        )
    return _stream(lengths_N, block_size) if cross_documents else _documents(lengths_N, block_size)


def _stream(lengths_N: Int64Array, block_size: int) -> Blocks:
    """Cut all documents as one stream.

    Each block begins with the last token of the block before.
    """
    ends = np.cumsum(lengths_N)
    total = int(ends[-1])
    begin = np.arange(0, max(total - 1, 1), block_size - 1, dtype=np.int64)
    end = np.minimum(begin + block_size, total)
    first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end, side="left")
    counts = last - first + 1
    block_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64, copy=False)
    document = np.arange(int(block_starts[-1]), dtype=np.int64) - np.repeat(block_starts[:-1] - first, counts)
    before = (ends - lengths_N)[document]
    start = np.maximum(np.repeat(begin, counts) - before, 0)
    stop = np.minimum(np.repeat(end, counts) - before, lengths_N[document])
    return Blocks(document, start, stop, block_starts, cross_documents=True)


def _documents(lengths_N: Int64Array, block_size: int) -> Blocks:
    """Cut documents so that none shares a sample with another.

    Each block holds the rest of a document that was cut, whole documents, and the beginning of one that is cut. The loop
    finds the whole documents of a block by bisection, and the blocks that one long document fills by division; `_spans` makes
    them spans, all at once.
    """
    lengths: list[int] = lengths_N.tolist()
    ends: list[int] = np.cumsum(lengths_N).tolist()
    n = len(lengths)
    step = block_size - 1  # a piece that continues a document repeats one token
    # First document, its start and stop, end of the whole documents, stop of the one cut after them, how many such blocks.
    rows: list[tuple[int, int, int, int, int, int]] = []
    document, cut = 0, 0  # the next token to be learned is this one of this document
    while document < n:
        room = block_size
        first, start, stop = document, 0, 0
        if cut:
            start = cut - 1
            # All but the last piece fill a block each: those with start + block_size below the length.
            filled = max(-((start + block_size - lengths[document]) // step), 0)
            if filled:
                rows.append((first, start, start + block_size, document, 0, filled))
                start += filled * step
            stop = lengths[document]
            room -= stop - start
            document += 1
        before = ends[document - 1] if document else 0
        whole = bisect_right(ends, before + room, lo=document)
        if whole > document:
            room -= ends[whole - 1] - before
        # With room for only one token nothing of the next document could be learned here.
        cut = room if whole < n and room >= 2 else 0
        rows.append((first, start, stop, whole, cut, 1))
        document = whole
    return _spans(np.array(rows, dtype=np.int64), step, lengths_N)


def _spans(rows: Int64Array, step: int, lengths_N: Int64Array) -> Blocks:
    """Expand the rows of `_documents` into spans.

    Consecutive documents form a block; only its first may begin late, only its last stop early.
    """
    alike = rows[:, 5]
    first, rest_start, rest_stop, whole, beginning, _ = np.repeat(rows, alike, axis=0).T
    further = (np.arange(first.size) - np.repeat(np.cumsum(alike) - alike, alike)) * step
    rest_start, rest_stop = rest_start + further, rest_stop + further
    has_rest = rest_stop > 0
    unfinished = has_rest & (whole == first)
    counts = whole - first + (beginning > 0) + unfinished
    block_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64, copy=False)
    document = np.arange(int(block_starts[-1]), dtype=np.int64) - np.repeat(block_starts[:-1] - first, counts)
    start, stop = np.zeros_like(document), lengths_N[document]
    at = block_starts[:-1][has_rest]
    start[at], stop[at] = rest_start[has_rest], rest_stop[has_rest]
    stop[block_starts[1:][beginning > 0] - 1] = beginning[beginning > 0]
    return Blocks(document, start, stop, block_starts, cross_documents=False)
