"""Stores of preferences → pairs of answers to one prompt, or single answers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

import forge_algos
import forge_data
import forge_packing
from forge._counted import counted, counted_are
from forge.tasks.items._items import Ints
from forge.tasks.items._media import MediaRows, media_in_words, media_row, media_row_of
from forge.tasks.items._samples import common_prefixes, shortest_samples

_IGNORE = -100
Example = tuple[Any, Any]
"""(input_ids, labels) of a prompt with its answer."""


@attrs.frozen(kw_only=True, eq=False)
class References:
    """Reference log-probabilities of N items."""

    logps: npt.NDArray[np.float32]
    """float32[N, K]: summed log-probabilities of an item's K completions."""


class Pairs:
    """Pairs of a chosen and a rejected answer; their prompt may be computed once for both."""

    noun = "pairs"
    completions = 2
    """Number of completions of an item."""
    shorter = "max_seq_len to drop longer answers"

    def __init__(self, store: forge_data.TokenStore) -> None:
        self.store = store
        self.share_prompt = self.share_prefix = False
        self.references: References | None = None
        # Until the model is asked, as if it took them in lines, which have more places than a packed row.
        self.media_rows: MediaRows = "lines" if store.has_media else "packed"
        self._media: forge_data.MediaInputs | None = None
        self.weights = store.weights
        self.rows = self._rows()
        lengths, counts = store.lengths[self.rows], store.loss_counts[self.rows]
        # As if no prompt were shared, so that steps do not depend on what the attention can do.
        self.lengths, self.longest, self.loss_counts = lengths.sum(1), lengths.max(1), counts.sum(1)
        self.lines: Ints | None = np.full(len(self.rows), self.completions, dtype=np.int64)
        self.sources = None if store.weights is None else store.sources[self.rows[:, 0]]

    @cached_property
    def prefixes(self) -> dict[str, Any]:
        """What items begin with alike, as arguments of `forge_packing.plan`; {} for nothing.

        That is what their first sample shares with another's, its prompt or more.
        """
        at = self.rows[:, 0]
        return common_prefixes(self.store, at, self.store.lengths[at])

    @cached_property
    def media_counts(self) -> Ints:
        """int64[N, 2]: images of each item's completions, and tokens that stand for those."""
        return self.store.media_counts[self.rows].sum(1)

    @cached_property
    def repeated(self) -> Ints | None:
        """int64[N]: tokens that the second sample of each item shares with its first."""
        return _common_prompts(self.store, self.rows)

    @property
    def planned(self) -> dict[str, Any]:
        """What the items' plan counts once, as they share now, as arguments of `forge_packing.plan`."""
        return self.sharing(prompt=self.share_prompt, prefix=self.share_prefix)

    def sharing(self, *, prompt: bool, prefix: bool) -> dict[str, Any]:
        """Return what a plan counts once where prompts, or what these begin with, are shared.

        The same tokens may stand for other images, so that samples with images share nothing.
        """
        if self.store.has_media:
            return {}
        return {**(self.prefixes if prefix else {}), **({"repeated": self.repeated} if prompt else {})}

    def using(self, *, share_prompt: bool, share_prefix: bool, references: References | None) -> Self:
        """Return the same items with or without shared prompts and reference log-probabilities."""
        same = copy(self)
        same.share_prompt, same.share_prefix, same.references = share_prompt, share_prefix, references
        return same

    def with_media(self, inputs: forge_data.MediaInputs, rows: MediaRows) -> Self:
        """Return the same items, whose rows are given the images of prompts and answers."""
        same = copy(self)
        same._media, same.media_rows = inputs, rows
        return same

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        scored = f"{counted_are(int(self.loss_counts.sum()), 'tokens')} scored"
        return f"{counted(len(self), self.noun)}, in which {scored}{media_in_words(self.store, self.media_counts)}"

    def source(self, index: int) -> str:
        """Return the file and row of an item."""
        return self.store.source(int(self.rows[index, 0]))

    def examples(self, index: int) -> tuple[Example, ...]:
        """Return both completions of an item, each with its prompt."""
        chosen, rejected = (self.store[int(row)] for row in self.rows[index])
        return (chosen.input_ids, chosen.labels), (rejected.input_ids, rejected.labels)

    def groups(self, indices: Sequence[int] | Ints, *, share_prompt: bool, share_prefix: bool) -> forge_packing.PackedGroups:
        """Pack items as groups of two completions."""
        examples = [self.examples(int(i)) for i in indices]
        row = forge_packing.collate_groups(examples, share_prompt=share_prompt, share_prefix=share_prefix)
        if self._media is None:
            return row
        return media_row_of(row, self.store, self.rows[np.asarray(indices, dtype=np.int64)].ravel(), self._media)

    @property
    def rows_scored(self) -> int:
        """Number of rows of `scored`: one, or one for each of an item's completions."""
        return 1

    def scored(self, indices: Sequence[int] | Ints, *, share: bool) -> list[forge_packing.PackedGroups]:
        """Pack items as the rows that a reference scores once, `rows_scored` of them."""
        return [self.groups(indices, share_prompt=share, share_prefix=share)]

    def size(self, index: int) -> str:
        """Return the length of an item in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens, both answers with their prompts"

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Collate pairs into one micro-batch, a `forge_algos.PreferenceBatch`."""
        at = np.asarray(indices, dtype=np.int64)
        found, margins = self.references, self.store.margins
        return forge_algos.PreferenceBatch(
            groups=self.groups(at, share_prompt=self.share_prompt, share_prefix=self.share_prefix),
            ref_logps=None if found is None else found.logps[at].ravel(),
            margins=None if margins is None else margins[at],
        )

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short samples."""
        return shortest_samples(self.store)

    def _rows(self) -> Ints:
        """Return int64[N, 2]: the rows of each item's two completions in the store."""
        return self.store.pairs


