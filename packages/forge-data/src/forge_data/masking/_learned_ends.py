"""Which ends of turns are learned → the ends that are not, in characters of the text."""

from collections.abc import Mapping

from forge_data.chat_template._template import RenderedChat
from forge_data.formats._samples import Note
from forge_data.masking._as_prompted import TurnEnds
from forge_data.masking._loss_mask import Span
from forge_data.masking._spans import Turns

EVERY, LAST, NONE, TURN_END = "all", "last", "none", "turn"
"""What `train_on_turn_end` may be: the ends of all turns, of the last learned turn, of none, of each learned turn."""


class UnclearEndError(Exception):
    """Where the end of message `index` begins cannot be told."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def unlearned_ends(
    which: str, rendered: RenderedChat, text: str, turns: Turns, ends: TurnEnds, *, holds_last: bool
) -> dict[int, tuple[int, int]]:
    """Return by message the characters [start, stop) of the ends that are not learned.

    The end of a turn is the last token behind its content that may end one; without one, the plain text that closes it.

    Args:
        which: what `train_on_turn_end` says.
        rendered: the conversation.
        text: its text, with a stop token that was appended.
        turns: the learned spans of it.
        ends: the tokens that may end turns.
        holds_last: whether the last learned turn of the row is in this text.

    Raises:
        UnclearEndError: a turn ends in plain text that is not told from what was said.
    """
    if which in (EVERY, TURN_END):
        return {}
    found = {index: _end(rendered, text, index, span, ends) for index, span in turns.last.items()}
    closed: Mapping[int, tuple[int, int]] = {index: end for index, end in found.items() if end is not None} | turns.ends
    last = max(closed, default=None) if which == LAST and holds_last else None
    return {index: end for index, end in closed.items() if index != last}


def _end(rendered: RenderedChat, text: str, index: int, span: Span, ends: TurnEnds) -> tuple[int, int] | None:
    """Find what ends a turn; None where nothing does."""
    token = ends.closing(text, span)
    if token is not None:
        return token
    own = [last for _, last, leaf, _ in rendered.trace.within(span.start, span.stop) if leaf.message == index]
    said = max(own, default=span.start)
    if not text[said : span.stop].strip():
        return None
    if not own or rendered.messages[index].get("tool_calls"):
        raise UnclearEndError(index)
    return said, span.closing_end


def unlearned_end(index: int) -> Note:
    """Note a turn whose end is not learned."""
    return Note(
        "untrained_turn_end", f"messages[{index}]", "the end of this turn is not learned (train_on_turn_end)", warns=True
    )
