"""Messages and a compiled template → `Trace`: the text, and where each character came from."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import attrs

from forge_data.chat_template._limits import counted
from forge_data.chat_template._traced_messages import traced_turns
from forge_data.chat_template._traced_text import Leaf, Traced, pieces_of

if TYPE_CHECKING:
    from jinja2 import Template

_START = itemgetter(0)

NOBODY = -1
"""Owner of what the template writes outside of every turn."""

Run = tuple[int, int, int]
"""(start, stop, owner): characters [start, stop) were written by the loop over messages while it was at message `owner`."""

Stretch = tuple[int, int, Leaf, int]
"""(start, stop, leaf, offset): the characters [start, stop) are those of the leaf from `offset` on."""


@attrs.frozen(eq=False)
class Trace:
    """One conversation as its template wrote it."""

    text: str
    leaves: list[dict[str, Leaf]]
    """By message, its strings by field: `content`, `tool_calls[0].function.name`, ..."""
    stretches: list[Stretch]
    """Parts of the text that came from a leaf, in order."""
    runs: list[Run]
    """All of the text, in order; none is empty, and no two neighbours have one owner."""
    marked: list[tuple[int, int]]
    """Parts within `{% generation %}`."""

    _of: dict[int, list[Stretch]] = attrs.field(init=False, factory=dict)
    _bodies: dict[int, list[tuple[int, int]]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for stretch in self.stretches:
            self._of.setdefault(stretch[2].message, []).append(stretch)
        for start, stop, owner in self.runs:
            if not self.text[start:stop].isspace():
                self._bodies.setdefault(owner, []).append((start, stop))

    def of(self, message: int) -> list[Stretch]:
        """List the parts of the text that came from a message, in order."""
        return self._of.get(message, [])

    def body(self, message: int) -> tuple[int, int] | None:
        """Return where the loop over messages wrote a message; None if nowhere, or in several parts."""
        bodies = self._bodies.get(message, [])
        return bodies[0] if len(bodies) == 1 else None

    def has_text(self, message: int) -> bool:
        """Tell whether a message has any text."""
        return any(leaf.text.strip() for leaf in self.leaves[message].values())

    def has_body(self, message: int) -> bool:
        """Tell whether the loop over messages wrote anything for a message."""
        return message in self._bodies

    def is_written(self, message: int) -> bool:
        """Tell whether anything in the text is of a message."""
        return bool(self.of(message)) or self.has_body(message)

    def within(self, start: int, stop: int) -> list[Stretch]:
        """List the parts of [start, stop) that came from any message, in order."""
        return self.stretches[bisect_left(self.stretches, start, key=_START) : bisect_left(self.stretches, stop, key=_START)]

    def end_of_turns(self) -> int:
        """Return where the body of the last turn ends."""
        return next((stop for _, stop, owner in reversed(self.runs) if owner != NOBODY), 0)


class _MarkReader:
    """Turns the marks of a text, one after the other, into runs and marked spans."""

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
            # `continue` and `break` leave no mark of their own: loops that began within this one are over too.
            loops = self._loops
            for at, (begun, _) in enumerate(loops):
                if begun == loop:
                    del loops[at:]
                    break
            if kind == "enter":
                loops.append((loop, message))
            self._change_owner(place, loops[-1][1] if loops else NOBODY)

    def finish(self, place: int) -> None:
        """End the last run, at the end of the text."""
        self._change_owner(place, NOBODY - 1)

    def _change_owner(self, place: int, owner: int) -> None:
        if owner == self._owner:
            return
        if place > self._since:
            if self.runs and self.runs[-1][2] == self._owner:
                self.runs[-1] = (self.runs[-1][0], place, self._owner)
            else:
                self.runs.append((self._since, place, self._owner))
        self._since, self._owner = place, owner


def render(template: "Template", messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> Trace:
    """Render a conversation with a trace.

    Raises:
        Exception: whatever the template raises.
    """
    turns, leaves = traced_turns(messages)
    return assemble(counted(template, {**variables, "messages": turns}), leaves)


def assemble(chunks: Iterable[str], leaves: list[dict[str, Leaf]]) -> Trace:
    """Join the chunks that a template wrote into one traced text."""
    reader = _MarkReader()
    texts: list[str] = []
    stretches: list[Stretch] = []
    at = 0
    for chunk in chunks:
        if type(chunk) is Traced:
            for start, stop, origin, offset in pieces_of(chunk):
                if isinstance(origin, Leaf):
                    stretches.append((at + start, at + stop, origin, offset))
                else:
                    reader.mark(at + start, *origin)
        texts.append(chunk)
        at += len(chunk)
    reader.finish(at)
    return Trace("".join(texts), leaves, stretches, reader.runs, reader.marked)


def template_prefix(trace: Trace, message: int, start: int, stop: int) -> tuple[str, bool]:
    """Return the text before a turn's first content, and whether that content is the turn's own.

    Where a name, an id or another message comes first, the text is not all that the template writes before the content.
    """
    stretches = trace.within(start, stop)
    if not stretches:
        return trace.text[start:stop], True
    first, _, leaf, _ = stretches[0]
    return trace.text[start:first], leaf.message == message and (is_content(leaf) or leaf.field.startswith("tool_calls"))


def foreign_text(trace: Trace, message: int, start: int, stop: int) -> str:
    """Return text of another message within [start, stop), if it is more than blanks."""
    others = (
        trace.text[first:last]
        for first, last, leaf, _ in trace.within(start, stop)
        if leaf.message != message and is_content(leaf)
    )
    return next((text for text in others if text.strip()), "")


def is_content(leaf: Leaf) -> bool:
    """Tell whether a leaf is content or reasoning, rather than a name or an id."""
    return leaf.field.startswith(("content", "reasoning", "thinking"))