class LoneAnswers(Pairs):
    """Single answers, desirable or not."""

    noun = "answers"
    completions = 1

    @cached_property
    def prefixes(self) -> dict[str, Any]:
        """What prompts of answers begin with alike."""
        return common_prefixes(self.store, slice(None), np.minimum(self._prompts() + 1, self.store.lengths))

    @cached_property
    def repeated(self) -> Ints | None:
        """None: an answer has nothing beside it to share its prompt with."""
        return None

    def examples(self, index: int) -> tuple[Example, ...]:
        """Return a row."""
        own = self.store[index]
        return ((own.input_ids, own.labels),)

    def size(self, index: int) -> str:
        """Return the length of an item in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens"

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Collate answers into one micro-batch, a `forge_algos.KTOBatch` without mismatches."""
        at = np.asarray(indices, dtype=np.int64)
        found = self.references
        return forge_algos.KTOBatch(
            completions=self.groups(at, share_prompt=False, share_prefix=self.share_prefix),
            desirable=self.store.desirable[at],
            ref_logps=None if found is None else found.logps[at, 0],
        )

    def _rows(self) -> Ints:
        return np.arange(len(self.store), dtype=np.int64)[:, None]

    def _prompts(self) -> Ints:
        """Return int64[N]: tokens of each row's prompt."""
        return self.store.prompt_lengths


