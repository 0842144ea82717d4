"""Learned stretches of a message's content → what of its text is not learned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forge_data.chat_template._trace import Run, Trace
from forge_data.formats._samples import Note, Ranges
from forge_data.masking._as_prompted import TurnEnds
from forge_data.masking._spans import Turns

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHOWN = 3
"""Tokens that a note shows."""


def masked_of(
    trace: Trace, index: int, content: str | None, ranges: Ranges, turns: Turns, ends: TurnEnds
) -> list[tuple[int, int]] | None:
    """Return the characters [start, stop) of a message's learned spans that are not learned.

    All that it says but the stretches: reasoning and calls too, and not the token that ends it. A token that holds a character
    of these is not learned, so one that straddles a border is not.

    Args:
        trace: the text.
        index: number of the message.
        content: its content, as the row has it.
        ranges: the learned stretches of that.
        turns: the learned spans.
        ends: what ends a turn.

    Returns:
        None where the text does not say which of its characters are those of the content.
    """
    written = [each for each in trace.of(index) if each[2].field == "content"]
    if (content or "").strip() and (not written or any(offset < 0 or leaf.text != content for _, _, leaf, offset in written)):
        return None
    learned = [
        (start + max(first, offset) - offset, start + min(last, offset + stop - start) - offset)
        for start, stop, _, offset in written
        for first, last in ranges
        if max(first, offset) < min(last, offset + stop - start)
    ]
    own = trace.of(index)
    masked: list[tuple[int, int]] = []
    for start, stop in [(start, stop) for start, stop, owner in turns.owned if owner == index] or [
        each[:2] for each in written
    ]:
        at, end = start, max((last for _, last, _, _ in own if start < last <= stop), default=start)
        if any(leaf.field.startswith("tool_calls") for _, _, leaf, _ in own):
            # What the template writes behind the last word of a call is the call's.
            end += ends.place(trace.text[end:stop])
        for first, last in sorted(learned):
            if start <= first and last <= end:
                masked.append((at, first))
                at = last
        masked.append((at, end))
    return [(start, stop) for start, stop in masked if start < stop]


def without_masked(
    text: str,
    runs: Sequence[Run],
    masked: Sequence[tuple[int, int]],
    offsets: "NDArray[np.int64]",
    trained: "NDArray[np.bool_]",
) -> tuple["NDArray[np.bool_]", list[Note]]:
    """Take the tokens that hold a masked character out of those that are learned.

    Noted is, for each message, what straddles a border.

    Args:
        text: the text.
        runs: which message wrote which of its characters.
        masked: characters of which no token is learned.
        offsets: int64[S, 2], of the text's tokens.
        trained: bool[S], those that are learned otherwise.
    """
    inside = np.zeros(len(text) + 2, dtype=np.int64)
    for start, stop in masked:
        inside[start + 1 : stop + 1] = 1
    before, (begins, ends) = inside.cumsum(), offsets.T
    held, size = before[ends] - before[begins], ends - begins
    # A token that stands for no character is masked with those on both sides.
    hidden = (held > 0) | ((size == 0) & (inside[begins] > 0) & (inside[begins + 1] > 0))
    lost: dict[int, list[str]] = {}
    for at in np.flatnonzero(trained & (held > 0) & (held < size)).tolist():
        start, stop = offsets[at].tolist()
        owner = next((owner for first, last, owner in runs if first < stop and start < last and owner >= 0), -1)
        lost.setdefault(owner, []).append(text[start:stop])
    notes = [
        Note(
            "straddling_token",
            f"messages[{owner}].content",
            f"not learned for a border within them: {', '.join(map(repr, tokens[:_SHOWN]))}"
            + (f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""),
        )
        for owner, tokens in lost.items()
    ]
    return trained & ~hidden, notes
