"""Lengths of a step's prompts → completions of the micro-batches that may take most memory.

A completion may have any length up to `max_new_tokens`. Long ones fill a row with tokens. Short ones behind a long prompt make
a row of few tokens and many gathered keys, which take memory too (`with_keys`).

Behind prompts with images a row is packed, or has padded lines: a line is a prompt with its completion, padded to the longest
of them, and `max_tokens` bounds the places of all lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np

import forge_algos
from forge.tasks._closest_sum import closest_sum
from forge.tasks.items._items import Ints

_KEYS_OF_A_TOKEN = 8
"""Keys and values that are gathered for further samples, with as much memory as one token that is computed has at least."""
_BEGINNINGS = 8
"""Prompts with which a row is begun, spread over those of a step."""
_FILLING = 512
"""Prompts, or completions with prompts of their own, of which those are looked for that fill a row."""
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
        all others, the shortest first; where prompts share what they begin with, also those that begin most alike; and those
        whose lengths add up to what a row may have. Of each such order there are two rows at most; the one with the most tokens
        has as few prompts as that takes.
        """
        found: dict[tuple[int, int], MadeUpRow] = {}
        for completions in self._orders():
            for row in self._rows_of(completions[: self.max_tokens]):  # a row has no more completions than tokens
                found.setdefault((row.tokens, row.keys), row)
        return list(found.values())

    def _orders(self) -> Iterator[Ints]:
        """Yield orders in which completions may follow each other in a row, as their prompts."""
        order = np.argsort(-self.prompt_tokens.max(axis=1), kind="stable")
        orders: list[Ints] = []
        for first in _spread(len(order), _BEGINNINGS):
            rest = np.delete(order, first)
            orders += [order[first:], np.append(order[first], rest[::-1])]
        # Two rows are both fuller behind prompts of about the same length.
        nearest = np.argsort(np.ptp(self.prompt_tokens, axis=1), kind="stable")
        orders.append(nearest)
        for each in self.beginnings:
            orders += [np.roll(each.order, -first) for first in _spread(len(order), _BEGINNINGS_ALIKE)]
        for prompts in orders:
            completions = np.repeat(prompts[: self.groups], self.each)
            yield from (completions[skipped:] for skipped in sorted({0, self.each - 1}))
        longest = self.prompt_tokens.max(axis=1)
        for part in (1, 2, 4) if self.prompt_tokens.shape[1] > 1 else (1,):
            yield from self._filling(order[np.isin(order, nearest[: -(-len(order) // part)])], longest)
        for each in self.beginnings:
            # What a prompt has of its own beside the one that is most like it.
            alone = np.empty_like(longest)
            both = [np.minimum(one.added(each.order), one.added(each.order[::-1])[::-1]) for one in self.beginnings]
            alone[each.order] = np.max(both, axis=0)
            yield from self._filling(each.order, alone, once=int((longest - alone).max()))

    def _filling(self, order: Ints, tokens: Ints, once: int = 0) -> Iterator[Ints]:
        """Yield completions of the prompts whose tokens fill a row best.

        They are all of each prompt, or one of each before the others. `tokens` int64[G] are those that prompts take,
        beside what they take `once`.
        """
        most = self.max_tokens
        if self.ranks > 1 and not self._keys_decide(self.ranks * self.max_keys):
            most = min(most, -(-self._longest_step()[0] // self.ranks) + self._longest_alone())
        prompts, times = order, self.each
        if not self.shares:
            prompts, times = np.repeat(order, np.minimum(times, most // tokens[order])), 1
        prompts = prompts[_spread(len(prompts), _FILLING)]
        for least in sorted({1, times}):
            bounds = [(own + least, own + times * self.max_new_tokens) for own in tokens[prompts].tolist()]
            chosen = prompts[closest_sum(bounds, most - once)]
            chosen = chosen[np.isin(chosen, list(dict.fromkeys(chosen.tolist()))[: self.groups])]
            if len(chosen):
                yield np.repeat(chosen, times) if least > 1 else np.append(chosen, np.repeat(chosen, times - 1))

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

    def _longest_alone(self) -> int:
        """Return the tokens of the longest prompt with a completion."""
        return int(self.prompt_tokens.max()) + self.max_new_tokens

    def _keys_decide(self, most_keys: int) -> bool:
        """Return whether keys may decide how many rows a step has."""
        return self.shares and self._longest_step()[1] > most_keys

    def _alike_step(self) -> int:
        """Return the tokens of such a step in one row, with what prompts begin with once."""
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

    def _rows_of(self, prompts: Ints) -> Iterator[MadeUpRow]:
        """Yield rows of the first completions in this order."""
        begins = np.ones(len(prompts), bool)
        if self.shares:
            begins[:] = False
            begins[np.unique(prompts, return_index=True)[1]] = True
        longest, held = self.prompt_tokens[prompts].max(axis=1), self.prompt_tokens[prompts].sum(axis=1)
        number, times = np.arange(1, len(prompts) + 1), self.prompt_tokens.shape[1]
        # Of a row with the completions up to each: what prompts take of it, and the tokens that completions may have.
        apart = taken = np.cumsum(longest * begins)
        computed = np.cumsum(held * begins)
        if self.beginnings:
            adds = np.zeros((times, len(prompts)), np.int64)
            adds[:, begins] = [each.added(prompts[begins]) for each in self.beginnings]
            taken, computed = adds.cumsum(axis=1).max(axis=0), adds.sum(axis=0).cumsum()
        room = self.max_tokens - taken
        if self.shares:
            # A row of one completion may have more keys.
            room = np.minimum(room, np.where(number == 1, room, self.max_keys - np.cumsum(longest)))
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
                lengths, by_prompt = 1 + np.clip(left, 0, beyond_one), np.argsort(prompts[: at + 1], kind="stable")
                yield MadeUpRow(prompts[by_prompt], lengths[by_prompt], int(tokens[at]), int(keys[at]))

    def _share(self, apart: Ints, taken: Ints, number: Ints) -> Ints:
        """Return the most tokens of the completions in a rank's row of the first 1, 2, ... of them.

        Ranks have about as many tokens, so that a row has no more than the others and a completion. Where keys decide how many
        rows there are, it may. A step is divided as if prompts took what they take `apart`, or as they are `taken` once.
        """
        tokens, alone = self._longest_step()[0], self._longest_alone()
        ways = [(apart, tokens, self.ranks * self.max_keys)]
        if self.beginnings:
            ways.append((taken, self._alike_step(), self.max_keys))
        most = np.zeros_like(taken)
        for held, whole, most_keys in ways:
            row = np.full_like(held, self.max_tokens)
            if self.ranks > 1 and not self._keys_decide(most_keys):
                left = whole - held - number * self.max_new_tokens
                row = -(-(np.maximum(left, 0) + self.ranks * alone) // (self.ranks - 1))
            most = np.maximum(most, row - held)
        return most


def _spread(number: int, most: int) -> list[int]:
    """Return at most so many of the numbers below one, spread over them."""
    return np.unique(np.linspace(0, number - 1, most).astype(np.int64)).tolist() if number > 0 else []


_WIDTHS, _NUMBERS = 12, 32
"""Widths of lines, and numbers of them, that are tried, spread over those that there are."""


def fullest_lines(
    prompt_tokens: Ints,
    image_tokens: Ints,
    *,
    groups: int,
    each: int,
    max_new_tokens: int,
    max_tokens: int,
    ranks: int = 1,
    shuffled: bool,
) -> list[MadeUpRow]:
    """Return the micro-batches of padded lines that may take the most.

    They have the most places, tokens of images, tokens of completions, and of all these together.

    Args:
        prompt_tokens: int64[G].
        image_tokens: int64[G], of each prompt.
        groups: prompts of an optimizer step.
        each: completions of a prompt.
        max_new_tokens: tokens of a completion, at most.
        max_tokens: places of a micro-batch, at most.
        ranks: data shards that divide a step.
        shuffled: whether any `groups` of the prompts may be a step, in any order; else they are those of one in its order.
    """
    found: list[MadeUpRow] = []
    sizes: list[tuple[int, int, int]] = []
    step = each * int((np.sort(prompt_tokens)[-groups:] + max_new_tokens).sum())
    tried = (
        _lines(prompt_tokens, image_tokens, groups, each, max_new_tokens, max_tokens)
        if shuffled
        else _neighbours(prompt_tokens, each, max_new_tokens, max_tokens)
    )
    for prompts, lengths in tried:
        # `divide_shards` adds no line to those that have an even share of the step's tokens.
        tokens = step - max_new_tokens * len(lengths) + int(lengths.sum())
        before = int((prompt_tokens[prompts] + lengths)[1:].max(initial=0))
        if (len(lengths) - 1) * before >= min(max_tokens, -(-tokens // ranks)):
            continue
        by_prompt = np.argsort(prompts, kind="stable")
        prompts, lengths = prompts[by_prompt], lengths[by_prompt]  # noqa: PLW2901
        places = len(prompts) * int((prompt_tokens[prompts] + lengths).max())
        found.append(MadeUpRow(prompts, lengths, places, places))
        sizes.append((places, int(image_tokens[prompts].sum()), int(lengths.sum())))
    features = np.array(sizes)
    together = (features / np.maximum(features.max(axis=0), 1)).sum(axis=1)
    # Of several with the same most, the one that has most of the rest.
    best = {max(range(len(found)), key=lambda at, by=by: (features[at, by], together[at])) for by in range(features.shape[1])}
    return [found[at] for at in sorted(best | {int(together.argmax())})]


def most_media(
    prompt_tokens: Ints, image_tokens: Ints, *, groups: int, each: int, max_new_tokens: int, max_tokens: int
) -> MadeUpRow | None:
    """Return the packed micro-batch with the most tokens of images, as full as it then may be.

    None where no prompt has any. Arguments as of `fullest_lines`. No completion shares its prompt.
    """
    order = np.argsort(-image_tokens / (prompt_tokens + 1), kind="stable")
    order = order[image_tokens[order] > 0][:groups]
    lines = np.repeat(order, each)
    lines = lines[np.cumsum(prompt_tokens[lines] + 1) <= max_tokens]
    if not len(lines):
        return None
    room = max_tokens - int((prompt_tokens[lines] + 1).sum())
    lengths = 1 + np.clip(room - (max_new_tokens - 1) * np.arange(len(lines)), 0, max_new_tokens - 1)
    by_prompt = np.argsort(lines, kind="stable")
    tokens = int(prompt_tokens[lines].sum() + lengths.sum())
    return MadeUpRow(lines[by_prompt], lengths[by_prompt], tokens, tokens)


def _lines(
    prompt_tokens: Ints, image_tokens: Ints, groups: int, each: int, max_new_tokens: int, max_tokens: int
) -> Iterator[tuple[Ints, Ints]]:
    """Yield the prompt of each line, and the tokens of its completion.

    The first one here, which a micro-batch may have last, may be wider than the others.
    """
    widths = np.unique(prompt_tokens)
    for widest in widths[_spread(len(widths), _WIDTHS)].tolist():
        longest = np.flatnonzero(prompt_tokens == widest)
        last = longest[image_tokens[longest].argmax()]
        narrower = widths[widths <= widest][_spread(int((widths <= widest).sum()), _WIDTHS)] + max_new_tokens
        for before in narrower.tolist():
            fit = np.flatnonzero(prompt_tokens < before)
            for order in (np.lexsort((-prompt_tokens[fit], -image_tokens[fit])), np.argsort(prompt_tokens[fit], kind="stable")):
                chosen = fit[order]
                among = np.isin(chosen, np.append(chosen[chosen != last][: groups - 1], last))
                others = np.repeat(chosen[among], np.where(chosen[among] == last, each - 1, each))
                lines = np.append(last, others)
                most = min(len(lines), max_tokens // (widest + 1))
                for number in (1 + at for at in _spread(most, _NUMBERS)):
                    width = min(widest + max_new_tokens, max_tokens // number)
                    prompts = lines[:number]
                    room = np.minimum(before, width) - prompt_tokens[prompts]
                    room[0] = width - widest
                    if room.min() > 0:
                        yield prompts, np.minimum(max_new_tokens, room)


def _neighbours(prompt_tokens: Ints, each: int, max_new_tokens: int, max_tokens: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield lines as `_lines` does, of completions that follow each other."""
    lines, widths = np.repeat(np.arange(len(prompt_tokens)), each), np.unique(prompt_tokens) + max_new_tokens
    for start in _spread(len(lines), 4 * _WIDTHS):
        for number in (1 + at for at in _spread(len(lines) - start, _NUMBERS)):
            prompts = np.roll(lines[start : start + number], 1)
            own = prompt_tokens[prompts]
            width = min(int(own.max()) + max_new_tokens, max_tokens // number)
            for before in widths[_spread(len(widths), _WIDTHS)].tolist():
                room = np.minimum(before, width) - own
                room[0] = width - own[0]
                if room.min() > 0:
                    yield prompts, np.minimum(max_new_tokens, room)
