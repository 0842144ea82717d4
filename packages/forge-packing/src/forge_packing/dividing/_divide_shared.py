"""Division of steps whose samples begin alike, as if they did not or by one of two ways.

Room: some prefixes have their room in every micro-batch of a step, the samples are divided by what they add. That is best
where one system prompt stands before most of the data.

Bundles: samples with one prefix are put together, as many bundles of them as the step has room for, and bundles are divided
as samples are. That is best where there are several long prefixes, each of which should be in few micro-batches.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array, checked_integer
from forge_packing.dividing._compile import run
from forge_packing.dividing._cost import Cost, integer_costs
from forge_packing.dividing._padded import fewest_bits
from forge_packing.dividing._prefixes import Prefixes

_MOST_KEYS = 8
"""Times max_tokens that the samples of a micro-batch have at most with repetitions: shared keys are gathered for each."""
_SIXTEENTHS = np.arange(1, 17)
"""Sizes of bundles that are tried, in sixteenths of max_tokens."""

_Slots = tuple[Int64Array, Int64Array]
"""The slot (pass * ranks + rank) of each sample in its step, int64[P], and the passes of each step."""
Slotting = Callable[[Int64Array, npt.NDArray[np.float64], Int64Array, Int64Array], _Slots]
"""Tokens, costs, step_starts and the capacity of each step → slots."""


def most_keys(max_tokens: int) -> int:
    """Return how many keys the samples of a micro-batch have at most, where they share tokens.

    Shared tokens are computed once, but their keys and values are gathered for each sample that has them, in every layer: a
    micro-batch that was limited by its tokens alone could gather any number. One that `plan` and `divide` make has no more.

    Raises:
        PackingError: `max_tokens` is no number of tokens.

    >>> most_keys(8192)
    65536
    """
    return _MOST_KEYS * checked_integer("max_tokens", max_tokens, 1, MAX_TOKENS)


class _Step(NamedTuple):
    """Prefixes that several samples of a step have."""

    numbers: Int64Array
    counts: Int64Array
    """Samples with each."""
    taken: Int64Array
    """Tokens of all prefixes with these samples."""


class Given(NamedTuple):
    """Steps to divide, and how."""

    lengths: Int64Array
    """int64[P], step after step."""
    keys: Int64Array
    """int64[P]: tokens with those that a sample has twice."""
    prefixes: Prefixes
    """Those of the same samples."""
    step_starts: Int64Array
    """int64[steps+1]."""
    max_tokens: int
    world_size: int
    cost: Cost
    slotting: Slotting


def slots_of_shared(given: Given) -> _Slots:
    """Divide steps, each by the way with which the ranks are done first."""
    lengths, _, prefixes, step_starts, max_tokens, world_size, cost, slotting = given
    bounds = zip(step_starts[:-1].tolist(), step_starts[1:].tolist(), strict=True)
    steps = [_step(prefixes, start, stop) for start, stop in bounds]
    sizes = np.diff(step_starts)
    whole = np.full(sizes.size, max_tokens, dtype=np.int64)
    best_slots, best_passes = slotting(lengths, cost.of(lengths), step_starts, whole)
    if not any(step.numbers.size for step in steps):
        return best_slots, best_passes

    def makespans(slot_of: Int64Array, passes: Int64Array) -> npt.NDArray[np.float64]:
        first = np.append(0, np.cumsum(passes * world_size))
        costs = prefixes.costs(cost, lengths, slot_of + np.repeat(first[:-1], sizes), int(first[-1]))
        slowest = costs.reshape(-1, world_size).max(axis=1)
        return (np.add.reduceat(slowest, first[:-1] // world_size) + passes * cost.per_micro_batch).astype(np.float64)

    best = makespans(best_slots, best_passes)
    for way in (_by_room, _by_bundles):
        slot_of, passes = way(given, steps)
        found = makespans(slot_of, passes)
        better = found < best
        best_slots = np.where(np.repeat(better, sizes), slot_of, best_slots)
        best_passes, best = np.where(better, passes, best_passes), np.minimum(found, best)
    return best_slots, best_passes


def _step(prefixes: Prefixes, start: int, stop: int) -> _Step:
    of = prefixes.of[start:stop]
    numbers, counts = np.unique(of[of >= 0], return_counts=True)
    several = counts > 1
    return _Step(numbers[several], counts[several], (counts * prefixes.tokens[numbers])[several])


def _added(given: Given, shared: Int64Array, room: Int64Array) -> Int64Array:
    """Count the tokens that samples add to a micro-batch which has their first `shared` ones.

    Returns int64[P]. Samples that fill the `room` for them have no more keys than `_MOST_KEYS` times max_tokens together. What
    is longer than the room has a micro-batch to itself, which is large enough.
    """
    lengths = given.lengths
    least = -(-given.keys * room // (_MOST_KEYS * given.max_tokens))
    return np.minimum(np.where(shared > 0, np.maximum(lengths - shared, least), lengths), room)


def _by_room(given: Given, steps: list[_Step]) -> _Slots:
    """Give prefixes room in every micro-batch of a step: those with which least is computed."""
    lengths, _, prefixes, step_starts, max_tokens, world_size, cost, slotting = given
    own, shared = prefixes.shared(), np.zeros_like(lengths)
    capacities = np.full(len(steps), max_tokens, dtype=np.int64)
    for at, (numbers, _, taken) in enumerate(steps):
        start, stop = step_starts[at], step_starts[at + 1]
        best_first = np.argsort(-taken, kind="stable")
        room = np.append(0, np.cumsum(prefixes.tokens[numbers[best_first]]))
        room = room[room < max_tokens]
        left = int(lengths[start:stop].sum()) - np.append(0, np.cumsum(taken[best_first]))[: room.size]
        micro_batches = -(-left // ((max_tokens - room) * world_size)) * world_size
        chosen = int(np.argmin(left + micro_batches * room))
        capacities[at] -= room[chosen]
        shared[start:stop] = np.where(np.isin(prefixes.of[start:stop], numbers[best_first[:chosen]]), own[start:stop], 0)
    tokens = _added(given, shared, np.repeat(capacities, np.diff(step_starts)))
    return slotting(tokens, cost.of(lengths) - cost.of(shared), step_starts, capacities)


def _by_bundles(given: Given, steps: list[_Step]) -> _Slots:
    """Put samples with one prefix together, which some step has, and divide what comes of it."""
    lengths, _, prefixes, step_starts, max_tokens, world_size, cost, slotting = given
    sizes = np.diff(step_starts)
    step_of = np.repeat(np.arange(sizes.size), sizes)
    own = np.minimum(prefixes.shared(), max_tokens - 1)
    added = _added(given, own, max_tokens - own)
    # Families are the samples of a step with one prefix: each is a step by itself, divided into bundles.
    family_of = step_of * (prefixes.tokens.size + 1) + prefixes.of + 1
    together = np.zeros(lengths.size, dtype=bool)
    numbers_of: list[Int64Array] = []
    for at, (numbers, counts, _) in enumerate(steps):
        start, stop = step_starts[at], step_starts[at + 1]
        if not numbers.size:
            continue
        of = prefixes.of[start:stop]
        together[start:stop] = np.isin(of, numbers)
        tokens = np.bincount(of[of >= 0], weights=added[start:stop][of >= 0], minlength=prefixes.tokens.size)
        alone = int(lengths[start:stop][~together[start:stop]].sum())
        bundles = _bundles(tokens[numbers].astype(np.int64), prefixes.tokens[numbers], alone, max_tokens, world_size)
        numbers_of.append(np.minimum(bundles, counts))
    members = np.flatnonzero(together)
    members = members[np.lexsort((-added[members], family_of[members]))]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(family_of[members])) + 1, [members.size]])
    costs = cost.of(lengths[members]) - cost.of(own[members])
    made, placed = np.concatenate(numbers_of), np.zeros(members.size, dtype=np.int64)
    capacities, passes = max_tokens - own[members[starts[:-1]]], np.zeros_like(made)
    run("divide_all", (added[members], integer_costs(costs, starts), starts, capacities), (1,), made, placed, passes)
    first_of = np.append(0, np.cumsum(made))
    bundle_of = np.zeros(lengths.size, dtype=np.int64)
    bundle_of[members] = placed + np.repeat(first_of[:-1], np.diff(starts))
    bundle_of[~together] = first_of[-1] + np.arange(lengths.size - members.size)
    # Bundles in the order of their steps, without empty ones.
    _, first, bundle_of = np.unique(bundle_of, return_index=True, return_inverse=True)
    by_step = np.argsort(fewest_bits(step_of[first]), kind="stable")
    place = np.empty_like(by_step)
    place[by_step] = np.arange(by_step.size)
    bundle_of, first = place[bundle_of], first[by_step]
    shares = Prefixes(np.where(together, prefixes.of, -1), prefixes.tokens)
    tokens = np.zeros(first.size, dtype=np.int64)
    np.add.at(tokens, bundle_of, np.where(together, added, lengths))
    tokens += np.where(together[first], own[first], 0)
    bundle_starts = np.append(0, np.cumsum(np.bincount(step_of[first], minlength=sizes.size)))
    costs = shares.costs(cost, lengths, bundle_of, first.size)
    slots, passes = slotting(tokens, costs, bundle_starts, np.full(sizes.size, max_tokens, dtype=np.int64))
    return slots[bundle_of], passes


def _bundles(added: Int64Array, own: Int64Array, alone: int, max_tokens: int, world_size: int) -> Int64Array:
    """Return into how many bundles the samples of each prefix of a step are put: int64[G].

    As few as fit; with several ranks as many as give each of them about as much, in no more passes.

    Args:
        added: int64[G], tokens that the samples with a prefix add to it.
        own: int64[G], tokens of each prefix.
        alone: tokens of the other samples.
        max_tokens: of a micro-batch.
        world_size: R.
    """
    sizes = np.unique(np.maximum(max_tokens * _SIXTEENTHS // 16, 1))[:, None]
    room = np.maximum(sizes - own, 0)
    bundles = -(-added // np.maximum(room, 1))
    fits = np.all(room > 0, axis=1)
    filled = -(-((bundles * own + added).sum(axis=1) + alone) // sizes[:, 0])
    if world_size == 1:
        return bundles[-1]
    # The largest is enough in any case.
    enough = fits & (filled <= -(-filled[-1] // world_size) * world_size)
    return bundles[int(np.argmax(enough)) if enough.any() else -1]
