"""Messages and a compiled template to a `Trace`: the text, who wrote each character, and where it came from."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import attrs

from forge_data.chat_template._traced_messages import turns_of
from forge_data.chat_template._traced_text import Leaf, Traced, pieces_of

if TYPE_CHECKING:
    from jinja2 import Template

_START = itemgetter(0)

NOBODY = -1
"""The owner of what the template writes outside of every turn."""

Run = tuple[int, int, int]
"""(start, stop, owner): who wrote the characters [start, stop): a message, by the loop over messages that was at it."""

Stretch = tuple[int, int, Leaf, int]
"""(start, stop, leaf, offset): the characters [start, stop) are those of the leaf from `offset` on."""


@attrs.frozen(eq=False)
class Trace:
    """One conversation as its template wrote it."""

    text: str
    leaves: list[dict[str, Leaf]]
    """By message, its strings by field: `content`, `tool_calls[0].function.name`, ..."""
    stretches: list[Stretch]
    """What of the text came from a leaf, in order."""
    runs: list[Run]
    """All of the text, in order; none is empty, and no two neighbours have one owner."""
    marked: list[tuple[int, int]]
    """What stands within `{% generation %}`."""

    _of: dict[int, list[Stretch]] = attrs.field(init=False, factory=dict)
    _bodies: dict[int, list[tuple[int, int]]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for stretch in self.stretches:
            self._of.setdefault(stretch[2].message, []).append(stretch)
        for start, stop, owner in self.runs:
            if not self.text[start:stop].isspace():
                self._bodies.setdefault(owner, []).append((start, stop))

    def of(self, message: int) -> list[Stretch]:
        """What of the text came from a message, in order."""
        return self._of.get(message, [])

    def body(self, message: int) -> tuple[int, int] | None:
        """The stretch that the loop over messages wrote for a message; None if there is none, or several."""
        bodies = self._bodies.get(message, [])
        return bodies[0] if len(bodies) == 1 else None

    def said(self, message: int) -> bool:
        """Whether a message says anything at all."""
        return any(leaf.text.strip() for leaf in self.leaves[message].values())

    def writes(self, message: int) -> bool:
        """Whether the loop over messages wrote anything for a message."""
        return message in self._bodies

    def within(self, start: int, stop: int) -> list[Stretch]:
        """What of the stretch [start, stop) came from any message, in order."""
        return self.stretches[bisect_left(self.stretches, start, key=_START) : bisect_left(self.stretches, stop, key=_START)]

    def outro(self) -> int:
        """Where the last turn's body ends, and what the template writes at the end begins."""
        return next((stop for _, stop, owner in reversed(self.runs) if owner != NOBODY), 0)


class _Walk:
    """The marks of a text, one after the other, to runs and marked spans."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.marked: list[tuple[int, int]] = []
        self._loops: list[tuple[int, int]] = []
        self._since = 0
        self._owner = NOBODY
        self._learning: int | None = None

    def mark(self, place: int, kind: str, loop: int, message: int) -> None:
        if kind == "learn":
            self._learning = place if self._learning is None else self._learning
        elif kind == "unlearn":
            if self._learning is not None:
                self.marked.append((self._learning, place))
            self._learning = None
        else:
            # A `continue` or `break` leaves no mark of its own: what was begun within this loop is over too.
            loops = self._loops
            for at, (begun, _) in enumerate(loops):
                if begun == loop:
                    del loops[at:]
                    break
            if kind == "enter":
                loops.append((loop, message))
            self.pass_to(place, loops[-1][1] if loops else NOBODY)

    def pass_to(self, place: int, owner: int) -> None:
        if owner == self._owner:
            return
        if place > self._since:
            if self.runs and self.runs[-1][2] == self._owner:
                self.runs[-1] = (self.runs[-1][0], place, self._owner)
            else:
                self.runs.append((self._since, place, self._owner))
        self._since, self._owner = place, owner


def render(template: "Template", messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> Trace:
    """The text of a conversation, traced.

    Raises:
        Exception: whatever the template raises, which is a program of somebody else's.
    """
    turns, leaves = turns_of(messages)
    return assemble(template.generate(messages=turns, **variables), leaves)


def assemble(chunks: Iterable[str], leaves: list[dict[str, Leaf]]) -> Trace:
    """What a template wrote, bit by bit, as one text."""
    walk = _Walk()
    texts: list[str] = []
    stretches: list[Stretch] = []
    at = 0
    for chunk in chunks:
        if type(chunk) is Traced:
            for start, stop, origin, offset in pieces_of(chunk):
                if isinstance(origin, Leaf):
                    stretches.append((at + start, at + stop, origin, offset))
                else:
                    walk.mark(at + start, *origin)
        texts.append(chunk)
        at += len(chunk)
    walk.pass_to(at, NOBODY - 1)
    return Trace("".join(texts), leaves, stretches, walk.runs, walk.marked)


def literal(trace: Trace, message: int, start: int, stop: int) -> tuple[str, bool]:
    """What a turn begins with that came from no message, and whether it is what the message says that comes next.

    It may be a name or an id, or another message's; then what comes before is not all that the template writes of itself.
    """
    told = trace.within(start, stop)
    if not told:
        return trace.text[start:stop], True
    first, _, leaf, _ = told[0]
    return trace.text[start:first], leaf.message == message and (says(leaf) or leaf.field.startswith("tool_calls"))


def stranger(trace: Trace, message: int, start: int, stop: int) -> str:
    """What of a stretch of the text another message says, if it is more than blanks."""
    others = (
        trace.text[first:last] for first, last, leaf, _ in trace.within(start, stop) if leaf.message != message and says(leaf)
    )
    return next((text for text in others if text.strip()), "")


def says(leaf: Leaf) -> bool:
    """Whether a leaf is what a message says, rather than its name or an id."""
    return leaf.field.startswith(("content", "reasoning", "thinking"))
