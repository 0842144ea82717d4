"""Which message wrote which characters → segments of an example, in tokens."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_data.chat_template._trace import NOBODY, Run, Trace, is_content, template_prefix

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEMPLATE = "template"
_HEADER = re.compile(r"(.*\W)\w+(\W*)", re.DOTALL)
"""Marks, the name of a role, and marks."""
_TEXT_STRIDE = 1 << 40
"""Distance between the places of one text and the next; no text is as long."""


def text_owners(trace: Trace) -> list[Run]:
    """List the runs of a conversation; content is owned by its message even inside another turn.

    A system message that a template writes into the first user's turn is the system's; what the template writes there itself,
    such as a default system turn, is owned by no message.
    """
    contents = iter(
        [
            (first, last, leaf.message)
            for first, last, leaf, _ in trace.stretches
            if leaf.message >= 0 and is_content(leaf) and last > first
        ]
    )
    runs: list[Run] = []
    content = next(contents, None)
    for start, stop, owner in _without_preamble(trace):
        at = start
        while content is not None and content[0] < stop:
            first, last = max(content[0], at), min(content[1], stop)
            if content[2] != owner:
                runs += [(at, first, owner), (first, last, content[2])]
                at = last
            if content[1] > stop:
                break
            content = next(contents, None)
        runs.append((at, stop, owner))
    return [(start, stop, owner) for start, stop, owner in runs if stop > start]


def _without_preamble(trace: Trace) -> list[Run]:
    """List the runs of a trace without what the template writes before the first turn's header.

    A header is a role's name between the same marks in every turn: `<|im_start|>user` and a newline, `<|im_start|>assistant`
    and a newline. Where the first turn begins with more than that, and later ones do not, the rest is the template's.
    """
    runs = trace.runs
    first = next((at for at, run in enumerate(runs) if run[2] >= 0), len(runs))
    if first == len(runs):
        return runs
    start, stop, owner = runs[first]
    prefix, clear = template_prefix(trace, owner, start, stop)
    if not clear:
        return runs
    for later_start, later_stop, later in runs[first + 1 :]:
        if later < 0 or later == owner:
            continue
        header, is_own = template_prefix(trace, later, later_start, later_stop)
        if is_own and (marks := _HEADER.fullmatch(header)):
            own = re.search(re.escape(marks[1]) + r"\w+" + re.escape(marks[2]) + r"\Z", prefix)
            if own is None or not own.start():
                return runs
            turn = start + own.start()
            return [*runs[:first], (start, turn, NOBODY), (turn, stop, owner), *runs[first + 1 :]]
    return runs


def segments(
    begins: "NDArray[np.int64]", sizes: Sequence[int], runs: Sequence[Sequence[Run]], roles: Sequence[Sequence[str]]
) -> "list[tuple[NDArray[np.int32], tuple[str, ...]]]":
    """Find the segments of each text: tokens [start, stop) int32[K, 2] and K roles.

    A token belongs to the message that its first character belongs to.

    Args:
        begins: int64[T], the first character that each token stands for, text after text.
        sizes: tokens of each text.
        runs: for each text, which message wrote which characters, in order.
        roles: for each text, the role of each owner; that of `NOBODY` is `template`.
    """
    if len(sizes) == 1 and len(begins) and runs[0] and (begins[1:] >= begins[:-1]).all():
        return [_of_one(begins, runs[0], roles[0])]
    # All texts at once, each at places of its own: a few large arrays take less time than many small ones.
    every = [of_text or [(0, 0, NOBODY)] for of_text in runs]
    counts = np.array([len(of_text) for of_text in every])
    starts, owners = np.array([(start, owner) for of_text in every for start, _, owner in of_text]).reshape(-1, 2).T
    firsts = np.cumsum(sizes) - sizes
    strides = _TEXT_STRIDE * np.arange(len(every))
    at = np.searchsorted(starts + np.repeat(strides, counts), begins + np.repeat(strides, sizes), side="right") - 1
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
    found = []
    for first, last, names in zip(held, [*held[1:], len(borders)], roles, strict=True):
        named = tuple([TEMPLATE if owner == NOBODY else names[owner] for owner in of_segments[first:last]])
        found.append((bounds[first:last], named))
    return found


def _of_one(
    begins: "NDArray[np.int64]", runs: Sequence[Run], roles: Sequence[str]
) -> "tuple[NDArray[np.int32], tuple[str, ...]]":
    """Find the segments of one text whose tokens are in order, from its few runs."""
    firsts: list[int] = np.searchsorted(begins, [start for start, _, _ in runs]).tolist()
    borders: list[int] = []
    owners: list[int] = []
    for first, last, (_, _, owner) in zip(firsts, [*firsts[1:], len(begins)], runs, strict=True):
        if first < last and owners[-1:] != [owner]:
            borders.append(first)
            owners.append(owner)
    bounds = np.array([*zip(borders, [*borders[1:], len(begins)], strict=True)], dtype=np.int32)
    return bounds, tuple([TEMPLATE if owner == NOBODY else roles[owner] for owner in owners])