class Answers(LoneAnswers):
    """Single answers, desirable or not, each with a mismatch from which KTO estimates its KL.

    The mismatch is the row's prompt with the next row's answer.
    """

    completions = 2

    def __init__(self, store: forge_data.TokenStore) -> None:
        super().__init__(store)
        prompts = self._prompts()
        # A mismatched sequence has the row's own prompt and the next row's answer.
        others = store.lengths[self.rows[:, 1]] - prompts[self.rows[:, 1]]
        own = store.lengths[self.rows[:, 0]]
        mismatched = prompts[self.rows[:, 0]] + others
        self.lengths, self.longest = own + mismatched, np.maximum(own, mismatched)

    @cached_property
    def prefixes(self) -> dict[str, Any]:
        """What prompts of answers begin with alike, which their mismatches do too.

        Answers and mismatches are in two rows, each with the prefix once.
        """
        found = super().prefixes
        return found and {**found, "prefix_tokens": 2 * found["prefix_tokens"]}

    @cached_property
    def media_counts(self) -> Ints:
        """int64[N, 2]: images of each answer and its prompt, and tokens that stand for those.

        The images of a mismatch, which are its prompt's too, are not counted again.
        """
        return self.store.media_counts

    def examples(self, index: int) -> tuple[Example, ...]:
        """Return a row, and its prompt with the next row's answer."""
        own, (other, _) = self.store[int(self.rows[index, 0])], self._mismatch(index)
        return (own.input_ids, own.labels), (other.input_ids, other.labels)

    def _mismatch(self, index: int) -> tuple[forge_data.TokenizedExample, str]:
        """Join a row's prompt and the next row's answer with their images, and say from where."""
        own, other = (self.store[int(row)] for row in self.rows[index])
        prompt, begin = _prompt(own.labels), _prompt(other.labels)
        asked = [medium for medium in own.media if medium.stop <= prompt]
        move = prompt - begin
        within = [
            attrs.evolve(medium, start=medium.start + move, stop=medium.stop + move)
            for medium in other.media
            if medium.start >= begin
        ]
        made = forge_data.TokenizedExample(
            np.concatenate([own.input_ids[:prompt], other.input_ids[begin:]]),
            np.concatenate([own.labels[:prompt], other.labels[begin:]]),
            media=(*asked, *within),
        )
        place = self.source(index)
        return made, f"{place}, with the answer of {self.store.source(int(self.rows[index, 1]))}" if within else place

    @property
    def rows_scored(self) -> int:
        """Number of rows of `scored`."""
        return 1 if self._media is None else 2

    def scored(self, indices: Sequence[int] | Ints, *, share: bool) -> list[forge_packing.PackedGroups]:
        """Pack answers and mismatches together; with images apart, one sample a row where need be."""
        if self._media is None:
            return super().scored(indices, share=share)
        return [*self._both(np.asarray(indices, dtype=np.int64), share_prefix=False)]

    def _both(self, at: Ints, *, share_prefix: bool) -> tuple[Any, Any]:
        """Pack answers into one row, and their mismatches into another."""
        indices = at.tolist()
        own: list[Any] = [(self.store[int(self.rows[i, 0])], self.source(i)) for i in indices]
        return self._row(own, share_prefix), self._row([self._mismatch(i) for i in indices], share_prefix)

    def _row(self, samples: list[tuple[forge_data.TokenizedExample, str]], share_prefix: bool) -> Any:
        """Pack samples, each with its place, into one row."""
        groups = [[(sample.input_ids, sample.labels)] for sample, _ in samples]
        row = forge_packing.collate_groups(groups, share_prefix=share_prefix)
        if self._media is None:
            return row
        return media_row(row, [sample for sample, _ in samples], [place for _, place in samples], self._media)

    def size(self, index: int) -> str:
        """Return the length of an item in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens, with the mismatched answer that is scored beside it"

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Collate answers and their mismatches into one micro-batch, a `forge_algos.KTOBatch`."""
        at = np.asarray(indices, dtype=np.int64)
        completions, mismatched = self._both(at, share_prefix=self.share_prefix)
        found = self.references
        return forge_algos.KTOBatch(
            completions=completions,
            mismatched=mismatched,
            desirable=self.store.desirable[at],
            ref_logps=None if found is None else found.logps[at, 0],
            ref_mismatched_logps=None if found is None else found.logps[at, 1],
        )

    def _rows(self) -> Ints:
        own = np.arange(len(self.store), dtype=np.int64)
        return np.stack([own, np.roll(own, -1)], axis=1)


_AT_ONCE = 2**20
"""Tokens of prompts that are compared together."""


def _common_prompts(store: forge_data.TokenStore, rows: Ints) -> Ints:
    """Count the tokens that both samples of each pair begin with and learn nothing in: int64[N].

    The last token of a sample is none of them.
    """
    ids, starts = store.flat
    limits = np.minimum(store.prompt_lengths, store.lengths - 1)[rows].min(axis=1)
    found = limits.copy()
    ends = np.cumsum(limits)
    first = 0
    while first < len(rows):
        stop = max(first + 1, int(np.searchsorted(ends, ends[first] + _AT_ONCE)))
        sizes = limits[first:stop]
        pair = np.repeat(np.arange(sizes.size, dtype=np.int64), sizes)
        at: Ints = np.arange(pair.size, dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        chosen, rejected = (starts[rows[first:stop, side]][pair] + at for side in (0, 1))
        other = np.flatnonzero(ids[chosen] != ids[rejected])
        np.minimum.at(found[first:stop], pair[other], at[other])
        first = stop
    return found


def _prompt(labels: Any) -> int:
    """Count the tokens before the first that is learned."""
    return int(np.argmax(np.asarray(labels) != _IGNORE))
