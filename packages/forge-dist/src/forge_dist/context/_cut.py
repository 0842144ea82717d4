"""Cut of a packed row over ranks: the tokens of each, and the keys that their queries see.

A row of T tokens is cut into 2 R chunks, of which rank r has those numbered r and 2 R - 1 - r: a token sees the ones before it,
so early chunks have little to attend to and late ones much, and each rank has as much work as the others. A cut may fall on any
token: the part of a document in a chunk is a piece, and its queries see the keys of the document up to the piece's last token.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs
import torch


@attrs.frozen(kw_only=True, eq=False)
class Cut:
    """One rank's part of a packed row of T tokens, t of which are its own.

    What the ranks gather is laid out rank after rank, each with `longest` places, the last of which may be empty.
    """

    mine: torch.Tensor
    """int64[t]: positions in the row, chunk after chunk."""
    order: torch.Tensor
    """int64[T]: place of each position of the row in what is gathered."""
    longest: int
    """Most tokens of one rank."""
    queries: tuple[int, ...]
    """Where the pieces end among the rank's own tokens, from 0 to t."""
    keys: tuple[int, ...]
    """Where the keys of the pieces end in `seen`, from 0."""
    seen: tuple[torch.Tensor, ...]
    """int64: for each chunk the places of the keys that its pieces see, piece after piece."""

    @property
    def longest_queries(self) -> int:
        """Most queries of one piece."""
        return max(stop - start for start, stop in pairwise(self.queries))

    @property
    def longest_keys(self) -> int:
        """Most keys of one piece."""
        return max(stop - start for start, stop in pairwise(self.keys))


def chunks(tokens: int, ranks: int, rank: int) -> list[range]:
    """Return the two chunks of a rank, as positions.

    >>> [chunks(17, 2, rank) for rank in range(2)]
    [[range(0, 4), range(12, 17)], [range(4, 8), range(8, 12)]]
    """
    ends = [number * tokens // (2 * ranks) for number in range(2 * ranks + 1)]
    return [range(ends[number], ends[number + 1]) for number in (rank, 2 * ranks - 1 - rank)]


def cut_row(
    ends: Sequence[int],
    *,
    ranks: int,
    rank: int,
    key_ends: Sequence[int] | None = None,
    kv_rows: torch.Tensor | None = None,
) -> Cut:
    """Cut a packed row for one of several ranks.

    Args:
        ends: where documents begin, and T: cu_seq_lens_q. T is at least 2 R.
        ranks: R.
        rank: whose part it is.
        key_ends: cu_seq_lens_k, with `kv_rows`.
        kv_rows: int64[Tk] on the CPU: positions whose keys each document sees, its last query the last of them; None: its own.
    """
    tokens = ends[-1]
    parts = [
        torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks(tokens, ranks, each)]) for each in range(ranks)
    ]
    longest = max(map(len, parts))
    order = torch.empty(tokens, dtype=torch.int64)
    for each, positions in enumerate(parts):
        order[positions] = torch.arange(len(positions)) + each * longest
    queries, sizes, seen = [], [], []
    for chunk in chunks(tokens, ranks, rank):
        keys = []
        for document, (start, stop) in enumerate(pairwise(ends)):
            first, last = max(start, chunk.start), min(stop, chunk.stop)
            if first >= last:
                continue
            if kv_rows is None or key_ends is None:
                rows = torch.arange(start, last)
            else:
                # The last query of a document is at its last key.
                rows = kv_rows[key_ends[document] : key_ends[document + 1] - (stop - last)]
            queries.append(last - first)
            sizes.append(len(rows))
            keys.append(rows)
        if keys:
            seen.append(order[torch.cat(keys)])
    return Cut(
        mine=parts[rank],
        order=order,
        longest=longest,
        queries=tuple(accumulate(queries, initial=0)),
        keys=tuple(accumulate(sizes, initial=0)),
        seen=tuple(seen),
    )
