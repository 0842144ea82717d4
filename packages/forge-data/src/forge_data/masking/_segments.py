"""Who wrote which characters to who wrote which tokens: the segments of an example."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_data.chat_template._trace import NOBODY, Run, Trace, literal, says

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEMPLATE = "template"
_HEADER = re.compile(r"(.*\W)\w+(\W*)", re.DOTALL)
"""Marks, a role's name, and marks."""
_APART = 1 << 40
"""What the places of one text and the next are set apart by; no text is as long."""


def speakers(trace: Trace) -> list[Run]:
    """The runs of a conversation, where what a message says is its own even if another's turn, or none, holds it.

    A system message that a template writes into the first user's turn is the system's; what it writes there of its own, such
    as a default system turn, is nobody's.
    """
    guests = iter(
        [
            (first, last, leaf.message)
            for first, last, leaf, _ in trace.stretches
            if leaf.message >= 0 and says(leaf) and last > first
        ]
    )
    runs: list[Run] = []
    guest = next(guests, None)
    for start, stop, owner in _without_preface(trace):
        at = start
        while guest is not None and guest[0] < stop:
            first, last = max(guest[0], at), min(guest[1], stop)
            if guest[2] != owner:
                runs += [(at, first, owner), (first, last, guest[2])]
                at = last
            if guest[1] > stop:
                break
            guest = next(guests, None)
        runs.append((at, stop, owner))
    return [(start, stop, owner) for start, stop, owner in runs if stop > start]


def _without_preface(trace: Trace) -> list[Run]:
    """The runs of a trace, where what the template writes before the first turn's own header is no part of that turn.

    A header is a role's name between the same marks in every turn: `<|im_start|>user` and a newline, `<|im_start|>assistant`
    and a newline. Where the first turn begins with more than that, and later ones do not, the rest is the template's.
    """
    runs = trace.runs
    first = next((at for at, run in enumerate(runs) if run[2] >= 0), len(runs))
    if first == len(runs):
        return runs
    start, stop, owner = runs[first]
    begins, clear = literal(trace, owner, start, stop)
    if not clear:
        return runs
    for later_start, later_stop, later in runs[first + 1 :]:
        if later < 0 or later == owner:
            continue
        header, told = literal(trace, later, later_start, later_stop)
        if told and (marks := _HEADER.fullmatch(header)):
            own = re.search(re.escape(marks[1]) + r"\w+" + re.escape(marks[2]) + r"\Z", begins)
            if own is None or not own.start():
                return runs
            turn = start + own.start()
            return [*runs[:first], (start, turn, NOBODY), (turn, stop, owner), *runs[first + 1 :]]
    return runs


def segments(
    begins: "NDArray[np.int64]", sizes: Sequence[int], runs: Sequence[Sequence[Run]], roles: Sequence[Sequence[str]]
) -> "list[tuple[NDArray[np.int32], tuple[str, ...]]]":
    """int32[K, 2] and K roles of each text: the tokens [start, stop) of each segment; a token is whose its first character is.

    Args:
        begins: int64[T], the first character that each token stands for, text after text.
        sizes: how many tokens each text has.
        runs: of each text, who wrote it, in order.
        roles: of each text, the role of each owner; of `NOBODY` it is `template`.
    """
    # All texts at once, each in places of its own: a few large arrays take less time than many small ones.
    every = [of_text or [(0, 0, NOBODY)] for of_text in runs]
    counts = np.array([len(of_text) for of_text in every])
    starts, owners = np.array([(start, owner) for of_text in every for start, _, owner in of_text]).reshape(-1, 2).T
    firsts = np.cumsum(sizes) - sizes
    apart = _APART * np.arange(len(every))
    at = np.searchsorted(starts + np.repeat(apart, counts), begins + np.repeat(apart, sizes), side="right") - 1
    owned = owners[at]
    changes = np.ones(len(begins), dtype=np.bool_)
    changes[1:] = owned[1:] != owned[:-1]
    changes[firsts[np.asarray(sizes) > 0]] = True
    borders = np.flatnonzero(changes)
    edges = np.append(borders, len(begins))
    bounds = np.stack([edges[:-1], edges[1:]], axis=1)
    held = np.searchsorted(borders, firsts).tolist()
    bounds = (bounds - np.repeat(firsts, np.diff([*held, len(borders)]))[:, None]).astype(np.int32)
    of_segments: list[int] = owned[borders].tolist()
    told = []
    for first, last, names in zip(held, [*held[1:], len(borders)], roles, strict=True):
        named = tuple([TEMPLATE if owner == NOBODY else names[owner] for owner in of_segments[first:last]])
        told.append((bounds[first:last], named))
    return told
