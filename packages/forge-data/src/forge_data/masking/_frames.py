"""Conversation of a known layout → what stands around the contents of all with its roles.

`Layout` proves that the template's text depends on the contents only by writing them. So the text of further contents, its
learned spans and its owners follow from those of one conversation, and nothing is rendered.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from forge_data.chat_template._trace import Run, Trace
from forge_data.masking._loss_mask import Span

_Place = tuple[int, int]
"""So many characters behind so many contents."""


class Filled(NamedTuple):
    """A conversation as text, with what is learned of it and whose it is."""

    text: str
    spans: list[Span]
    runs: list[Run]


class Frame(NamedTuple):
    """What stands around the contents of conversations with the same roles."""

    literals: tuple[str, ...]
    """Texts of the template: before each content, and after the last."""
    absent: tuple[str, ...]
    """Texts that no content may have in it."""
    spans: tuple[tuple[_Place, ...], ...]
    runs: tuple[tuple[_Place, _Place, int], ...]

    def fill(self, contents: Sequence[str]) -> Filled:
        """Write contents: one for each message, without blanks at its ends."""
        at = len(self.literals[0])
        ends, parts = [0], [self.literals[0]]
        for content, literal in zip(contents, self.literals[1:], strict=True):
            at += len(content)
            ends.append(at)
            at += len(literal)
            parts += content, literal
        return Filled(
            "".join(parts),
            [Span._make([ends[before] + behind for before, behind in span]) for span in self.spans],
            [(ends[first] + start, ends[last] + stop, owner) for (first, start), (last, stop), owner in self.runs],
        )


def frame_of(trace: Trace, filled: Filled, contents: Sequence[str], absent: tuple[str, ...]) -> Frame | None:
    """Make the frame of a conversation of a known layout.

    None where its text is not every content once, in order, with the template's text around them.
    """
    stretches = trace.stretches
    if [leaf.message for _, _, leaf, _ in stretches] != [*range(len(contents))] or filled.text != trace.text:
        return None
    starts, stops = [start for start, _, _, _ in stretches], [stop for _, stop, _, _ in stretches]
    literals = tuple(trace.text[stop:start] for stop, start in zip([0, *stops], [*starts, len(trace.text)], strict=True))
    ends = [0, *stops]

    def place(at: int) -> _Place:
        before = bisect_right(stops, at)
        return before, at - ends[before]

    frame = Frame(
        literals,
        absent,
        tuple(tuple(map(place, span)) for span in filled.spans),
        tuple((place(start), place(stop), owner) for start, stop, owner in filled.runs),
    )
    inside = any(start < at < stop for start, stop in zip(starts, stops, strict=True) for at in _edges(filled))
    return None if inside or frame.fill(contents) != filled else frame


def _edges(filled: Filled) -> list[int]:
    return [at for span in filled.spans for at in span] + [at for start, stop, _ in filled.runs for at in (start, stop)]
