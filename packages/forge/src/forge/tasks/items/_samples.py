"""Token stores → single samples, or conversations whose turns are samples."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any, Self

import forge_data
import forge_packing
from forge._counted import counted, counted_are
from forge.tasks.items._items import Ints
from forge.tasks.items._media import MediaRows, media_in_words, media_row_of

IGNORED = -100
"""Label of a token that is not learned."""
_CANDIDATES = 64


def learned_positions(sample: Any) -> Any:
    """Return the positions of a sample's learned tokens, of which the first token is none."""
    import numpy as np

    return np.flatnonzero(np.asarray(sample.labels)[1:] != IGNORED) + 1


def shortest_samples(store: Any, most: int = 4) -> list[tuple[Any, Any]]:
    """Return (input_ids, labels) of the shortest of a store's first samples that have a loss."""
    rows = sorted(range(min(len(store), _CANDIDATES)), key=lambda row: int(store.lengths[row]))
    return [(store[row].input_ids, store[row].labels) for row in rows if store.loss_counts[row]][:most]


class Samples:
    """Each sample of a token store as one item."""

    shorter = "max_seq_len to drop longer rows"
    lines: Ints | None = None

    def __init__(self, store: forge_data.TokenStore) -> None:
        self.store = store
        self.share_prefix = False
        self.media_rows: MediaRows = "packed"
        self._media: forge_data.MediaInputs | None = None
        self._most_tokens: int | None = None
        self.lengths = self.longest = store.lengths
        self.loss_counts = store.loss_counts
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        learned = f"in which {counted_are(int(self.loss_counts.sum()), 'tokens')} learned"
        return f"{counted(len(self), 'rows')}, {learned}{media_in_words(self.store, self.media_counts)}"

    def source(self, index: int) -> str:
        """Return the file and row of a sample."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Return the length of a sample in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens"

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack samples into one row."""
        samples = [self.store[int(i)] for i in indices]
        if not self.share_prefix:
            row = forge_packing.collate(samples)
            return row if self._media is None else media_row_of(row, self.store, indices, self._media)
        return forge_packing.collate_shared(samples, max_tokens=self._most_tokens)

    @cached_property
    def media_counts(self) -> Any:
        """int64[N, 2], how many images each item has, and how many tokens stand for those."""
        return self.store.media_counts

    @cached_property
    def prefixes(self) -> dict[str, Any]:
        """What items begin with alike, as arguments of `forge_packing.plan`; {} for nothing.

        The same tokens may stand for other images, so that samples with images share nothing.
        """
        if self.store.has_media:
            return {}
        at = self._whole_samples()
        return common_prefixes(self.store, at, self.store.lengths[at])

    @property
    def planned(self) -> dict[str, Any]:
        """What items share now, as arguments of `forge_packing.divide`."""
        return self.prefixes if self.share_prefix else {}

    def _whole_samples(self) -> Any:
        """Index the sample of each item that a row holds whole, as it comes first."""
        return slice(None)

    def sharing(
        self,
        *,
        share_prefix: bool,
        share_history: bool = False,  # noqa: ARG002 - of conversations
        max_tokens: int | None = None,
    ) -> Self:
        """Return the same items, with shared prefixes in rows of `max_tokens`, or repeated ones."""
        same = copy(self)
        same.share_prefix, same._most_tokens = share_prefix, max_tokens
        return same

    def with_media(self, inputs: forge_data.MediaInputs, rows: MediaRows) -> Self:
        """Return the same items, whose rows are given their images.

        They are packed, in lines that are padded, or of one sample each.
        """
        same = copy(self)
        same._media, same.media_rows = inputs, rows
        return same

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short samples."""
        return shortest_samples(self.store)


class Conversations(Samples):
    """Rows of a token store, of which some were tokenized once for each learned turn.

    The turns of a row are trained on in one step, and their common history may be computed once for all of them.
    """

    shorter = "max_seq_len to leave out longer turns"

    def __init__(self, store: forge_data.TokenStore) -> None:
        # Deferred, as the command line's help needs none of it.
        import numpy as np

        super().__init__(store)
        self.share_history = False
        assert store.conversations is not None
        self._ends = store.conversations
        begins = self._ends[:-1]
        # Planned as if histories were shared, so that steps do not depend on what the attention can do.
        self.lengths = np.add.reduceat(store.lengths - store.shared, begins)
        self.longest = np.maximum.reduceat(store.lengths, begins)
        self.unshared = np.add.reduceat(store.lengths, begins)
        """int64[N]: tokens of each row where every turn repeats its history."""
        self.lines = np.diff(self._ends)
        self.loss_counts = np.add.reduceat(store.loss_counts, begins)
        self.sources = None if store.weights is None else store.sources[begins]

    @cached_property
    def media_counts(self) -> Any:
        """int64[N, 2], how many images each row has in its samples, and how many tokens."""
        import numpy as np

        return np.add.reduceat(self.store.media_counts, self._ends[:-1], axis=0)

    def _whole_samples(self) -> Any:
        return self._ends[1:] - 1

    def sharing(self, *, share_prefix: bool, share_history: bool = False, max_tokens: int | None = None) -> Self:
        """Return the same items, with shared or repeated histories, and prefixes of several rows."""
        same = super().sharing(share_prefix=share_prefix, max_tokens=max_tokens)
        same.share_history = share_history
        return same

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __str__(self) -> str:
        turns = (
            f"{counted(len(self.store), 'samples')}, one for each learned turn where turns are asked for in another form than "
            "history"
        )
        learned = f"{counted_are(int(self.loss_counts.sum()), 'tokens')} learned"
        return f"{counted(len(self), 'rows')} as {turns}; {learned}{media_in_words(self.store, self.media_counts)}"

    def source(self, index: int) -> str:
        """Return the file and row of a conversation."""
        return self.store.source(int(self._ends[index]))

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack conversations into one row."""
        if self._media is not None:
            at = [at for i in map(int, indices) for at in range(self._ends[i], self._ends[i + 1])]
            return media_row_of(forge_packing.collate([self.store[i] for i in at]), self.store, at, self._media)
        turns = [[self.store[at] for at in range(self._ends[i], self._ends[i + 1])] for i in map(int, indices)]
        return forge_packing.collate_turns(turns, share_history=self.share_history, share_prefix=self.share_prefix)


_found: dict[str, tuple[Ints, Ints] | None] = {}
"""Fingerprint of a store → the common prefixes of its samples, for all plans that a run makes of it."""
_MOST_FOUND = 8


def common_prefixes(store: forge_data.TokenStore, samples: Any, lengths: Ints) -> dict[str, Any]:
    """Find the common prefixes of a store's samples, as arguments of `forge_packing.plan`.

    They are looked for once in a process.

    Args:
        store: of one kind of items.
        samples: indices of those that are looked at.
        lengths: tokens of each that are looked at, but the last.
    """
    known = store.fingerprint
    if known not in _found:
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        ids, starts = store.flat
        _found[known] = forge_packing.find_prefixes(ids, lengths, starts=starts[samples])
    found = _found[known]
    return {} if found is None else {"prefixes": found[0], "prefix_tokens": found[1]}


def items_of(store: forge_data.TokenStore) -> Samples:
    """Return the samples of a store, by conversation where their turns were tokenized apart."""
    return Samples(store) if store.conversations is None else Conversations(store)
