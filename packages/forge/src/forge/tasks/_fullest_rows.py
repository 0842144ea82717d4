"""Lengths of a step's prompts → completions of the micro-batches that may take most memory.

A completion may have any length up to `max_new_tokens`. Long ones fill a row with tokens. Short ones behind a long prompt make
a row of few tokens and many gathered keys, which take memory too (`with_keys`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np

import forge_algos
from forge.tasks.items._items import Ints

_KEYS_OF_A_TOKEN = 8
"""Keys and values that are gathered for further samples, with as much memory as one token that is computed has at least."""
_BEGINNINGS = 8
"""Prompts with which a row is begun, spread over those of a step."""
_BEGINNINGS_ALIKE = 32
"""The same, of rows of prompts that begin alike."""


def with_keys(tokens: int, keys: int) -> int:
    """Add gathered keys to computed tokens, as tokens that take as much memory."""
    return tokens + max(0, keys - tokens) // _KEYS_OF_A_TOKEN


class MadeUpRow(NamedTuple):
    """Completions of a made-up micro-batch, prompt after prompt."""

    prompts: Ints
    """int64[b]: the prompt of each, as its index."""
    lengths: Ints
    """int64[b]: tokens of each."""
    tokens: int
    """Tokens that are computed, with those of prompts."""
    keys: int
    """Keys that completions attend to."""


@attrs.frozen(kw_only=True)
class Update:
    """Prompts of all ranks' optimizer steps, and what limits their micro-batches."""

    prompt_tokens: Ints
    """int64[G, 1], or int64[G, 2] where a completion is computed behind two prompts, in two rows."""
    groups: int
    """How many of the prompts an optimizer step has."""
    each: int
    """Completions of a prompt."""
    max_new_tokens: int
    max_tokens: int
    """Tokens of a row, at most."""
    max_keys: int
    """Keys of a row, at most, where prompts are shared."""
    shares: bool
    """Whether a prompt stands in a row once."""
    ranks: int = 1
    """Data shards that divide a step."""
    beginnings: Sequence[forge_algos.online.Beginnings] = ()
    """What prompts of each column begin with alike, where that stands in a row once too."""

    def fullest(self) -> list[MadeUpRow]:
        """Return rows that a division may have, with the most tokens or with the most of both.

        A row begins with the first or the last completion of a prompt. Prompts that are shorter follow, the longest first, or
        all others, the shortest first; where prompts share what they begin with, also those that begin most alike. Of each such
        order there are two rows at most; the one with the most tokens has as few prompts as that takes.
        """
        found: dict[tuple[int, int], MadeUpRow] = {}
        for prompts in self._orders():
            for skipped in sorted({0, self.each - 1}):
                for row in self._rows_of(prompts[: self.groups], skipped):
                    found.setdefault((row.tokens, row.keys), row)
        return list(found.values())

    def _orders(self) -> Iterator[Ints]:
        """Yield orders in which prompts may follow each other in a row."""
        order = np.argsort(-self.prompt_tokens.max(axis=1), kind="stable")
        for first in _spread(len(order), _BEGINNINGS):
            rest = np.delete(order, first)
            yield from (order[first:], np.append(order[first], rest[::-1]))
        for each in self.beginnings:
            for first in _spread(len(order), _BEGINNINGS_ALIKE):
                yield np.roll(each.order, -first)

    def several(self, row: MadeUpRow) -> bool:
        """Return whether a step with such a row may have another one too."""
        tokens, keys = self._alike_step(), self._longest_step()[1]
        alone = len(row.lengths) == self.each * min(self.groups, len(self.prompt_tokens))
        return not alone or tokens > self.max_tokens or (self.shares and keys > self.max_keys)

    def _longest_step(self) -> tuple[int, int]:
        """Return the tokens and keys of a step of the longest prompts and completions."""
        longest = np.sort(self.prompt_tokens.max(axis=1))[-self.groups :]
        own = len(longest) * self.each * self.max_new_tokens
        keys = self.each * int(longest.sum()) + own
        return int(longest.sum()) + own if self.shares else keys, keys

    def _alike_step(self) -> int:
        """Return the tokens of such a step in one row, where what prompts begin with alike stands once."""
        tokens, _ = self._longest_step()
        if not self.beginnings:
            return tokens
        own = min(self.groups, len(self.prompt_tokens)) * self.each * self.max_new_tokens
        orders = [each.order for each in self.beginnings]
        prompts = [int(np.max([each.added(order) for each in self.beginnings], axis=0).sum()) for order in orders]
        return min(tokens, own + max(prompts))

    def shortest(self) -> MadeUpRow:
        """Return the row of one token behind the shortest prompt."""
        lengths = self.prompt_tokens.max(axis=1)
        return MadeUpRow(lengths.argmin()[None], np.ones(1, np.int64), int(lengths.min()) + 1, int(lengths.min()) + 1)

    def _rows_of(self, order: Ints, skipped: int) -> Iterator[MadeUpRow]:
        """Yield rows of the first completions of prompts in this order, but for those skipped."""
        # A row has no more completions than tokens.
        place = np.arange(skipped, min(len(order) * self.each, skipped + self.max_tokens))
        prompts = order[place // self.each]
        begins = (place % self.each == 0) | (place == skipped) if self.shares else np.ones(len(place), bool)
        longest, held = self.prompt_tokens[prompts].max(axis=1), self.prompt_tokens[prompts].sum(axis=1)
        number, times = np.arange(1, len(place) + 1), self.prompt_tokens.shape[1]
        # Of a row with the completions up to each: what prompts take of it, and the tokens that completions may have.
        apart = taken = np.cumsum(longest * begins)
        computed = np.cumsum(held * begins)
        if self.beginnings:
            adds = np.zeros((times, len(place)), np.int64)
            adds[:, begins] = [each.added(prompts[begins]) for each in self.beginnings]
            taken, computed = adds.cumsum(axis=1).max(axis=0), adds.sum(axis=0).cumsum()
        room = self.max_tokens - taken
        if self.shares:
            # A row of one completion may have more keys.
            room = np.minimum(room, np.where(place == skipped, room, self.max_keys - np.cumsum(longest)))
        room = np.minimum(room, self._share(apart, taken, number))
        own = np.minimum(number * self.max_new_tokens, room)
        fits = own >= number
        tokens = np.where(fits, computed + times * own, 0)
        keys = np.cumsum(held) + times * own
        keys = keys if self.shares else tokens
        beyond_one = self.max_new_tokens - 1
        for weight in (tokens, tokens + (keys - tokens) // _KEYS_OF_A_TOKEN):
            at = int(np.argmax(np.where(fits, weight, 0)))
            if fits[at]:
                # One token each, and what is left to the first: some kernels take memory by the longest sample.
                left = own[at] - number[at] - beyond_one * np.arange(number[at])
                yield MadeUpRow(prompts[: at + 1], 1 + np.clip(left, 0, beyond_one), int(tokens[at]), int(keys[at]))

    def _share(self, apart: Ints, taken: Ints, number: Ints) -> Ints:
        """Return the most tokens of the completions in a rank's row of the first 1, 2, ... of them.

        Ranks have about as many tokens, so that a row has no more than the others and a completion. Where keys decide how many
        rows there are, it may. A step is divided as if prompts took what they take `apart`, or as they are `taken` once.
        """
        tokens, keys = self._longest_step()
        alone = int(self.prompt_tokens.max()) + self.max_new_tokens
        ways = [(apart, tokens, self.ranks * self.max_keys)]
        if self.beginnings:
            ways.append((taken, self._alike_step(), self.max_keys))
        most = np.zeros_like(taken)
        for held, whole, most_keys in ways:
            row = np.full_like(held, self.max_tokens)
            if self.ranks > 1 and not (self.shares and keys > most_keys):
                left = whole - held - number * self.max_new_tokens
                row = -(-(np.maximum(left, 0) + self.ranks * alone) // (self.ranks - 1))
            most = np.maximum(most, row - held)
        return most


def _spread(number: int, most: int) -> list[int]:
    """Return at most so many of the numbers below one, spread over them."""
    return np.unique(np.linspace(0, number - 1, most).astype(np.int64)).tolist()
