"""Who wrote which characters to who wrote which tokens: the segments of an example."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_data._trace_render import NOBODY, Run, Trace
from forge_data._turns import says

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEMPLATE = "template"


def speakers(trace: Trace) -> list[Run]:
    """The runs of a conversation, where what a message says is its own even if another's turn, or none, holds it.

    A system message that a template writes into the first user's turn is the system's.
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
    for start, stop, owner in trace.runs:
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


def segments(
    offsets: "NDArray[np.int64]", runs: Sequence[Run], roles: Sequence[str]
) -> tuple["NDArray[np.int32]", tuple[str, ...]]:
    """int32[K, 2] and K roles: the tokens [start, stop) of each segment; a token is whose its first character is.

    Args:
        offsets: int64[S, 2], the characters that each token stands for.
        runs: the text in order, by who wrote it.
        roles: the role of each owner; of `NOBODY` it is `template`.
    """
    count = len(offsets)
    if not count:
        return np.zeros((0, 2), dtype=np.int32), ()
    if not runs:
        return np.array([[0, count]], dtype=np.int32), (TEMPLATE,)
    starts = np.array([start for start, _, _ in runs])
    owners = np.array([owner for _, _, owner in runs])
    owned = owners[np.searchsorted(starts, offsets[:, 0], side="right") - 1]
    borders = np.flatnonzero(np.diff(owned)) + 1
    bounds = np.concatenate([[0], borders, [count]]).astype(np.int32)
    owners_in_order: list[int] = owned[bounds[:-1]].tolist()
    named = tuple([TEMPLATE if owner == NOBODY else roles[owner] for owner in owners_in_order])
    return np.stack([bounds[:-1], bounds[1:]], axis=1), named
