"""Learned stretches of a message's content → what of its text is not learned."""

from forge_data.chat_template._trace import Trace
from forge_data.formats._samples import Ranges
from forge_data.masking._as_prompted import TurnEnds
from forge_data.masking._spans import Turns


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
